"""The adapter for Flax Linen: the "params" collection becomes params, all others model state."""

import contextlib
import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import jax
from flax import errors, linen

from jaxdp.models.base import (
    CARRY,
    Model,
    call_arguments,
    keep_dtypes,
    modes,
    named,
    refuse_losses,
    rehearse,
)


def from_linen(module: linen.Module) -> Model:
    """Return the `Model` of a Linen module; all collections except "params" (batch_stats, carry,
    ...) are its state.

    The collection "carry" is per-example state ([example, ...]). Collections filled by `sow` are
    excluded, and losses in them refused: nothing would add them (UsageError in `init`). Every RNG
    stream that the module uses gets a key derived from the microbatch's; evaluation has no
    "dropout" stream."""
    evaluated = in_evaluation(module)
    streams = {"dropout"}  # and those that `rehearse` discovers
    sown: set[tuple[str, str]] = set()

    def keys(key: jax.Array, names: set[str]) -> dict[str, jax.Array]:
        numbers = {name: zlib.crc32(name.encode()) for name in names} | {"dropout": 1}
        folded = {name: jax.random.fold_in(key, numbers[name]) for name in sorted(names)}
        if "params" in names:
            folded["params"] = key
        return folded

    def run(params, model_state, batch, key, train, names):
        """Return (outputs, collections that changed), with keys for the RNG streams `names`."""
        args, kwargs = call_arguments(module.__call__, batch, train, key)
        variables, rngs = {"params": params, **model_state}, keys(key, names)
        mutable = [name for name in model_state if train or name == CARRY]
        called = module if train else evaluated
        return called.apply(variables, *args, rngs=rngs, mutable=mutable, **kwargs)

    def init(key, batch):
        args, kwargs = call_arguments(module.__call__, batch, False, key)
        with recorded_sow(sown):
            rngs = keys(key, {"params", "dropout"})
            state = dict(linen.meta.unbox(evaluated.init(rngs, *args, **kwargs)))
            params = state.pop("params", {})
            rehearse(discover_streams, params, state, batch, key)
        refuse_losses(sorted(sown))
        for collection, _ in sown:
            state.pop(collection, None)
        return params, state

    def discover_streams(params, model_state, batch, key, train):
        """Run; add each RNG stream that lacks a key to `streams` and retry."""
        while True:
            try:
                return run(params, model_state, batch, key, train, streams)
            except errors.InvalidRngError as error:
                name = named(r'PRNG for "(.+?)"', error)
                if name in streams:  # a lifted transformation did not pass the stream on
                    name = "params"
                if not name or name in streams:
                    raise
                streams.add(name)

    def apply(params, model_state, batch, key, train):
        names = {"params", *streams}
        if not train:
            names.discard("dropout")
        outputs, changed = run(params, model_state, batch, key, train, names)
        return outputs, keep_dtypes(model_state, model_state | changed)

    def trained(params, state):
        return evaluated.bind({"params": params, **state})

    return Model(init, apply, module=trained)


@contextlib.contextmanager
def recorded_sow(sown: set[tuple[str, str]]) -> Iterator[None]:
    """Add the (collection, name) of every value that a module sows inside this context."""
    sow = linen.Module.sow

    def record(self: Any, collection: str, name: str, *args: Any, **more: Any) -> bool:
        sown.add((collection, name))
        return sow(self, collection, name, *args, **more)

    linen.Module.sow = record  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        linen.Module.sow = sow  # type: ignore[method-assign]


def in_evaluation(module: linen.Module) -> linen.Module:
    """Return a copy of the module with its mode fields (such as deterministic: False), and those of
    a config dataclass in it, set to evaluation; training uses the original."""
    evaluation = modes(False)

    def changed_fields(x: Any) -> dict[str, Any]:
        changes = {}
        for field in dataclasses.fields(x):
            old: Any = getattr(x, field.name, None)
            new = old
            if isinstance(old, bool):
                new = evaluation.get(field.name, old)
            elif dataclasses.is_dataclass(old) and not isinstance(old, type | linen.Module):
                inner = changed_fields(old)
                new = dataclasses.replace(old, **inner) if inner else old
            if field.init and new is not old:
                changes[field.name] = new
        return changes

    changes = changed_fields(module)
    return module.clone(**changes) if changes else module
