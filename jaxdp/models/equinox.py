"""Equinox modules as pure functions: one example's call, mapped over the microbatch, its arrays named by path."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxdp.errors import UsageError
from jaxdp.models.base import CARRY, Model, at, call_arguments, for_each_example, keep_dtypes, nest

AXIS = "batch"  # of the examples of a microbatch, where no BatchNorm names another
PARAMS, STATE = "params", "state"


class Carry(eqx.Module):
    """State that belongs to an example: declared for one, read as state.get(carry.index), set likewise."""

    index: eqx.nn.StateIndex

    def __init__(self, value: Any):
        self.index = eqx.nn.StateIndex(value)


def from_equinox(make: Callable[..., Any]) -> Model:
    """The model of an Equinox class, or of a function that makes its module, called as make(key=key).

    The module is called on one example [...]; its arguments get by name that example's entries, `key` (the example's
    own, folded from the microbatch's), and `state`, in which case it returns (outputs, state), as `eqx.nn.BatchNorm`
    does over the examples of the microbatch. Parameters are its floating-point arrays by attribute path. State must be
    the same for all examples (`jax.lax.pmean` over the axis "batch"), but for `Carry`. In evaluation the module is in
    `eqx.nn.inference_mode`. BatchNorm counts padding (a real example again) in, which a batch that deals evenly into
    microbatches has not. Raises UsageError for what is no Equinox module.
    """

    def made(key: jax.Array) -> tuple[Any, eqx.nn.State]:
        module, state = eqx.nn.make_with_state(make)(key=key)
        if not isinstance(module, eqx.Module):
            what = type(module).__name__
            raise UsageError(f"model: what takes a key must give an Equinox module, not {what}; return one")
        return module, state

    module, state = eqx.filter_eval_shape(made, jax.random.key(0))
    name, axis = type(module).__name__, axis_of(module)
    modes = {train: eqx.nn.inference_mode(module, not train) for train in (True, False)}
    leaves, structure = leaves_of(module, state), jax.tree.structure(state)
    kept = len(jax.tree.leaves(state))
    first = len(leaves) - kept  # of the state's
    if not callable(module):
        raise UsageError(f"model: {name} has no __call__; give it one, of one example")
    stateful = "state" in inspect.signature(module.__call__).parameters
    if kept and not stateful:
        raise UsageError(f"model: {name} holds state, but its __call__ takes none; add the argument state")

    def init(key: jax.Array, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        trees = grouped(leaves_of(*made(key)))
        return trees[PARAMS], together(trees, for_each_example(trees[CARRY], batch))

    def apply(params: Any, model_state: Any, batch: dict[str, jax.Array], key: jax.Array, train: bool):
        trees = {PARAMS: params, STATE: model_state, CARRY: model_state.get(CARRY, {})}
        values = [at(trees[leaf.kind], leaf.path) for leaf in leaves]

        def one(example: dict[str, jax.Array], place: jax.Array, own: dict[int, jax.Array]) -> Any:
            here = [own.get(i, x) for i, x in enumerate(values)]
            arrays = iter(here[:first])
            call = jax.tree.map(lambda leaf: next(arrays) if is_array(leaf) else leaf, modes[train]).__call__
            entries = {**example, "state": jax.tree.unflatten(structure, here[first:])} if stateful else example
            args, kwargs = call_arguments(call, entries, train, jax.random.fold_in(key, place))
            result = call(*args, **kwargs)
            if not stateful:
                return result, {}, {}
            if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], eqx.nn.State)):
                raise UsageError(f"model: {name} takes state, so it must return (outputs, state)")
            new = dict(enumerate(jax.tree.leaves(result[1]), first))
            return result[0], {i: x for i, x in new.items() if i not in own}, {i: new[i] for i in own}

        places = jnp.arange(len(next(iter(batch.values()))))
        own = {i: x for i, x in enumerate(values) if leaves[i].kind == CARRY}
        try:
            over = jax.vmap(one, out_axes=(0, None, 0), axis_name=axis)
            outputs, shared, own = over(batch, places, own)
        except ValueError as error:
            if "out_axes" not in str(error):
                raise
            raise UsageError(
                f"model: the state of {name} differs from example to example; average it with jax.lax.pmean(..., "
                f"{axis!r}), or declare it as jaxdp.models.equinox.Carry"
            ) from None
        new = {**dict(enumerate(values)), **shared, **own}
        trees = grouped([leaf._replace(value=new[i]) for i, leaf in enumerate(leaves)])
        return outputs, keep_dtypes(model_state, together(trees, trees[CARRY]))

    def traced(params: Any, model_state: Any, batch: dict[str, jax.Array], key: jax.Array, train: bool):
        return trace_off_mesh(functools.partial(apply, train=train), params, model_state, batch, key)

    return Model(init, traced)


def trace_off_mesh(f: Callable[..., Any], *args: Any) -> Any:
    """Return f(*args), traced as if there were no device mesh.

    `State.set` compares the types of the old and the new value, and inside of a mapped function they name the mesh,
    but not that of a constant, such as the one that `BatchNorm` in its mode "ema" sets.
    """
    leaves, structure = jax.tree.flatten(args)
    shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        flat = lambda *leaves: f(*jax.tree.unflatten(structure, leaves))
        jaxpr, result = jax.make_jaxpr(flat, return_shape=True)(*shapes)
    values = [jnp.asarray(x) for x in jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *leaves)]
    return jax.tree.unflatten(jax.tree.structure(result), values)


class Leaf(NamedTuple):
    """An array of a module or its state, by attribute path; kind: a parameter, other state, or an example's own."""

    path: tuple[str, ...]
    value: Any
    kind: str


def leaves_of(module: Any, state: eqx.nn.State) -> list[Leaf]:
    """The arrays of the module in the order of its leaves, then those of its state in theirs."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(module):
        if is_array(leaf):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                where = ".".join(names(path))
                raise UsageError(f"model: {where} holds a random key; take the argument key in __call__ instead")
            found.append(Leaf(names(path), leaf, PARAMS if jnp.issubdtype(leaf.dtype, jnp.inexact) else STATE))
    here = lambda x: isinstance(x, Carry | eqx.nn.StateIndex)
    for path, node in jax.tree_util.tree_leaves_with_path(module, is_leaf=here):
        if here(node):
            value = state.get(node.index if isinstance(node, Carry) else node)
            kind = CARRY if isinstance(node, Carry) else STATE
            inner = jax.tree_util.tree_leaves_with_path(value)
            found += [Leaf(names((*path, *more)), leaf, kind) for more, leaf in inner]
    return found


def grouped(leaves: list[Leaf]) -> dict[str, dict[str, Any]]:
    return {kind: nest((x.path, x.value) for x in leaves if x.kind == kind) for kind in (PARAMS, STATE, CARRY)}


def together(trees: dict[str, Any], carry: Any) -> dict[str, Any]:
    """The model state, with the carry where there is one."""
    return {**trees[STATE], CARRY: carry} if carry else trees[STATE]


def is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def names(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def axis_of(module: Any) -> str:
    """The axis that its BatchNorms average over."""
    is_norm = lambda x: isinstance(x, eqx.nn.BatchNorm)
    found = {x.axis_name for x in jax.tree.leaves(module, is_leaf=is_norm) if is_norm(x)} or {AXIS}
    if len(found) > 1 or not all(isinstance(x, str) for x in found):
        raise UsageError(f"model: its BatchNorms name the axes {found}; give all of them axis_name={AXIS!r}")
    return found.pop()
