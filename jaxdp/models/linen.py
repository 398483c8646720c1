"""The adapter for Flax Linen: the "params" collection becomes params, all others model state."""

import contextlib
import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import jax
from flax import errors, linen

from jaxdp.models.base import CARRY, Model, call_arguments, keep_dtypes, modes, named, rehearse
from jaxdp.run import user_errors


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

    def run(
        variables: Any,
        batch: dict[str, jax.Array],
        key: jax.Array,
        train: bool,
        rngs: Any,
        mutable: Any,
    ) -> Any:
        args, kwargs = call_arguments(module.__call__, batch, train, key)
        called = module if train else evaluated
        return called.apply(variables, *args, rngs=rngs, mutable=list(mutable) or False, **kwargs)

    def keys(key: jax.Array, names: set[str]) -> dict[str, jax.Array]:
        def number(name):
            return 1 if name == "dropout" else zlib.crc32(name.encode())

        return {
            name: key if name == "params" else jax.random.fold_in(key, number(name))
            for name in sorted(names)
        }

    def init(key: jax.Array, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        args, kwargs = call_arguments(module.__call__, batch, False, key)
        with recorded_sow(sown):
            variables = linen.meta.unbox(
                evaluated.init(keys(key, {"params", "dropout"}), *args, **kwargs)
            )
            params, state = variables.pop("params", {}), dict(variables)
            rehearse(
                lambda params, state: rehearsed(params, state, batch, key), params, state, batch
            )
        user_errors.refuse_losses(sorted(sown))
        return params, {
            k: tree for k, tree in state.items() if k not in {collection for collection, _ in sown}
        }

    def rehearsed(params: Any, state: Any, batch: dict[str, jax.Array], key: jax.Array) -> Any:
        """Trace a training call; add each RNG stream that lacks a key to `streams` and retry."""
        while True:
            try:
                return run({"params": params, **state}, batch, key, True, keys(key, streams), state)
            except errors.InvalidRngError as error:
                name = named(r'PRNG for "(.+?)"', error)
                name = (
                    "params" if name in streams else name
                )  # a lifted transformation did not pass the stream on
                if not name or name in streams:
                    raise
                streams.add(name)

    def apply(
        params: Any, model_state: Any, batch: dict[str, jax.Array], key: jax.Array, train: bool
    ):
        mutable = [name for name in model_state if train or name == CARRY]
        rngs = keys(key, {"params", *streams} if train else {"params", *streams} - {"dropout"})
        result = run({"params": params, **model_state}, batch, key, train, rngs, mutable)
        if not mutable:
            return result, model_state
        return result[0], keep_dtypes(model_state, model_state | result[1])

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

    def convert(x: Any) -> Any:
        if (
            not dataclasses.is_dataclass(x)
            or isinstance(x, type)
            or (isinstance(x, linen.Module) and x is not module)
        ):
            return x
        old = {
            f.name: getattr(x, f.name)
            for f in dataclasses.fields(x)
            if f.init and hasattr(x, f.name)
        }
        new = {
            k: evaluation[k] if k in evaluation and isinstance(v, bool) else convert(v)
            for k, v in old.items()
        }
        changes: dict[str, Any] = {k: v for k, v in new.items() if v is not old[k]}
        return (
            (x.clone(**changes) if x is module else dataclasses.replace(x, **changes))
            if changes
            else x
        )

    return convert(module)
