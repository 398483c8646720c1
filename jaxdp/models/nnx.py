"""Flax NNX modules as pure functions: split once by variable kind, merge in every call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jaxdp.errors import UsageError
from jaxdp.models.base import CARRY, Model, at, call_arguments, for_each_example, keep_dtypes, nest
from jaxdp.models.scan import scan_blocks


class Carry(nnx.Variable):
    """State that belongs to an example, such as an LSTM's: declared for one, as `Carry(jnp.zeros(width))`, and
    [example, ...] where the model is called in training and evaluation."""


class Blocks(nnx.Module):
    """`count` modules of one shape, one after the other: x -> module(x, *args), each with parameters of its own.

    make: a function of `nnx.Rngs` that makes one. Their variables are stacked [block, ...], and scanned, so that
    compilation takes the time of one, and ZeRO-3 has one at a time whole (`scan_blocks`).
    """

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], count: int, *, rngs: nnx.Rngs):
        self.stack = nnx.vmap(make)(rngs.split(count))
        self.path = ""  # in the model; `from_nnx` fills it in

    def __call__(self, x: Any, *args: Any) -> Any:
        graph, *states = nnx.split(self.stack, nnx.Param, ...)
        kinds, rest = nnx.to_flat_state(states[0]), states[1]

        def block(params: Any, x: Any, rest: nnx.State) -> tuple[Any, nnx.State]:
            module = nnx.merge(graph, _to_state(kinds, params), rest, copy=True)
            return module(x, *args), nnx.state(module, nnx.Not(nnx.Param))

        x, rest = scan_blocks(block, _to_dict(kinds), x, rest)
        nnx.update(self.stack, rest)
        return x


def from_nnx(make: Callable[[nnx.Rngs], nnx.Module]) -> Model:
    """The model of a function that makes an NNX module from `nnx.Rngs`.

    params and model_state are nested dicts by attribute path. Every RNG stream of the module restarts in each call
    from the key of the microbatch, so that dropout does not depend on where or when it is computed. Raises UsageError
    where the function gives something else.
    """
    graphs: list[Any] = []

    @jax.jit  # traced here, and not again where `init` calls it
    def made(key: jax.Array) -> Any:
        graph, state = nnx.split(_made(make, nnx.Rngs(key)))
        graphs.append(graph)
        return state

    state = jax.eval_shape(made, jax.eval_shape(lambda: jax.random.key(0)))
    module = nnx.merge(graphs[0], state)
    stacks = [(path, part) for path, part in nnx.iter_modules(module) if isinstance(part, Blocks)]
    stacked = [(*path, "stack") for path, _ in stacks]
    for path, part in stacks:
        part.path = "/".join(map(str, (*path, "stack")))
    module.train()
    train_def, *states = nnx.split(module, nnx.Param, nnx.RngState, Carry, ...)
    module.eval()
    eval_def = nnx.graphdef(module)
    kinds = [nnx.to_flat_state(state) for state in states]
    params_kind, rng_kind, carry_kind, rest_kind = kinds

    def init(key: jax.Array, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        states = nnx.split_state(made(key), nnx.Param, nnx.RngState, Carry, ...)
        params, _, carry, rest = (_to_dict(nnx.to_flat_state(state)) for state in states)
        return params, ({**rest, CARRY: for_each_example(carry, batch)} if carry_kind else rest)

    def turn(path: tuple, x: jax.Array) -> jax.Array:
        """Carry of stacked blocks: [example, block, ...] to and from [block, example, ...]."""
        return x.swapaxes(0, 1) if any(path[: len(stack)] == stack for stack in stacked) else x

    def apply(params: Any, model_state: Any, batch: dict[str, jax.Array], key: jax.Array, train: bool):
        rngs = [(path, v.replace(_restart(v, key, i))) for i, (path, v) in enumerate(rng_kind)]
        carry = [(path, v.replace(turn(path, at(model_state[CARRY], path)))) for path, v in carry_kind]
        module = nnx.merge(
            train_def if train else eval_def,
            _to_state(params_kind, params),
            nnx.from_flat_state(rngs),
            nnx.from_flat_state(carry),
            _to_state(rest_kind, model_state),
            copy=True,
        )
        args, kwargs = call_arguments(module.__call__, batch, train)
        outputs = module(*args, **kwargs)
        new = dict(nnx.to_flat_state(nnx.state(module)))
        rest = _to_dict([(path, new[path]) for path, _ in rest_kind])
        if carry_kind:
            rest[CARRY] = nest((path, turn(path, new[path].get_value())) for path, _ in carry_kind)
        return outputs, keep_dtypes(model_state, rest)

    return Model(init, apply, tuple(part.path for _, part in stacks))


def _made(make: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs) -> nnx.Module:
    """The module, whose `nnx.Embed`s and `nnx.BatchNorm`s give the dtype they are given, as every other layer does: of
    the first it is fixed to that of their parameters, of the second to that of their averages, which stay float32."""
    module: Any = make(rngs)
    if not isinstance(module, nnx.Module):
        raise UsageError(f"model: what takes rngs must give a Flax NNX module, not {type(module).__name__}; return one")
    for _, part in nnx.iter_modules(module):
        if isinstance(part, nnx.Embed) and part.dtype == part.param_dtype:
            part.dtype = None
        if isinstance(part, nnx.BatchNorm) and part.dtype is None and part.promote_dtype is dtypes.promote_dtype:
            part.promote_dtype = _as_they_are
    return module


def _as_they_are(arrays: Any, **more: Any) -> Any:
    return arrays


def _restart(variable: nnx.Variable, key: jax.Array, i: int) -> jax.Array:
    """The value of the i-th RNG variable: a key of its own, or a count of zero."""
    if issubclass(variable.type, nnx.RngKey):
        new = jax.random.fold_in(key, i)
        shape = variable.get_value().shape
        return jax.random.split(new, shape) if shape else new
    return jnp.zeros(variable.get_value().shape, variable.get_value().dtype)


def _to_dict(flat: Any) -> dict[str, Any]:
    return nest((path, variable.get_value()) for path, variable in flat)


def _to_state(kinds: Any, tree: dict[str, Any]) -> nnx.State:
    return nnx.from_flat_state([(path, variable.replace(at(tree, path))) for path, variable in kinds])
