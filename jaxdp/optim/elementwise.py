"""Check that an optimizer is elementwise: that updating slices of the parameters equals updating
the full arrays.

The update is traced for full leaves and for slices, and the two programs are compared operation by
operation. A value whose shape differs between them belongs to a split leaf: only elementwise
operations may read it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.extend import core as jex
from jax.interpreters.partial_eval import dce_jaxpr

from jaxdp.errors import UsageError, one_line
from jaxdp.optim.interpreter import CALLS, inside
from jaxdp.split import WHOLE, padded_shape, path_string, split_dims

Tree = Any
Shape = tuple[int, ...]

# Names of operations of `jax.lax`.
ELEMENTWISE = re.compile(
    "abs|acosh?|add|add_any|and|asinh?|atan[2h]?|bessel_i[01]e|bitcast_convert_type|cbrt|ceil|clamp|clz|complex|conj|convert_element_type|"
    "copy(_p)?|cosh?|device_put|digamma|div|eq|erf|erf_inv|erfc|exp2?|expm1|floor|g[et]|imag|integer_pow|is_finite|l[et]|"
    "lgamma|log|log1p|logistic|max|min|mul|ne|neg|nextafter|not|optimization_barrier|or|population_count|pow|real|"
    "reduce_precision|rem|round|rsqrt|select_n|shift_left|shift_right_(arithmetic|logical)|sharding_constraint|sign|"
    "sinh?|sqrt|square|stop_gradient|sub|tanh?|xor"
)
ENTERED = {*CALLS, "cond", "scan", "while"}
FILL = "broadcast_in_dim"


def check_elementwise(
    tx: optax.GradientTransformation,
    params: Tree,
    parts: int = 2,
    blocks: Sequence[str] = (),
    advice: str = "under pmap use an elementwise one, such as sgd, adam, adamw or lion (and clip before it), or the "
    "backend pjit",
    *,
    pad: bool = False,
) -> None:
    """Raise UsageError if `tx` updates slices of `params` differently from the full arrays, or
    fails on slices.

    params: arrays, tracers or ShapeDtypeStructs; only their paths, shapes and dtypes are used, and
    which of their dims are split over `parts` (see `split_dims`, also for blocks and pad). Rejects
    LAMB, LARS, Adafactor, Muon, clipping by a norm, gradient noise, skipping of non-finite updates,
    and any update with another operation than `ELEMENTWISE` on a split leaf, or with operations or
    constants that depend on its shape. Parts of the optimizer's state that no update reads do not
    count. An update that takes `value` gets 1.0; an update that needs another argument is rejected.
    """
    dims = split_dims(params, parts, blocks, pad)
    if all(dim == WHOLE for dim in jax.tree.leaves(dims)):
        return

    def programs(multiple: int, pieces: int) -> list[jex.ClosedJaxpr]:
        """Return the programs for leaves whose split dim is padded to a multiple, then cut."""

        def resized(x: Any, dim: int) -> jax.ShapeDtypeStruct:
            shape = [*padded_shape(x.shape, dim, multiple)]
            if dim != WHOLE:
                shape[dim] //= pieces
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return trace(tx, jax.tree.map(resized, params, dims))

    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = {x.shape: path_string(path) for path, x in leaves}
    try:
        sliced, wholes = programs(parts, parts), [programs(1, 1)]
        if pad:
            wholes.append(programs(parts, 1))
        problems = [difference(*pair, paths) for whole in wholes for pair in zip(whole, sliced)]
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        problems = [f"it fails on slices of the parameters: {reason}"]
    if problem := next(filter(None, problems), None):
        raise UsageError(f"optimizer: {problem}; {advice}")


def trace(tx: optax.GradientTransformation, params: Tree) -> list[jex.ClosedJaxpr]:
    """Return the programs of init and of update, without what no update depends on, now or later."""
    extra, state = optax.with_extra_args_support(tx), jax.eval_shape(tx.init, params)
    init = jax.make_jaxpr(tx.init)(params)
    update = jax.make_jaxpr(lambda *args: extra.update(*args, value=1.0))(params, state, params)
    count, entries = len(jax.tree.leaves(params)), len(jax.tree.leaves(state))
    live, before = [False] * entries, None
    while live != before:  # also the part of the new state that a later update reads
        before = live
        jaxpr, read = dce_jaxpr(update.jaxpr, [True] * count + live)
        live = read[count : count + entries]
    return [
        jex.ClosedJaxpr(dce_jaxpr(init.jaxpr, live)[0], init.consts),
        jex.ClosedJaxpr(jaxpr, update.consts),
    ]


def difference(
    whole: jex.ClosedJaxpr | jex.Jaxpr,
    part: jex.ClosedJaxpr | jex.Jaxpr,
    paths: Mapping[Shape, str],
) -> str:
    """Return why the program for slices computes something else than the one for full arrays, or
    "".
    """
    depends = "it is not elementwise: its operations or constants depend on the shape of a parameter that is split"
    consts, part_consts = getattr(whole, "consts", ()), getattr(part, "consts", ())
    eqns, part_eqns = whole.eqns, part.eqns
    if (
        [x.primitive for x in eqns] != [x.primitive for x in part_eqns]
        or len(consts) != len(part_consts)
        or not all(map(equal, consts, part_consts))
    ):
        return depends
    for one, other in zip(eqns, part_eqns):
        name, inputs = one.primitive.name, [*zip(one.invars, other.invars)]
        split = [x for x, y in inputs if x.aval.shape != y.aval.shape]
        changed = [x for x, y in zip(one.outvars, other.outvars) if x.aval.shape != y.aval.shape]
        fits = bool(ELEMENTWISE.fullmatch(name)) if split else name == FILL or not changed
        if name in ENTERED and one.params.get("length") == other.params.get("length"):
            for pair in zip(inside(one), inside(other), strict=True):
                if problem := difference(*pair, paths):
                    return problem
        elif not fits:
            x = (split or one.outvars)[0].aval
            array = f"{paths.get(x.shape, 'an array')} {x.str_short()}"
            return f"it is not elementwise: {name} of {array} differs on slices"
        elif name != FILL and one.params != other.params:
            return depends
        literals = [repr([getattr(x, "val", None) for x in eqn.invars]) for eqn in (one, other)]
        if literals[0] != literals[1]:
            return depends
    return ""


def equal(a: Any, b: Any) -> bool:
    """Return whether two constants are equal; a traced one only equals itself."""
    return a is b or (not isinstance(a, jax.core.Tracer) and np.array_equal(a, b))
