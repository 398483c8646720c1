"""The adapter for Equinox: vmap a module's per-example call over the microbatch, and name its
arrays by path.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxdp.errors import UsageError
from jaxdp.models.base import CARRY, Model, at, call_arguments, for_each_example, keep_dtypes, nest
from jaxdp.precision import is_key

AXIS = "batch"  # the vmapped axis over a microbatch's examples, unless a BatchNorm names another
PARAMS, STATE = "params", "state"


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
    name, axis = type(module).__name__, axis_of(module)
    modes = {train: eqx.nn.inference_mode(module, not train) for train in (True, False)}
    leaves, structure = leaves_of(module, state), jax.tree.structure(state)
    state_count = len(jax.tree.leaves(state))
    first = len(leaves) - state_count  # index of the first state leaf
    if not callable(module):
        raise UsageError(f"model: {name} has no __call__; give it one, of one example")
    stateful = "state" in inspect.signature(module.__call__).parameters
    if state_count and not stateful:
        raise UsageError(
            f"model: {name} has state, but its __call__ does not take it; add the argument state"
        )

    def init(key: jax.Array, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        trees = grouped(leaves_of(*build(make, key)))
        return trees[PARAMS], with_carry(trees, for_each_example(trees[CARRY], batch))

    def apply(
        params: Any, model_state: Any, batch: dict[str, jax.Array], key: jax.Array, train: bool
    ):
        trees = {PARAMS: params, STATE: model_state, CARRY: model_state.get(CARRY, {})}
        values = [at(trees[leaf.kind], leaf.path) for leaf in leaves]

        def run_example(
            example: dict[str, jax.Array], row: jax.Array, carry: dict[int, jax.Array]
        ) -> Any:
            inputs = [carry.get(i, x) for i, x in enumerate(values)]
            call = with_arrays(modes[train], inputs[:first]).__call__
            entries = (
                {**example, "state": jax.tree.unflatten(structure, inputs[first:])}
                if stateful
                else example
            )
            args, kwargs = call_arguments(call, entries, train, jax.random.fold_in(key, row))
            result = call(*args, **kwargs)
            if not stateful:
                return result, {}, {}
            if not (
                isinstance(result, tuple)
                and len(result) == 2
                and isinstance(result[1], eqx.nn.State)
            ):
                raise UsageError(f"model: {name} takes state, so it must return (outputs, state)")
            new = dict(enumerate(jax.tree.leaves(result[1]), first))
            return (
                result[0],
                {i: x for i, x in new.items() if i not in carry},
                {i: new[i] for i in carry},
            )

        rows = jnp.arange(len(next(iter(batch.values()))))
        carry = {i: x for i, x in enumerate(values) if leaves[i].kind == CARRY}
        with explain_unequal_state(name, axis):
            run_batch = jax.vmap(run_example, out_axes=(0, None, 0), axis_name=axis)
            outputs, shared, carry = run_batch(batch, rows, carry)
        new = {**dict(enumerate(values)), **shared, **carry}
        trees = grouped([leaf._replace(value=new[i]) for i, leaf in enumerate(leaves)])
        return outputs, keep_dtypes(model_state, with_carry(trees, trees[CARRY]))

    def traced(
        params: Any, model_state: Any, batch: dict[str, jax.Array], key: jax.Array, train: bool
    ):
        return trace_off_mesh(
            functools.partial(apply, train=train), params, model_state, batch, key
        )

    return Model(init, traced, module=functools.partial(trained, modes[False], structure, leaves))


def build(make: Callable[..., Any], key: jax.Array) -> tuple[Any, eqx.nn.State]:
    """Return (the module, its state). Raises UsageError if it is not an Equinox module."""
    module, state = eqx.nn.make_with_state(make)(key=key)
    if not isinstance(module, eqx.Module):
        name = type(module).__name__
        raise UsageError(
            f"model: a factory that takes a key must return an Equinox module, not {name}"
        )
    return module, state


@contextlib.contextmanager
def explain_unequal_state(name: str, axis: str) -> Iterator[None]:
    """Raise UsageError, instead of JAX's error, if the state of the module `name` differs from
    example to example.
    """
    try:
        yield
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        raise UsageError(
            f"model: the state of {name} differs from example to example; average it with jax.lax.pmean(..., "
            f"{axis!r}), or declare it as jaxdp.models.equinox.Carry"
        ) from None


def with_arrays(module: Any, arrays: list[Any]) -> Any:
    """Return the module with other arrays in the place of its own, in leaf order."""
    remaining = iter(arrays)
    return jax.tree.map(lambda leaf: next(remaining) if is_array(leaf) else leaf, module)


def trained(
    module: Any, structure: Any, leaves: list["Leaf"], params: Any, model_state: Any
) -> Any:
    """Return the module with these values; with its state, of this structure, if it has any."""
    trees, first = {PARAMS: params, STATE: model_state}, len(leaves) - structure.num_leaves

    def fill(x):
        return (
            jnp.zeros(x.value.shape, x.value.dtype)
            if x.kind == CARRY
            else at(trees[x.kind], x.path)
        )

    values = [fill(leaf) for leaf in leaves]
    filled = with_arrays(module, values[:first])
    return (
        (filled, jax.tree.unflatten(structure, values[first:])) if structure.num_leaves else filled
    )


def trace_off_mesh(f: Callable[..., Any], *args: Any) -> Any:
    """Return f(*args), traced without a device mesh.

    `State.set` compares the types of the old and the new value. Inside a mapped function a type
    includes the mesh, but not the type of a constant, such as the one that `BatchNorm` sets in its
    mode "ema"."""
    leaves, structure = jax.tree.flatten(args)
    shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):

        def flat(*leaves):
            return f(*jax.tree.unflatten(structure, leaves))

        jaxpr, result = jax.make_jaxpr(flat, return_shape=True)(*shapes)
    values = [jnp.asarray(x) for x in jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *leaves)]
    return jax.tree.unflatten(jax.tree.structure(result), values)


class Leaf(NamedTuple):
    """An array of a module or its state, by attribute path; kind: PARAMS, STATE, or CARRY."""

    path: tuple[str, ...]
    value: Any
    kind: str


def leaves_of(module: Any, state: eqx.nn.State) -> list[Leaf]:
    """Return the arrays of the module, then those of its state, in leaf order. Raises UsageError
    for a random key.
    """
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(module):
        if is_array(leaf):
            if is_key(leaf):
                name = ".".join(names(path))
                raise UsageError(
                    f"model: {name} stores a random key; use the argument key of __call__ instead"
                )
            leaves.append(
                Leaf(
                    names(path), leaf, PARAMS if jnp.issubdtype(leaf.dtype, jnp.inexact) else STATE
                )
            )

    def is_state(x):
        return isinstance(x, Carry | eqx.nn.StateIndex)

    for path, node in jax.tree_util.tree_leaves_with_path(module, is_leaf=is_state):
        if is_state(node):
            value = state.get(node.index if isinstance(node, Carry) else node)
            kind = CARRY if isinstance(node, Carry) else STATE
            inner = jax.tree_util.tree_leaves_with_path(value)
            leaves += [Leaf(names((*path, *more)), leaf, kind) for more, leaf in inner]
    return leaves


def grouped(leaves: list[Leaf]) -> dict[str, dict[str, Any]]:
    return {
        kind: nest((x.path, x.value) for x in leaves if x.kind == kind)
        for kind in (PARAMS, STATE, CARRY)
    }


def with_carry(trees: dict[str, Any], carry: Any) -> dict[str, Any]:
    """Return the model state, with an entry for the carry if there is any."""
    return {**trees[STATE], CARRY: carry} if carry else trees[STATE]


def is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def names(path: Any) -> tuple[str, ...]:
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
