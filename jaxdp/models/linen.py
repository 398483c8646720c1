"""The adapter for Flax Linen: the "params" collection becomes params, all others model state."""

import dataclasses
import zlib
from typing import Any

import jax
from flax import errors, linen

from jaxdp.errors import UsageError
from jaxdp.models.base import CARRY, Model, call_arguments, keep_dtypes, modes, named, rehearse


def from_linen(module: linen.Module) -> Model:
    """Return the `Model` of a Linen module; all collections except "params" (batch_stats, carry, ...) are its state.

    The collection "carry" is per-example state ([example, ...]). Collections filled by `sow` are excluded, and
    those of losses refused: nothing would add them (UsageError in `init`). Every RNG stream that the module uses gets a
    key derived from the microbatch's; evaluation has no "dropout" stream.
    """
    evaluated = in_evaluation(module)
    streams = {"dropout"}  # and those that `rehearse` discovers

    def run(variables: Any, batch: dict[str, jax.Array], key: jax.Array, train: bool, rngs: Any, mutable: Any) -> Any:
        args, kwargs = call_arguments(module.__call__, batch, train, key)
        called = module if train else evaluated
        return called.apply(variables, *args, rngs=rngs, mutable=list(mutable) or False, **kwargs)

    def keys(key: jax.Array, names: set[str]) -> dict[str, jax.Array]:
        number = lambda name: 1 if name == "dropout" else zlib.crc32(name.encode())
        return {name: key if name == "params" else jax.random.fold_in(key, number(name)) for name in sorted(names)}

    def init(key: jax.Array, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        args, kwargs = call_arguments(module.__call__, batch, False, key)
        variables = linen.meta.unbox(evaluated.init(keys(key, {"params", "dropout"}), *args, **kwargs))
        params, state = variables.pop("params", {}), dict(variables)
        state.pop("intermediates", None)
        after = rehearse(lambda params, state: rehearsed(params, state, batch, key), params, state, batch)
        alike = lambda a, b: jax.tree.map(jax.numpy.shape, a) == jax.tree.map(jax.numpy.shape, b)
        kept = {k: tree for k, tree in state.items() if after is None or alike(tree, after.get(k))}
        if lost := [k for k in state if k not in kept and "loss" in k]:
            raise UsageError(
                f"model: what it sows into {lost[0]!r} would not be part of the loss; return it among the outputs, and "
                "add it in the loss"
            )
        return params, kept

    def rehearsed(params: Any, state: Any, batch: dict[str, jax.Array], key: jax.Array) -> Any:
        """Return the state after a training call; add each RNG stream that lacks a key to `streams` and retry."""
        while True:
            try:
                result = run({"params": params, **state}, batch, key, True, keys(key, streams), state)
                return result[1] if state else {}
            except errors.InvalidRngError as error:
                name = named(r'PRNG for "(.+?)"', error)
                name = "params" if name in streams else name  # a lifted transformation did not pass the stream on
                if not name or name in streams:
                    raise
                streams.add(name)

    def apply(params: Any, model_state: Any, batch: dict[str, jax.Array], key: jax.Array, train: bool):
        mutable = [name for name in model_state if train or name == CARRY]
        rngs = keys(key, {"params", *streams} if train else {"params", *streams} - {"dropout"})
        result = run({"params": params, **model_state}, batch, key, train, rngs, mutable)
        if not mutable:
            return result, model_state
        return result[0], keep_dtypes(model_state, model_state | result[1])

    trained = lambda params, state: evaluated.bind({"params": params, **state})
    return Model(init, apply, module=trained)


def in_evaluation(module: linen.Module) -> linen.Module:
    """Return a copy of the module with its mode fields (such as deterministic: False), and those of a config dataclass
    in it, set to evaluation; training uses the original."""
    evaluation = modes(False)

    def convert(x: Any) -> Any:
        if not dataclasses.is_dataclass(x) or isinstance(x, type) or (isinstance(x, linen.Module) and x is not module):
            return x
        old = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.init and hasattr(x, f.name)}
        new = {k: evaluation[k] if k in evaluation and isinstance(v, bool) else convert(v) for k, v in old.items()}
        changes: dict[str, Any] = {k: v for k, v in new.items() if v is not old[k]}
        return (x.clone(**changes) if x is module else dataclasses.replace(x, **changes)) if changes else x

    return convert(module)
