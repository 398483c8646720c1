"""The roles of a model's parameters: kernels, tables, and vectors, by their shapes and by what the
model computes with them; names do not count.

The model is traced once. Each value that is computed from parameters alone, or keeps the shape of
one, has views: the dims of the parameters that its own dims consist of. The first operation that
does more with a view decides the role: a product or a convolution contracts a kernel, a gather
indexes a table, the others are added to something or scale it."""

import collections
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex
from optax.contrib import MuonDimensionNumbers

from jaxdp.optim.elementwise import ELEMENTWISE
from jaxdp.optim.interpreter import CALLS, evaluate, scan_counts
from jaxdp.split import is_stacked, path_string

AUTO = "auto"  # in the place of the expressions of parameters without weight decay
KERNEL, TABLE, VECTOR, OTHER = "kernel", "table", "vector", "other array"  # roles
ADDED, SCALES = "added", "scales"  # uses, beside those named as roles
USES = {"add": ADDED, "add_any": ADDED, "sub": ADDED, "mul": SCALES, "div": SCALES}
ONE_HOT = -1  # in the place of a parameter: a value converted from booleans

Dims = frozenset[int]
View = tuple[Dims, ...]  # for each dim of a value: the dims of the parameter that it consists of
Views = dict[int, View]  # by parameter


class Role(NamedTuple):
    """kind: KERNEL, TABLE, VECTOR or OTHER. decays: weight decay applies. matrix: how Muon reads
    it, None for Adam.
    """

    kind: str
    decays: bool
    matrix: MuonDimensionNumbers | None = None


class Use(NamedTuple):
    """kind: what the operation does. dims: those of the parameter that it reads at once; rank: as
    dims of the operand. reduction: the dims that a kernel sums over; output: those of its result.
    """

    kind: str
    dims: Dims
    rank: int = 0
    reduction: Dims = frozenset()
    output: Dims = frozenset()


def find_roles(
    program: jex.ClosedJaxpr, params: Any, blocks: Sequence[str] = ()
) -> dict[str, Role]:
    """Return {path: role} of the parameters.

    program: of a call of the model on 2 examples or more; its first arguments are the parameters.
    params: their shapes. blocks: see `role_of`.
    """
    leaves, trace = jax.tree_util.tree_leaves_with_path(params), Trace()
    views: list[Views] = [{i: _all_dims(x)} for i, (_, x) in enumerate(leaves)]
    evaluate(program, views + [{}] * (len(program.in_avals) - len(views)), trace.outputs)
    # By module: sizes of the outputs of its kernels, and of its scales.
    outputs = collections.defaultdict[Any, list](list)
    scales = collections.defaultdict[Any, list](list)
    for i, (path, x) in enumerate(leaves):
        uses = trace.uses[i]
        outputs[path[:-1]] += [
            _sizes(x.shape, use.dims - use.reduction) for use in uses if use.kind == KERNEL
        ]
        if {use.kind for use in uses} == {SCALES}:
            scales[path[:-1]].append(x.shape)

    def role(path: Any, x: Any, uses: list[Use]) -> Role:
        kinds = {use.kind for use in uses}
        kernels = [use for use in uses if use.kind == KERNEL]
        if not uses:
            return role_of(path, x, blocks)
        if TABLE not in kinds and any(use.rank >= 2 for use in kernels):
            return Role(KERNEL, True, _matrix(x.shape, kernels[-1]))
        sizes = max((_sizes(x.shape, use.dims) for use in uses), key=len)
        is_bias = sizes in outputs[path[:-1]] or x.shape in scales[path[:-1]]
        if len(sizes) < 2 or kinds == {SCALES} or (kinds == {ADDED} and is_bias):
            return Role(VECTOR, False)
        return Role(TABLE if TABLE in kinds else OTHER, True)

    return {path_string(path): role(path, x, trace.uses[i]) for i, (path, x) in enumerate(leaves)}


def role_of(path: Any, x: Any, blocks: Iterable[str] = (), roles: Mapping[str, Role] = {}) -> Role:
    """Return the role of a parameter, x[...], which may be a slice: that in `roles`, which
    `find_roles` has returned.

    Without it, the number of dims decides: 2 or more are a kernel, with its outputs last. blocks:
    paths (a/b) below which parameters are stacked [block, ...].
    """
    if (known := roles.get(path_string(path))) is not None:
        return known
    first = int(is_stacked(path, blocks))
    if x.ndim - first < 2:
        return Role(VECTOR, False)
    return Role(KERNEL, True, _numbers(range(first, x.ndim - 1), [x.ndim - 1]))


def describe(
    params: Any, choose: Any, blocks: Sequence[str], roles: Mapping[str, Role]
) -> tuple[str, str]:
    """Return the arrays for which choose(path, x) is true, in words, and the others. blocks, roles:
    see `role_of`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)

    def in_words(chosen: bool) -> str:
        members = [(path, x) for path, x in leaves if bool(choose(path, x)) == chosen]
        kinds = [role_of(*leaf, blocks, roles).kind if roles else "array" for leaf in members]
        counts = sorted(collections.Counter(kinds).items())
        texts = [f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts]
        size = sum(math.prod(x.shape) for _, x in members)
        return f"{', '.join(texts)} ({size:,} parameters)" if texts else "none"

    return in_words(True), in_words(False)


def _matrix(shape: tuple[int, ...], use: Use) -> MuonDimensionNumbers | None:
    """Return the dims of a kernel as a matrix, all other dims being a batch of matrices; None for a
    vector.
    """
    output = use.output - {d for d in use.reduction if shape[d] == 1}
    reduction = use.reduction - output
    if any(math.prod(shape[d] for d in dims) < 2 for dims in (reduction, output)):
        return None
    return _numbers(sorted(reduction), sorted(output))


def _numbers(*dims: Sequence[int]) -> MuonDimensionNumbers:
    return MuonDimensionNumbers(*(x[0] if len(x) == 1 else tuple(x) for x in dims))


def _sizes(shape: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
    return tuple(shape[d] for d in sorted(dims) if shape[d] > 1)


class Trace:
    """Follow the views of parameters through a program. uses: by parameter."""

    def __init__(self) -> None:
        self.uses = collections.defaultdict[int, list[Use]](list)

    def outputs(self, eqn: Any, inputs: list[Any]) -> list[Views] | None:
        """Return the views of an operation's outputs; record the uses of those that end here.

        A rule of the interpreter, whose values are views instead of arrays.
        """
        name, params = eqn.primitive.name, eqn.params
        views = _views(inputs)
        if name in CALLS:
            return None  # the interpreter enters it
        results: Views = {}
        if not any(views):
            if name == "convert_element_type" and eqn.invars[0].aval.dtype == bool:
                results[ONE_HOT] = _all_dims(eqn.outvars[0].aval)
            return [results] * len(eqn.outvars)
        for p, view in views[0].items():
            if (moved := _moved(eqn, view)) is not None:
                results[p] = moved
        if results:
            return [results] * len(eqn.outvars)
        match name:
            case "gather":
                self.end(TABLE, views[0])
            case "dot_general":
                results = self.multiplied(eqn, views)
            case "conv_general_dilated":
                self.end(OTHER, views[0])
                self.contract(eqn.invars[1], views[1], params["dimension_numbers"].rhs_spec[1:])
            case "optimization_barrier":
                return views
            case "scan":
                consts, carried = scan_counts(params)
                split = consts + carried
                rows = [{p: view[1:] for p, view in x.items()} for x in views[split:]]
                ends = _views(evaluate(params["jaxpr"], [*views[:split], *rows], self.outputs))
                stacked = [{p: (Dims(), *view) for p, view in x.items()} for x in ends[carried:]]
                return [*ends[:carried], *stacked]
            case "while":
                return evaluate(params["body_jaxpr"], views[params["cond_nconsts"] :], self.outputs)
            case "cond":
                return [evaluate(x, views[1:], self.outputs) for x in params["branches"]][-1]
            case _ if name == "concatenate" or ELEMENTWISE.fullmatch(name):
                results = self.combined(eqn, views)
            case _:
                for x in views:
                    self.end(OTHER, x)
        return [results] * len(eqn.outvars)

    def combined(self, eqn: Any, inputs: list[Views]) -> Views:
        """Return the views after an elementwise operation or a concatenation; those of parameters
        that it broadcasts to something larger end there."""
        name, shape, results = eqn.primitive.name, eqn.outvars[0].aval.shape, dict[int, View]()
        variables = [x for x in eqn.invars if not isinstance(x, jex.Literal)]
        is_alone = sum(bool(x.aval.shape or not shape) for x in variables) < 2
        for x, views in zip(eqn.invars, inputs):
            if name == "concatenate" or x.aval.shape == shape:
                for p, view in views.items():
                    if is_alone or (p != ONE_HOT and _is_full(view, x.aval.shape)):
                        results.setdefault(p, view)
        for views in inputs:
            ended = {p: view for p, view in views.items() if p not in results}
            self.end(USES.get(name, OTHER), ended)
        return results

    def multiplied(self, eqn: Any, inputs: list[Views]) -> Views:
        """Record the uses in a product. Of two parameters, a vector is not the kernel. A product
        without a sum only moves the dims."""
        contracted, batch = eqn.params["dimension_numbers"]
        rank, moved = eqn.outvars[0].aval.ndim, dict[int, View]()
        for side, (x, views, others) in enumerate(zip(eqn.invars, inputs, inputs[::-1])):
            shared, summed = batch[side], contracted[side]
            free = [d for d in range(x.aval.ndim) if d not in (*shared, *summed)]
            if summed:
                large = sum(x.aval.shape[d] > 1 for d in (*free, *summed))
                kind = TABLE if ONE_HOT in others else KERNEL
                self.contract(x, views, summed, shared, OTHER if others and large < 2 else kind)
                continue
            first = rank - len(free) if side else len(shared)
            places = [*range(len(shared)), *range(first, first + len(free))]
            for p, view in views.items():
                moved[p] = _placed([view[d] for d in (*shared, *free)], places, rank)
        return moved

    def contract(
        self,
        x: Any,
        views: Views,
        summed: Sequence[int],
        batch: Sequence[int] = (),
        kind: str = KERNEL,
    ) -> None:
        """Record the use of an operand of a product that sums over some of its dims."""
        dims = [d for d in range(x.aval.ndim) if d not in batch]
        for p, view in views.items():
            used = [view[d] for d in dims]
            is_full = _is_full(used, [x.aval.shape[d] for d in dims])
            self.uses[p].append(
                Use(
                    kind if is_full else OTHER,
                    _union(view),
                    rank=sum(map(bool, used)),
                    reduction=_union(view[d] for d in summed),
                    output=_union(view[d] for d in dims if d not in summed),
                )
            )

    def end(self, kind: str, views: Views) -> None:
        """Record a use of all these views, which end there."""
        for p, view in views.items():
            self.uses[p].append(Use(kind, _union(view)))


def _views(values: Sequence[Any]) -> list[Views]:
    """Return the views of values; literals and constants have none."""
    return [x if isinstance(x, dict) else {} for x in values]


def _moved(eqn: Any, view: View) -> View | None:
    """Return the view after an operation that only moves or drops dims of its first operand, and
    None for any other operation."""
    params, shape, rank = eqn.params, eqn.invars[0].aval.shape, eqn.outvars[0].aval.ndim
    match eqn.primitive.name:
        case "slice" | "dynamic_slice" | "rev" | "pad" | "split":
            return view
        case "transpose":
            return tuple(view[d] for d in params["permutation"])
        case "squeeze":
            return tuple(x for d, x in enumerate(view) if d not in params["dimensions"])
        case "reshape":
            return _reshaped(view, shape, params["new_sizes"])
        case "broadcast_in_dim":
            places = params["broadcast_dimensions"]
            kept = [size == params["shape"][place] for size, place in zip(shape, places)]
            return _placed([x if same else Dims() for x, same in zip(view, kept)], places, rank)
        case "gather":  # an index selects a block, or many select matrices; else it is a table
            numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
            removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
            rows = [d for d in range(len(sizes)) if d not in removed]
            if sum(sizes[d] > 1 for d in rows) < 2 and rank > len(rows):
                return None
            return _placed([view[d] for d in rows], numbers.offset_dims, rank)
        case name if name.startswith(("reduce_", "arg")) and "axes" in params:
            return tuple(x for d, x in enumerate(view) if d not in params["axes"])
    return None


def _placed(dims: Sequence[Dims], places: Sequence[int], rank: int) -> View:
    """Return a view that has these dims at these places; nothing of the parameter is in the others."""
    at = dict(zip(places, dims))
    return tuple(at.get(d, Dims()) for d in range(rank))


def _reshaped(view: View, old: Sequence[int], new: Sequence[int]) -> View:
    """Return the view after a reshape. Dims that are joined or split share their dims of the
    parameter.
    """
    before, after = ([1, *itertools.accumulate(sizes, operator.mul)] for sizes in (old, new))
    common = {*before} & {*after}

    def dims_of(start: int, end: int) -> Dims:
        low, high = max(x for x in common if x <= start), min(x for x in common if x >= end)
        # of size 1: those between the others, which may be what a slice has left of a larger dim
        group = [d for d in range(len(old)) if low <= before[d] < high or before[d] == start == end]
        group = [d for d in group if old[d] == 1 or start != end]
        is_full = _is_full([view[d] for d in group], [old[d] for d in group])
        return _union(view[d] for d in group) if is_full else Dims()

    return tuple(dims_of(*pair) for pair in itertools.pairwise(after))


def _all_dims(x: Any) -> View:
    return tuple(frozenset({d}) for d in range(x.ndim))


def _union(view: Iterable[Dims]) -> Dims:
    return frozenset().union(*view)


def _is_full(view: Sequence[Dims], shape: Sequence[int]) -> bool:
    """Return whether no dim is broadcast."""
    return all(dims or size == 1 for dims, size in zip(view, shape, strict=True))
