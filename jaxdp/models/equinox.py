"""The adapter for Equinox: vmap a module's per-example call over the microbatch, and name its
arrays by path.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

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
    nest,
)
from jaxdp.precision import is_key

AXIS = "batch"  # the vmapped axis over a microbatch's examples, unless a BatchNorm names another
Path = tuple[str, ...]


class Carry(eqx.Module):
    """Per-example state: declare it for one example; read it as state.get(carry.index), set it
    likewise.
    """

    index: eqx.nn.StateIndex

    def __init__(self, value: Any):
        self.index = eqx.nn.StateIndex(value)


def from_equinox(make: Callable[..., Any]) -> Model:
    """Return the `Model` of an Equinox class or factory, called as make(key=key).

    Calls the module on one example [...]; its arguments get by name that example's entries, `key`
    (one per example, folded from the microbatch's), and `state`; a module that accepts `state` must
    return (outputs, state), as `eqx.nn.BatchNorm` does. Parameters are its floating-point arrays by
    attribute path. State must be equal for all examples (`jax.lax.pmean` over the axis "batch"),
    except `Carry`. In evaluation the module is in `eqx.nn.inference_mode`. BatchNorm statistics
    include padding (copies of a real example), which exists only if the batch does not split evenly
    into microbatches. Raises UsageError if `make` does not return an Equinox module."""
    module, state = eqx.filter_eval_shape(build, make, jax.random.key(0))
    name, axis, leaves = type(module).__name__, axis_of(module), leaves_of(module, state)
    stateful = bool(jax.tree.leaves(state))
    if not callable(module):
        raise UsageError(f"model: {name} has no __call__; give it one, of one example")
    takes_state = "state" in inspect.signature(module.__call__).parameters
    if stateful and not takes_state:
        raise UsageError(
            f"model: {name} has state, but its __call__ does not take it; add the argument state"
        )
    structure = jax.tree.structure((eqx.filter(module, is_array), state))
    paths = [path for path, _ in leaves]
    # The dim of the examples in each array: only carry has one.
    example_dims = [0 if is_carry(path) else None for path in paths]

    def fill(values: list[Any], train: bool) -> tuple[Any, eqx.nn.State]:
        """Return (the module, its state) with these values of its arrays, in leaf order."""
        arrays, state = jax.tree.unflatten(structure, values)
        return eqx.combine(arrays, eqx.nn.inference_mode(module, not train)), state

    def init(key, batch):
        params, model_state = nest(leaves_of(*build(make, key)))
        return params, for_each_example(model_state, batch)

    def apply(params, model_state, batch, key, train):
        def run_example(example, row, values):
            called, state = fill(values, train)
            entries = {**example, "state": state} if takes_state else example
            example_key = jax.random.fold_in(key, row)
            args, kwargs = call_arguments(called.__call__, entries, train, example_key)
            outputs = called(*args, **kwargs)
            if takes_state:
                match outputs:
                    case tuple((outputs, eqx.nn.State() as state)):
                        pass
                    case _:
                        raise UsageError(
                            f"model: {name} takes state, so it must return (outputs, state)"
                        )
            return outputs, jax.tree.leaves((eqx.filter(called, is_array), state))

        rows = jnp.arange(len(next(iter(batch.values()))))
        run_batch = jax.vmap(
            run_example, in_axes=(0, 0, example_dims), out_axes=(0, example_dims), axis_name=axis
        )
        try:
            outputs, values = run_batch(batch, rows, [at(p, params, model_state) for p in paths])
        except ValueError as error:
            if "out_axes" not in str(error):
                raise
            raise UsageError(
                f"model: the state of {name} differs from example to example; average it with jax.lax.pmean(..., "
                f"{axis!r}), or declare it as jaxdp.models.equinox.Carry"
            ) from None
        _, new_state = nest(zip(paths, values, strict=True))
        return outputs, keep_dtypes(model_state, new_state)

    def traced(params, model_state, batch, key, train):
        call = functools.partial(apply, train=train)
        return trace_off_mesh(call, params, model_state, batch, key)

    def trained(params, model_state):
        values = [
            jnp.zeros_like(x) if is_carry(path) else at(path, params, model_state)
            for path, x in leaves
        ]
        filled = fill(values, train=False)
        return filled if stateful else filled[0]

    return Model(init, traced, module=trained)


def build(make: Callable[..., Any], key: jax.Array) -> tuple[Any, eqx.nn.State]:
    """Return (the module, its state). Raises UsageError if it is not an Equinox module."""
    module, state = eqx.nn.make_with_state(make)(key=key)
    if not isinstance(module, eqx.Module):
        name = type(module).__name__
        raise UsageError(
            f"model: a factory that takes a key must return an Equinox module, not {name}"
        )
    return module, state


def trace_off_mesh(f: Callable[..., Any], *args: Any) -> Any:
    """Return f(*args), traced without a device mesh.

    `State.set` compares the types of the old and the new value. Inside a mapped function a type
    includes the mesh, but not the type of a constant, such as the one that `BatchNorm` sets in its
    mode "ema"."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        jaxpr, result = jax.make_jaxpr(f, return_shape=True)(*jax.tree.map(shape, args))
    values = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(result), map(jnp.asarray, values))


def leaves_of(module: Any, state: eqx.nn.State) -> list[tuple[Path, Any]]:
    """Return (path, array) of the arrays of the module, then of those of its state, in leaf order;
    paths are those of `nest`. Raises UsageError for a random key.
    """
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(eqx.filter(module, is_array)):
        if is_key(leaf):
            name = ".".join(names(path))
            raise UsageError(
                f"model: {name} stores a random key; use the argument key of __call__ instead"
            )
        kind = PARAMS if jnp.issubdtype(leaf.dtype, jnp.inexact) else STATE
        leaves.append(((kind, *names(path)), leaf))

    def is_state(x):
        return isinstance(x, Carry | eqx.nn.StateIndex)

    for path, node in jax.tree_util.tree_leaves_with_path(module, is_leaf=is_state):
        if is_state(node):
            of_example = isinstance(node, Carry)
            start = (STATE, CARRY) if of_example else (STATE,)
            value = state.get(node.index if of_example else node)
            for more, leaf in jax.tree_util.tree_leaves_with_path(value):
                leaves.append(((*start, *names(path), *names(more)), leaf))
    return leaves


def is_carry(path: Path) -> bool:
    return path[:2] == (STATE, CARRY)


def is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def names(path: Any) -> Path:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def axis_of(module: Any) -> str:
    """Return the name of the axis that the module's BatchNorms average over. Raises UsageError if
    it is not unique.
    """

    def is_norm(x):
        return isinstance(x, eqx.nn.BatchNorm)

    axes = {x.axis_name for x in jax.tree.leaves(module, is_leaf=is_norm) if is_norm(x)} or {AXIS}
    if len(axes) > 1 or not all(isinstance(x, str) for x in axes):
        raise UsageError(
            f"model: its BatchNorms name the axes {axes}; give all of them axis_name={AXIS!r}"
        )
    return axes.pop()
