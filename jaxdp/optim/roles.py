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
from jaxdp.optim.interpreter import scan_counts
from jaxdp.split import is_stacked, path_string

AUTO = "auto"  # in the place of the expressions of parameters without weight decay
KERNEL, TABLE, VECTOR, OTHER = "kernel", "table", "vector", "other array"  # roles
ADDED, SCALES = "added", "scales"  # uses, beside those named as roles
USES = {"add": ADDED, "add_any": ADDED, "sub": ADDED, "mul": SCALES, "div": SCALES}
ONE_HOT = -1  # in the place of a parameter: a value converted from booleans
SAME_RANK = {"slice", "dynamic_slice", "rev", "pad", "split"}

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
    dims of the operand. reduction: the dims that a kernel sums over."""

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
    views = [{i: _all_dims(x)} for i, (_, x) in enumerate(leaves)]
    trace.run(program, views + [{}] * (len(program.jaxpr.invars) - len(views)))
    uses = [trace.uses.get(i, []) for i in range(len(leaves))]
    shapes = [x.shape for _, x in leaves]
    modules: dict[str, list[int]] = {}
    for i, (path, _) in enumerate(leaves):
        modules.setdefault(path_string(path[:-1]), []).append(i)

    def is_bias(i: int, sizes: tuple[int, ...], siblings: list[int]) -> bool:
        """Return whether an array that is only added has the shape of a kernel's output, or of a
        scale, beside it.
        """
        results = [
            _sizes(shapes[j], use.dims - use.reduction)
            for j in siblings
            for use in uses[j]
            if is_kernel(use)
        ]
        scales = [shapes[j] for j in siblings if {use.kind for use in uses[j]} == {SCALES}]
        return {use.kind for use in uses[i]} == {ADDED} and (
            sizes in results or shapes[i] in scales
        )

    def role(i: int, path: Any, x: Any) -> Role:
        if not uses[i]:
            return role_of(path, x, blocks)
        kinds = {use.kind for use in uses[i]}
        kernels = [use for use in uses[i] if is_kernel(use)]
        sizes = max((_sizes(x.shape, use.dims) for use in uses[i]), key=len)
        if kernels and TABLE not in kinds and max(use.rank for use in kernels) >= 2:
            return Role(KERNEL, True, _matrix(x.shape, kernels[-1]))
        if (
            len(sizes) < 2
            or kinds == {SCALES}
            or is_bias(i, sizes, modules[path_string(path[:-1])])
        ):
            return Role(VECTOR, False)
        return Role(TABLE if TABLE in kinds else OTHER, True)

    return {path_string(path): role(i, path, x) for i, (path, x) in enumerate(leaves)}


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


def is_kernel(use: Use) -> bool:
    return use.kind == KERNEL


def describe(
    params: Any, choose: Any, blocks: Sequence[str], roles: Mapping[str, Role]
) -> tuple[str, str]:
    """Return the arrays for which choose(path, x) is true, in words, and the others. blocks, roles:
    see `role_of`.
    """
    groups: dict[bool, list[tuple[str, int]]] = {True: [], False: []}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        kind = role_of(path, x, blocks, roles).kind if roles else "array"
        groups[bool(choose(path, x))].append((kind, math.prod(x.shape)))

    def in_words(rows: list[tuple[str, int]]) -> str:
        counts = collections.Counter(kind for kind, _ in rows)
        kinds = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in sorted(counts.items()))
        return f"{kinds} ({sum(size for _, size in rows):,} parameters)" if rows else "none"

    return in_words(groups[True]), in_words(groups[False])


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


def _all_dims(x: Any) -> View:
    return tuple(frozenset({d}) for d in range(x.ndim))


def _union(view: Iterable[Dims]) -> Dims:
    return frozenset().union(*view)


class Trace:
    """Follow the views of parameters through a program. uses: by parameter."""

    def __init__(self) -> None:
        self.uses: dict[int, list[Use]] = {}

    def run(self, jaxpr: Any, inputs: Sequence[Views]) -> list[Views]:
        """Return the views of the outputs of a jaxpr, which may be closed."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        views: dict[Any, Views] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(x):
            return {} if isinstance(x, jex.Literal) else views.get(x, {})

        for eqn in jaxpr.eqns:
            of_inputs = [read(x) for x in eqn.invars]
            if any(of_inputs) or eqn.primitive.name == "jit":
                views.update(zip(eqn.outvars, self.outputs(eqn, of_inputs), strict=True))
            elif eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == bool:
                views[eqn.outvars[0]] = {ONE_HOT: _all_dims(eqn.outvars[0].aval)}
        return [read(x) for x in jaxpr.outvars]

    def outputs(self, eqn: Any, inputs: list[Views]) -> list[Views]:
        """Return the views of an operation's outputs; record the uses of those that end here."""
        name, params, first = eqn.primitive.name, eqn.params, inputs[0]
        shapes = [x.aval.shape for x in eqn.invars]

        def moved(f):
            return [{p: f(view) for p, view in first.items()}] * len(eqn.outvars)

        if name in SAME_RANK:
            return moved(lambda view: view)
        if name == "transpose":
            return moved(lambda view: tuple(view[d] for d in params["permutation"]))
        if name == "squeeze":
            return moved(
                lambda view: tuple(x for d, x in enumerate(view) if d not in params["dimensions"])
            )
        if name == "reshape":
            return moved(lambda view: _reshaped(view, shapes[0], params["new_sizes"]))
        if name == "broadcast_in_dim":
            place = {new: old for old, new in enumerate(params["broadcast_dimensions"])}
            sizes = params["shape"]

            def keeps(d):
                return d in place and shapes[0][place[d]] == sizes[d]

            return moved(
                lambda view: tuple(
                    view[place[d]] if keeps(d) else Dims() for d in range(len(sizes))
                )
            )
        if name.startswith(("reduce_", "arg")) and "axes" in params:
            return moved(
                lambda view: tuple(x for d, x in enumerate(view) if d not in params["axes"])
            )
        if name == "gather":
            return [self.gathered(eqn, first)]
        if name == "concatenate":
            return [self.combined(eqn, inputs, OTHER)]
        if name == "dot_general":
            return [self.multiplied(eqn, inputs, shapes)]
        if name == "conv_general_dilated":
            out, *rest = params["dimension_numbers"].rhs_spec
            self.read(OTHER, first)
            for p, view in inputs[1].items():
                kernel = Use(
                    KERNEL, _union(view), len(view), _union(view[d] for d in rest), view[out]
                )
                self.note(p, kernel if _is_full(view, shapes[1]) else Use(OTHER, _union(view)))
            return [{}]
        if name == "optimization_barrier":
            return list(inputs)
        if ELEMENTWISE.fullmatch(name):
            return [self.combined(eqn, inputs, USES.get(name, OTHER))]
        return self.called(eqn, inputs)

    def called(self, eqn: Any, inputs: list[Views]) -> list[Views]:
        """Return the views of the outputs of a call, a loop or a conditional; any other operation
        ends all views.
        """
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            consts, carried = scan_counts(params)
            split = consts + carried
            rows = [{p: view[1:] for p, view in x.items()} for x in inputs[split:]]
            results = self.run(params["jaxpr"], [*inputs[:split], *rows])
            stacked = [{p: (Dims(), *view) for p, view in x.items()} for x in results[carried:]]
            return [*results[:carried], *stacked]
        if name == "while":
            return self.run(params["body_jaxpr"], inputs[params["cond_nconsts"] :])
        if name == "cond":
            return [self.run(branch, inputs[1:]) for branch in params["branches"]][-1]
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        if inner is not None and len(getattr(inner, "jaxpr", inner).invars) == len(inputs):
            return self.run(inner, inputs)
        for views in inputs:
            self.read(OTHER, views)
        return [{}] * len(eqn.outvars)

    def combined(self, eqn: Any, inputs: list[Views], kind: str) -> Views:
        """Return the views after an elementwise operation or a concatenation; those of parameters
        that it broadcasts to something larger end there."""
        shape, results = eqn.outvars[0].aval.shape, dict[int, View]()
        arrays = [
            x for x in eqn.invars if not isinstance(x, jex.Literal) and (x.aval.shape or not shape)
        ]
        joined = eqn.params.get("dimension") if eqn.primitive.name == "concatenate" else None
        for x, views in zip(eqn.invars, inputs):
            sizes = x.aval.shape if joined is not None else shape
            for p, view in views.items():
                same = [old == new for old, new in zip(x.aval.shape, sizes)]
                view = tuple(dims if kept else Dims() for dims, kept in zip(view, same))
                if len(same) == len(shape) and (
                    len(arrays) < 2 or (p != ONE_HOT and _is_full(view, sizes))
                ):
                    results.setdefault(p, view)
        for views in inputs:
            self.read(kind, {p: view for p, view in views.items() if p not in results})
        return results

    def gathered(self, eqn: Any, views: Views) -> Views:
        """Return the views after a gather: an index selects a block, or many select matrices; else
        it is a table.
        """
        numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        rows = [d for d in range(len(sizes)) if d not in removed]
        rank = len(eqn.outvars[0].aval.shape)
        if sum(sizes[d] > 1 for d in rows) < 2 and rank > len(rows):
            self.read(TABLE, views)
            return {}
        place = dict(zip(numbers.offset_dims, rows))
        return {
            p: tuple(view[place[d]] if d in place else Dims() for d in range(rank))
            for p, view in views.items()
        }

    def multiplied(self, eqn: Any, inputs: list[Views], shapes: list[tuple[int, ...]]) -> Views:
        """Record the uses in a product. Of two parameters, a vector is not the kernel. A product
        without a sum only moves the dims."""
        contracted, batch = eqn.params["dimension_numbers"]
        free_of = [
            [d for d in range(len(shapes[i])) if d not in (*batch[i], *contracted[i])]
            for i in (0, 1)
        ]
        if not contracted[0]:
            others = [(Dims(),) * len(free_of[1]), (Dims(),) * len(free_of[0])]
            moved = dict[int, View]()
            for i, views in enumerate(inputs):
                for p, view in views.items():
                    of_batch, free = (
                        tuple(view[d] for d in dims) for dims in (batch[i], free_of[i])
                    )
                    moved[p] = of_batch + (free + others[0] if i == 0 else others[1] + free)
            return moved
        for side, other in ((0, 1), (1, 0)):
            dims = [d for d in range(len(shapes[side])) if d not in batch[side]]
            large = sum(shapes[side][d] > 1 for d in dims)
            for p, view in inputs[side].items():
                used = [view[d] for d in dims]
                outside = [view[d] for d in free_of[side]]
                kind = TABLE if ONE_HOT in inputs[other] else KERNEL
                if not _is_full(used, [shapes[side][d] for d in dims]) or (
                    inputs[other] and large < 2
                ):
                    kind = OTHER
                reduction = _union(view[d] for d in contracted[side])
                self.note(
                    p, Use(kind, _union(view), sum(map(bool, used)), reduction, _union(outside))
                )
        return {}

    def read(self, kind: str, views: Views) -> None:
        for p, view in views.items():
            self.note(p, Use(kind, _union(view)))

    def note(self, p: int, use: Use) -> None:
        self.uses.setdefault(p, []).append(use)


def _is_full(view: Sequence[Dims], shape: Sequence[int]) -> bool:
    """Return whether no dim is broadcast."""
    return all(dims or size == 1 for dims, size in zip(view, shape, strict=True))


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
        return (
            _union(view[d] for d in group) if all(view[d] or old[d] == 1 for d in group) else Dims()
        )

    return tuple(dims_of(*pair) for pair in itertools.pairwise(after))
