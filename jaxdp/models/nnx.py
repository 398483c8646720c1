"""The adapter for Flax NNX: split a module by variable kind once, merge it in every call."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jaxdp.errors import UsageError
from jaxdp.models.base import (
    CARRY,
    PARAMS,
    STATE,
    Model,
    at,
    call_arguments,
    for_each_example,
    keep_dtypes,
    modes,
    nest,
    refuse_losses,
    rehearse,
)
from jaxdp.models.scan import PLAIN, PerBlock, scan_blocks
from jaxdp.split import is_below, path_string


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
        self.reading: Reading | None = None  # how the training step reads the parameters

    def __call__(self, x: Any, *args: Any) -> Any:
        graph, *states = nnx.split(self.stack, nnx.Param, ...)
        variables, rest = nnx.to_flat_state(states[0]), states[1]

        def block(params: Any, x: Any, rest: nnx.State) -> tuple[Any, nnx.State]:
            values = ((path, v.replace(at((PARAMS, *path), params, {}))) for path, v in variables)
            module = nnx.merge(graph, nnx.from_flat_state(values), rest, copy=True)
            return module(x, *args), nnx.state(module, nnx.Not(nnx.Param))

        params, _ = _nested(variables)
        per_block = PLAIN
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
        """Return (what to scan, how to read it).

        These are `params`, read as a whole, if the model has changed any of them, and inside of a
        function that JAX traces separately: a condition may differ between devices, which could not
        talk to each other there.
        """
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(self.full), strict=True)
        if current_trace() != self.trace or not all(x is y for x, y in pairs):
            return params, PerBlock(remat=self.per_block.remat)
        stored = self.stored
        if self.is_first:
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
    stacks: list[str] = []  # paths of stacked blocks

    @jax.jit  # `init` reuses the trace of the `eval_shape` below
    def make_state(key: jax.Array) -> Any:
        module = _make_module(make, nnx.Rngs(key))
        parts = nnx.iter_modules(module)
        stacks[:] = [_name((*path, "stack")) for path, part in parts if isinstance(part, Blocks)]
        for train in (False, True):
            _set_mode(module, train)
            graphs[train], state = nnx.split(module)
        return state

    state = jax.eval_shape(make_state, jax.eval_shape(lambda: jax.random.key(0)))
    variables = dict(nnx.to_flat_state(state))

    def merge(params, model_state, key, train):
        """Return the module with these values, and with RNG streams that start at `key`."""
        values, streams = [], 0
        for path, x in variables.items():
            if isinstance(x, nnx.RngState):
                value, streams = _restart(x, key, streams), streams + 1
            else:
                value = at(_full_path(path, x), params, model_state)
            values.append((path, x.replace(value) if isinstance(x, nnx.Variable) else value))
        return nnx.merge(graphs[train], nnx.from_flat_state(values), copy=True)

    def swap_dims(model_state: Any) -> Any:
        """Swap the first two dims of stacked blocks' carry: [example, block, ...] to and from
        [block, example, ...].
        """

        def swapped(path: Any, x: jax.Array) -> jax.Array:
            return x.swapaxes(0, 1) if is_below(path_string(path), stacks) else x

        if CARRY not in model_state:
            return model_state
        carry = jax.tree_util.tree_map_with_path(swapped, model_state[CARRY])
        return model_state | {CARRY: carry}

    def init(key, batch):
        params, model_state = _nested(nnx.to_flat_state(make_state(key)))
        model_state = for_each_example(model_state, batch)
        rehearse(apply, params, model_state, batch, key)
        return params, model_state

    def read_blocks(params: Any, per_block: PerBlock) -> tuple[Any, dict[str, Reading]]:
        """Return the parameters as arrays, and how the outermost blocks read their own."""
        readings, params = {}, jax.tree.map(lambda x: x, params)
        for stack in outermost(stacks):
            *path, last = stack.split("/")
            parent = at((PARAMS, *path), params, {})
            stored = parent[last]
            # With sharded parameters this gathers all blocks, for a model that reads its variables
            # outside of the scan. No other model uses the result, and the compiler removes it.
            full = parent[last] = per_block.reader.read(stored)
            readings[stack] = Reading(full, stored, per_block)
        return params, readings

    def apply(params, model_state, batch, key, train, per_block=PLAIN):
        params, readings = read_blocks(params, per_block)
        module = merge(params, swap_dims(model_state), key, train)
        for path, part in nnx.iter_modules(module):
            if isinstance(part, Blocks):
                part.reading = readings.get(_name((*path, "stack")))
        args, kwargs = call_arguments(module.__call__, batch, train, key)
        outputs = module(*args, **kwargs)
        after = dict(nnx.to_flat_state(nnx.state(module)))
        refuse_losses(
            (_name(path), type(x).__name__)
            for path, x in after.items()
            if path not in variables or isinstance(x, nnx.Intermediate)
        )
        _, new = _nested((path, after[path]) for path in variables)
        return outputs, keep_dtypes(model_state, swap_dims(new))

    def trained(params, model_state):
        declared = _nested(variables.items())[1]
        carry = jax.tree.map(jnp.zeros_like, declared.get(CARRY, {}))
        return merge(params, {**model_state, CARRY: carry}, jax.random.key(0), False)

    return Model(init, apply, tuple(stacks), trained)


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
    """Return the value of the i-th RNG variable: a separate key, or a count of zero."""
    value = variable.get_value()
    if not isinstance(variable, nnx.RngKey):
        return jnp.zeros_like(value)
    new = jax.random.fold_in(key, i)
    return jax.random.split(new, value.shape) if value.shape else new


def outermost(paths: Sequence[str]) -> list[str]:
    """Return the paths that are not inside another one."""
    return [path for path in paths if not is_below(path, {*paths} - {path})]


def _name(path: Sequence[Any]) -> str:
    return "/".join(map(str, path))


def _full_path(path: Sequence[Any], variable: Any) -> tuple[Any, ...]:
    """Return the path of a variable in (params, model_state), as in `nest`."""
    if isinstance(variable, nnx.Param):
        return (PARAMS, *path)
    return (STATE, CARRY, *path) if isinstance(variable, Carry) else (STATE, *path)


def _nested(variables: Iterable[tuple[Sequence[Any], Any]]) -> tuple[Any, Any]:
    """Return (params, model_state) of (path, variable) pairs, without those of RNG streams; an
    attribute that is a plain array is its own value.
    """
    return nest(
        (_full_path(path, x), x.get_value() if isinstance(x, nnx.Variable) else x)
        for path, x in variables
        if not isinstance(x, nnx.RngState)
    )
