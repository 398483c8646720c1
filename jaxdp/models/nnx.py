"""The adapter for Flax NNX: split a module by variable kind once, merge it in every call."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jaxdp.errors import UsageError
from jaxdp.models.base import (
    CARRY,
    Model,
    at,
    call_arguments,
    for_each_example,
    keep_dtypes,
    modes,
    nest,
    rehearse,
)
from jaxdp.models.scan import PLAIN, PerBlock, scan_blocks
from jaxdp.run import user_errors


class Carry(nnx.Variable):
    """Per-example state, such as an LSTM's: declare it for one example, as
    `Carry(jnp.zeros(width))`; in a training or evaluation call it is [example, ...]."""


class Blocks(nnx.Module):
    """A chain of `count` modules of the same shape, x -> module(x, *args), each with its own
    parameters.

    make: a function of `nnx.Rngs` that returns one module. The variables are stacked [block, ...]
    and scanned: only one block is compiled, and ZeRO-3 gathers one block at a time (`scan_blocks`).
    """

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], count: int, *, rngs: nnx.Rngs):
        self.stack = nnx.vmap(make)(rngs.split(count))
        self.path = ""  # the path in the model; `from_nnx` sets it
        self.reading: Reading | None = None  # how the training step reads the parameters

    def __call__(self, x: Any, *args: Any) -> Any:
        graph, *states = nnx.split(self.stack, nnx.Param, ...)
        kinds, rest = nnx.to_flat_state(states[0]), states[1]

        def block(params: Any, x: Any, rest: nnx.State) -> tuple[Any, nnx.State]:
            module = nnx.merge(graph, _to_state(kinds, params), rest, copy=True)
            return module(x, *args), nnx.state(module, nnx.Not(nnx.Param))

        params, per_block = _to_dict(kinds), PLAIN
        if self.reading is not None:
            params, per_block = self.reading.of(params)
        x, rest = scan_blocks(block, params, x, rest, per_block)
        nnx.update(self.stack, rest)
        return x


class Reading:
    """How a training step reads the parameters of a `Blocks`, one block at a time.

    Args:
        full: the arrays [block, ...] that the module's variables have. A compiler removes them
            where only the scan reads parameters.
        stored: the same parameters as the step has them.
    """

    def __init__(self, full: Any, stored: Any, per_block: PerBlock):
        self.full, self.stored, self.per_block = full, stored, per_block
        self.trace, self.is_first = current_trace(), True

    def of(self, params: Any) -> tuple[Any, PerBlock]:
        """Return (what to scan, how to read it): `params` if the model has changed any of them."""
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(self.full), strict=True)
        if not all(x is y for x, y in pairs):
            return params, PerBlock(remat=self.per_block.remat)
        stored = self.stored
        if self.is_first and current_trace() == self.trace:  # else perhaps under a condition
            stored, self.is_first = self.per_block.reader.once(stored), False
        return stored, self.per_block


def current_trace() -> Any:
    """Return what differs inside of a function that JAX traces separately, such as a branch."""
    return jax.extend.core.get_opaque_trace_state()


def from_nnx(make: Callable[[nnx.Rngs], nnx.Module]) -> Model:
    """Return the `Model` of an NNX module class, or of a function from `nnx.Rngs` to an NNX module.

    params and model_state are nested dicts by attribute path. Each call reseeds every RNG stream of
    the module from the microbatch's key. What a call sows is dropped. Raises UsageError for a sown
    loss, or if `make` makes no NNX module."""
    graphs: dict[bool, Any] = {}
    stacks: list[tuple] = []  # paths of stacked blocks

    @jax.jit  # `init` reuses the trace of the `eval_shape` below
    def make_state(key: jax.Array) -> Any:
        module = _make_module(make, nnx.Rngs(key))
        stacks[:] = [
            (*path, "stack") for path, part in nnx.iter_modules(module) if isinstance(part, Blocks)
        ]
        for path, part in nnx.iter_modules(module):
            if isinstance(part, Blocks):
                part.path = "/".join(map(str, (*path, "stack")))
        for train in (False, True):
            _set_mode(module, train)
            graphs[train], state = nnx.split(module)
        return state

    state = jax.eval_shape(make_state, jax.eval_shape(lambda: jax.random.key(0)))
    kinds = [
        nnx.to_flat_state(part)
        for part in nnx.split_state(state, nnx.Param, nnx.RngState, Carry, ...)
    ]
    params_kind, rng_kind, carry_kind, rest_kind = kinds
    known = {path for kind in kinds for path, _ in kind}

    def init(key: jax.Array, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        states = nnx.split_state(make_state(key), nnx.Param, nnx.RngState, Carry, ...)
        params, _, carry, rest = (_to_dict(nnx.to_flat_state(state)) for state in states)
        model_state = {**rest, CARRY: for_each_example(carry, batch)} if carry_kind else rest
        rehearse(
            lambda params, state: apply(params, state, batch, key, True), params, model_state, batch
        )
        return params, model_state

    def swap_dims(path: tuple, x: jax.Array) -> jax.Array:
        """Swap the first two dims of stacked blocks' carry: [example, block, ...] to and from
        [block, example, ...].
        """
        return x.swapaxes(0, 1) if any(path[: len(stack)] == stack for stack in stacks) else x

    def merge(params: Any, model_state: Any, carry: list[Any], key: jax.Array, train: bool) -> Any:
        rngs = [(path, v.replace(_restart(v, key, i))) for i, (path, v) in enumerate(rng_kind)]
        states = (
            _to_state(params_kind, params),
            nnx.from_flat_state(rngs),
            nnx.from_flat_state(carry),
        )
        return nnx.merge(graphs[train], *states, _to_state(rest_kind, model_state), copy=True)

    def trained(params: Any, model_state: Any) -> Any:
        carry = [
            (path, v.replace(jnp.zeros(v.get_value().shape, v.get_value().dtype)))
            for path, v in carry_kind
        ]
        return merge(params, model_state, carry, jax.random.key(0), False)

    def read_blocks(params: Any, per_block: PerBlock) -> tuple[Any, dict[tuple, Reading]]:
        """Return the parameters as arrays, and how the outermost blocks read their own."""
        readings = {}
        for path in outermost(stacks):
            stored = at(params, path)
            # With sharded parameters this gathers all blocks, for a model that reads its variables
            # outside of the scan. No other model uses the result, and the compiler removes it.
            full = per_block.reader.read(stored)
            readings[path] = Reading(full, stored, per_block)
            params = replaced(params, path, full)
        return params, readings

    def apply(
        params: Any,
        model_state: Any,
        batch: dict[str, jax.Array],
        key: jax.Array,
        train: bool,
        per_block: PerBlock = PLAIN,
    ):
        params, readings = read_blocks(params, per_block)
        carry = [
            (path, v.replace(swap_dims(path, at(model_state[CARRY], path))))
            for path, v in carry_kind
        ]
        module = merge(params, model_state, carry, key, train)
        for path, part in nnx.iter_modules(module):
            if isinstance(part, Blocks):
                part.reading = readings.get((*path, "stack"))
        args, kwargs = call_arguments(module.__call__, batch, train, key)
        outputs = module(*args, **kwargs)
        new = dict(nnx.to_flat_state(nnx.state(module)))
        sown = ((p, v) for p, v in new.items() if p not in known or isinstance(v, nnx.Intermediate))
        user_errors.refuse_losses(
            ("/".join(map(str, path)), getattr(v, "type", type(v)).__name__) for path, v in sown
        )
        rest = _to_dict([(path, new[path]) for path, _ in rest_kind])
        if carry_kind:
            rest[CARRY] = nest(
                (path, swap_dims(path, new[path].get_value())) for path, _ in carry_kind
            )
        return outputs, keep_dtypes(model_state, rest)

    return Model(init, apply, tuple("/".join(map(str, path)) for path in stacks), trained)


def _make_module(make: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs) -> nnx.Module:
    """Make the module, and let its `nnx.Embed`s and `nnx.BatchNorm`s compute in their input's
    dtype, like other layers: Flax fixes it to the dtype of the parameters (Embed), or of the
    averages, which stay float32 (BatchNorm)."""
    module: Any = make(rngs)
    if not isinstance(module, nnx.Module):
        raise UsageError(
            f"model: a factory that takes rngs must return a Flax NNX module, not {type(module).__name__}"
        )
    if not callable(module):
        raise UsageError(
            f"model: {type(module).__name__} has no __call__; define it, as __call__(self, x)"
        )
    for _, part in list(nnx.iter_modules(module)):
        for name, value in list(vars(part).items()):
            if isinstance(
                value, jax.core.Tracer
            ):  # Flax recognizes arrays as data, but not tracers
                setattr(part, name, nnx.data(value))
        if isinstance(part, nnx.Embed) and part.dtype == part.param_dtype:
            part.dtype = None
        if (
            isinstance(part, nnx.BatchNorm)
            and part.dtype is None
            and part.promote_dtype is dtypes.promote_dtype
        ):
            part.promote_dtype = _as_they_are
    return module


def _set_mode(module: nnx.Module, train: bool) -> None:
    """Set training or evaluation mode in every submodule, by its attributes and by its `set_view`."""
    _ = module.train() if train else module.eval()
    part: Any
    for _, part in nnx.iter_modules(module):
        if hasattr(type(part), "set_view"):
            takes = inspect.signature(part.set_view).parameters
            part.set_view(**{name: value for name, value in modes(train).items() if name in takes})


def _as_they_are(arrays: Any, **more: Any) -> Any:
    return arrays


def _restart(variable: nnx.Variable, key: jax.Array, i: int) -> jax.Array:
    """The value of the i-th RNG variable: a key of its own, or a count of zero."""
    if issubclass(variable.type, nnx.RngKey):
        new = jax.random.fold_in(key, i)
        shape = variable.get_value().shape
        return jax.random.split(new, shape) if shape else new
    return jnp.zeros(variable.get_value().shape, variable.get_value().dtype)


def outermost(paths: Sequence[tuple]) -> list[tuple]:
    """Return the paths that are not inside another one."""
    return [path for path in paths if not any(path[: len(p)] == p for p in paths if p != path)]


def replaced(tree: dict[str, Any], path: tuple, value: Any) -> dict[str, Any]:
    """Return nested dicts with another value at a path."""
    if not path:
        return value
    name = str(path[0])
    return {**tree, name: replaced(tree[name], path[1:], value)}


def _to_dict(flat: Any) -> dict[str, Any]:
    """Return nested dicts of the values; an attribute that is a plain array is its own value."""
    return nest((path, x.get_value() if isinstance(x, nnx.Variable) else x) for path, x in flat)


def _to_state(kinds: Any, tree: dict[str, Any]) -> nnx.State:
    return nnx.from_flat_state(
        [
            (path, x.replace(at(tree, path)) if isinstance(x, nnx.Variable) else at(tree, path))
            for path, x in kinds
        ]
    )
