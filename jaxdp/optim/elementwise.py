"""Check that an optimizer is elementwise: that updating slices of the parameters equals updating
the full arrays.

The update is traced for full leaves and for slices, and the two programs are compared operation by
operation. A value whose shape differs between them belongs to a split leaf: only elementwise
operations may read it."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.extend import core as jex

from jaxdp.errors import UsageError, one_line
from jaxdp.optim.interpreter import needed
from jaxdp.split import WHOLE, padded_shape, path_string, split_dims

Tree = Any
Shape = tuple[int, ...]
Program = tuple[jex.ClosedJaxpr, Sequence[Any]]  # with the outputs that count

# Names of operations of `jax.lax`.
ELEMENTWISE = re.compile(
    "abs|acosh?|add|add_any|and|asinh?|atan[2h]?|bessel_i[01]e|bitcast_convert_type|cbrt|ceil|clamp|clz|complex|conj|convert_element_type|"
    "copy(_p)?|cosh?|device_put|digamma|div|eq|erf|erf_inv|erfc|exp2?|expm1|floor|g[et]|imag|integer_pow|is_finite|l[et]|"
    "lgamma|log|log1p|logistic|max|min|mul|ne|neg|nextafter|not|optimization_barrier|or|population_count|pow|real|"
    "reduce_precision|rem|round|rsqrt|select_n|shift_left|shift_right_(arithmetic|logical)|sharding_constraint|sign|"
    "sinh?|sqrt|square|stop_gradient|sub|tanh?|xor"
)
CALLS = re.compile("checkpoint|closed_call|cond|core_call|custom_[jv][jv]p_call|p?jit|scan|while")
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

    def padded(shape, dim):
        return padded_shape(shape, dim, parts)

    def part(shape, dim):
        return tuple(n // parts if d == dim else n for d, n in enumerate(padded(shape, dim)))

    def plain(shape, dim):
        return shape

    def programs(resize: Callable[[Shape, int], Shape]) -> list[Program]:
        return trace(
            tx,
            jax.tree.map(
                lambda x, dim: jax.ShapeDtypeStruct(resize(x.shape, dim), x.dtype), params, dims
            ),
        )

    paths = {
        tuple(x.shape): path_string(path) for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    try:
        sliced, wholes = programs(part), [programs(plain), *([programs(padded)] if pad else [])]
        problems = [difference(*pair, paths) for whole in wholes for pair in zip(whole, sliced)]
    except Exception as error:
        problems = [
            f"it fails on slices of the parameters: {type(error).__name__}: {one_line(error)}"
        ]
    if problem := next(filter(None, problems), None):
        raise UsageError(f"optimizer: {problem}; {advice}")


def trace(tx: optax.GradientTransformation, params: Tree) -> list[Program]:
    """Return the programs of init and of update, each with the outputs that decide the updates, now
    or later.
    """
    extra, state = optax.with_extra_args_support(tx), jax.eval_shape(tx.init, params)
    init = jax.make_jaxpr(tx.init)(params)
    update = jax.make_jaxpr(lambda *args: extra.update(*args, value=1.0))(params, state, params)
    count, jaxpr = len(jax.tree.leaves(params)), update.jaxpr
    old, new = jaxpr.invars[count : len(jaxpr.invars) - count], jaxpr.outvars[count:]
    live = more = jaxpr.outvars[:count]
    while more:  # also the part of the new state that a later update reads
        read = needed(jaxpr, live)[1]
        more = [
            y for x, y in zip(old, new, strict=True) if x in read and not any(y is z for z in live)
        ]
        live = [*live, *more]
    return [
        (init, [y for x, y in zip(old, init.jaxpr.outvars, strict=True) if x in read]),
        (update, live),
    ]


def difference(whole: Program, part: Program, paths: Mapping[Shape, str]) -> str:
    """Return why the program for slices computes something else than the one for full arrays, or
    "".
    """
    (closed, outputs), (closed_part, part_outputs) = whole, part
    eqns, part_eqns = needed(closed.jaxpr, outputs)[0], needed(closed_part.jaxpr, part_outputs)[0]
    depends = "it is not elementwise: its operations or constants depend on the shape of a parameter that is split"
    if [x.primitive for x in eqns] != [x.primitive for x in part_eqns]:
        return depends
    consts, part_consts = closed.consts, closed_part.consts
    if len(consts) != len(part_consts) or not all(map(equal, consts, part_consts)):
        return depends
    pairs: Any = zip(eqns, part_eqns)
    for one, other in pairs:
        name, shapes = one.primitive.name, lambda xs: [x.aval.shape for x in xs]
        split = [x for x, y in zip(one.invars, other.invars) if x.aval.shape != y.aval.shape]
        same_shapes = shapes(one.outvars) == shapes(other.outvars)
        fits = bool(ELEMENTWISE.fullmatch(name)) if split else name == FILL or same_shapes
        if CALLS.fullmatch(name) and one.params.get("length") == other.params.get("length"):
            for pair in zip(inner_programs(one), inner_programs(other), strict=True):
                if problem := difference(*pair, paths):
                    return problem
        elif not fits:
            x = (split or one.outvars)[0].aval
            array = f"{paths.get(x.shape, 'an array')} {x.str_short()}"
            return f"it is not elementwise: {name} of {array} differs on slices"
        elif name != FILL and one.params != other.params:
            return depends
        if repr(literals(one)) != repr(literals(other)):
            return depends
    return ""


def inner_programs(eqn: jex.JaxprEqn) -> list[Program]:
    """Return the programs inside a call, a loop or a conditional."""
    values = jax.tree.leaves(
        list(eqn.params.values()), is_leaf=lambda x: isinstance(x, jex.ClosedJaxpr | jex.Jaxpr)
    )
    closed = [jex.ClosedJaxpr(x, ()) if isinstance(x, jex.Jaxpr) else x for x in values]
    return [(x, x.jaxpr.outvars) for x in closed if isinstance(x, jex.ClosedJaxpr)]


def literals(eqn: jex.JaxprEqn) -> list[Any]:
    return [x.val for x in eqn.invars if isinstance(x, jex.Literal)]


def equal(a: Any, b: Any) -> bool:
    """Return whether two constants are equal; a traced one only equals itself."""
    return a is b or (not isinstance(a, jax.core.Tracer) and np.array_equal(a, b))
