"""The exact reductions: integer sums over all devices, and the same rounding in every program.

The gradients of each microbatch are quantized (`jaxdp.exact.fixed_point`) with exponents stored
in the state. An update that does not fit is recomputed with the exponents that it needs: the
maximum over all devices, so that all devices decide alike. Losses, weights, metrics and model state
are small: they are summed after all slots, each element with its own exponent of this update. Equal
sums need equal summands, so each microbatch, and `apply`, is computed separately
(`jaxdp.exact.rounding`). Microbatches are the logical workers of EasyScale (arXiv 2208.14228).
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.errors import UsageError
from jaxdp.exact.fixed_point import (
    FORMATS,
    LARGEST,
    NOT_FINITE,
    PER_BIT,
    Format,
    exponent_of,
    fits,
    in_bits,
    is_float,
    largest_exponent,
    pack,
    quantize,
    quantize_values,
    quantized,
    remembered,
    restore,
    restore_values,
    squares_and_bad,
    unpack,
)
from jaxdp.exact.products import lower_on_cpu
from jaxdp.exact.rounding import as_written, fusion_barrier, opaque_true, scan_unfused
from jaxdp.parallel.reduction import Reduction, exchange, in_buckets
from jaxdp.parallel.sums import (
    Arithmetic,
    MicrobatchSums,
    Reduce,
    ReductionPlan,
    reducer,
    scatter_split,
)
from jaxdp.train.state import Batch, Gather, Join, Sums, TrainState, View, microbatch_key

Tree = Any
COUPLED = (
    "parallel.reduction: {} computes each microbatch separately, but this loss couples the examples of all; "
    "use xla or bucket"
)
ELEMENTWISE = "with reduction: exact, ZeRO needs an elementwise one, such as sgd, adam, adamw or lion, or zero: 0"


class Part(NamedTuple):
    """Sums of gradients: the tree of integers; the exponent that each leaf needs; the number of
    non-finite elements.
    """

    ints: Tree
    needed: jax.Array
    nonfinite: jax.Array


class Attempt(NamedTuple):
    """The result of one attempt. part: sums of gradients; rest: the other sums [group, ...];
    needed: the exponents that both need. exponents[leaf]: for the next attempt, unchanged where a
    leaf fits. times: the number of attempts."""

    exponents: jax.Array
    part: Part
    rest: Sums
    needed: jax.Array
    times: jax.Array
    fits: jax.Array


class ExactInfo(NamedTuple):
    """The content of `Sums.exponents`: the next update's exponents, the number of recomputations,
    `Part.nonfinite`.
    """

    exponents: jax.Array
    recomputed: jax.Array
    nonfinite: jax.Array


def integers(name: str, bucket_mb: float = 25.0, safe: bool = False, group: int = 1) -> Reduction:
    """Return a reduction that sums integers in buckets. group: number of microbatches computed and
    rounded together.
    """
    lower_on_cpu()

    def add_up(flat, axes):
        return unpack(jax.lax.psum(pack(flat), axes), flat.dtype, flat.size)

    def row_of(rows, axes):
        return unpack(exchange(pack(rows), axes, safe), rows.dtype, rows.shape[-1])

    def total(dims, axis, update):
        return lambda tree: squares_and_bad(tree, dims, axis, opaque_true(update))

    slots = functools.partial(
        over_slots, form=FORMATS[name], group=group, refuse=refuse_to_join(name)
    )

    def rounded(f, update):
        return as_written(f, opaque_true(update))

    rows = functools.partial(sum_rows, form=FORMATS[name])
    arithmetic = Arithmetic(slots, finish, total, opaque_true, rows, rounded, False, ELEMENTWISE)
    return in_buckets(int(bucket_mb * 1e6), add_up, row_of)._replace(
        arithmetic=arithmetic, group=group
    )


def remembering(
    make: Callable[..., TrainState], trainable: Callable[[Tree], Tree]
) -> Callable[..., TrainState]:
    """Add an exponent for each gradient to the initial state: too small, so the first update
    determines it.
    """

    def make_state(*arguments: Any) -> TrainState:
        state = make(*arguments)
        return state.replace(
            exponents=jnp.zeros(len(jax.tree.leaves(trainable(state.params))), jnp.int32)
        )

    return make_state


def over_slots(
    f: MicrobatchSums, plan: ReductionPlan, form: Format, group: int, refuse: Join
) -> tuple[MicrobatchSums, Reduce]:
    """Return (f of each group of slots separately, summed as integers over all devices; the
    identity).
    """
    summands = (int(plan.assignment.max()) + 1) // group

    def run(view: View, batch: Batch, slots: jax.Array, gather: Gather, join: Join) -> Sums:
        live = opaque_true(view.step)
        pieces = (view.carry, batch, slots)
        pieces = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), pieces)
        exponents = view.exponents if plan.is_update else jnp.zeros(0, jnp.int32)

        @functools.partial(jax.jit, inline=True)  # traced once
        def compute(view: View, piece: Tree) -> Sums:
            carry, batch, slots = piece
            sums = f(view._replace(carry=carry), batch, slots, gather, refuse)
            return fusion_barrier(sums, opaque_true(view.step))

        def attempt(before: Attempt) -> Attempt:
            def add(total: Part, piece: Tree) -> tuple[Part, Sums]:
                sums, slot = compute(view, piece), piece[2][0]

                def real(tree):
                    return jax.tree.map(lambda x: jnp.where(slot >= 0, x, jnp.zeros_like(x)), tree)

                key = (
                    microbatch_key(view.seed, view.step, slot)
                    if form.stochastic and plan.is_update
                    else None
                )
                part = real(group_part(sums.grads, before.exponents, form, summands, key, live))
                ints = jax.tree.map(jnp.add, total.ints, scatter_by_slot(plan, part.ints, form))
                needed = jnp.maximum(total.needed, part.needed)
                rest = real(sums._replace(grads=None, carry=None))._replace(carry=sums.carry)
                return Part(ints, needed, total.nonfinite + part.nonfinite), rest

            part, rest = scan_unfused(
                add, zeros(before.part), pieces, live, like._replace(grads=None)
            )
            local = [
                part.needed,
                *map(jnp.ravel, value_exponents(jax.tree.leaves(rest._replace(carry=None)))),
            ]
            needed = jax.lax.pmax(jnp.concatenate(local), plan.axes.all)
            grads = needed[: part.needed.size]
            good = fits(before.exponents, grads, form, summands)
            after = jnp.where(good, before.exponents, (grads + form.headroom) * PER_BIT)
            return Attempt(after, part, rest, needed, before.times + 1, jnp.all(good))

        like = jax.eval_shape(compute, view, jax.tree.map(lambda x: x[0], pieces))
        first = empty_attempt(like, exponents, plan, form, len(pieces[2]))
        done = jax.lax.while_loop(lambda a: ~a.fits, attempt, first)
        return reduce_attempt(done, plan, form, summands)

    return run, lambda sums: sums


def empty_attempt(
    like: Sums, exponents: jax.Array, plan: ReductionPlan, form: Format, slots: int
) -> Attempt:
    """Return the attempt before the first computation; like: the shapes of a slot's sums."""
    leaves = exponents.size

    def ints():
        return scatter_by_slot(
            plan, quantized(zeros(like.grads), jnp.zeros(leaves, jnp.int32), form, 1), form
        )

    part = Part(zeros(jax.eval_shape(ints)), jnp.zeros(leaves, jnp.int32), jnp.int32(0))
    rest = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), like._replace(grads=None))
    values = jax.eval_shape(value_exponents, jax.tree.leaves(rest._replace(carry=None)))
    needed = jnp.zeros(leaves + sum(x.size for x in values), jnp.int32)
    return Attempt(exponents, part, rest, needed, jnp.int32(0), jnp.bool_(False))


def group_part(
    grads: Tree,
    exponents: jax.Array,
    form: Format,
    summands: int,
    key: jax.Array | None,
    live: jax.Array,
) -> Part:
    """Return the contribution of one group to the sums."""
    leaves, none = jax.tree.leaves(grads), jnp.int32(0)
    if not leaves:
        return Part(grads, jnp.zeros(0, jnp.int32), none)
    # without the fusion barrier, every reader of one exponent would compute all of them
    needed = fusion_barrier(jnp.stack([exponent_of(x) for x in leaves]), live)

    def count():
        return sum((jnp.sum(~(jnp.abs(x) < 2.0**LARGEST), dtype=jnp.int32) for x in leaves), none)

    bad = jax.lax.cond(jnp.any(needed == NOT_FINITE), count, lambda: none)
    return Part(quantized(grads, exponents, form, summands, key), needed, bad)


def scatter_by_slot(plan: ReductionPlan, ints: Tree, form: Format) -> Tree:
    """Reduce-scatter one slot's integers if gradients are sharded slot by slot; else return them
    unchanged.
    """
    if not plan.per_microbatch:
        return ints
    sent = jax.tree.map(lambda x: x.astype(form.wire(x.dtype)), ints)
    return jax.tree.map(lambda x, y: x.astype(y.dtype), scatter_split(plan, sent), ints)


def reduce_attempt(done: Attempt, plan: ReductionPlan, form: Format, summands: int) -> Sums:
    """Reduce one device's integers over all devices and return the sums as floats."""
    grad_needed, rest_needed = (
        done.needed[: done.exponents.size],
        done.needed[done.exponents.size :],
    )
    rest, treedef = jax.tree.flatten(done.rest._replace(carry=None))
    exponents_of_rest = split_exponents(rest_needed, rest)
    sums: Sums = jax.tree.unflatten(treedef, quantized_sums(rest, exponents_of_rest, summands))
    sums = sums._replace(grads=done.part.ints, exponents=done.part.nonfinite)
    sums = reducer(plan._replace(dtype=None if form.bits == 32 else form.wire(jnp.int32)))(sums)

    grads, grad_treedef = jax.tree.flatten(sums.grads)
    bits = jnp.where(grad_needed == NOT_FINITE, grad_needed, in_bits(done.exponents))
    float_grads = [restore(x, e, form, summands) for x, e in zip(grads, bits)]
    totals = jax.tree.leaves(sums._replace(grads=None, exponents=None))
    result: Sums = jax.tree.unflatten(
        treedef, restored_sums(totals, exponents_of_rest, rest, summands)
    )
    exponents = remembered(done.exponents, grad_needed, form.headroom)
    info = ExactInfo(exponents, done.times - 1, sums.exponents) if plan.is_update else None
    carry = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), done.rest.carry)
    return result._replace(
        grads=jax.tree.unflatten(grad_treedef, float_grads), carry=carry, exponents=info
    )


def value_exponents(leaves: list[jax.Array]) -> list[jax.Array]:
    """Return the exponents [...] of the elements of each leaf [row, ...] of floats, and none for
    integers.
    """
    return [largest_exponent(x, 0) if is_float(x) else jnp.zeros(0, jnp.int32) for x in leaves]


def split_exponents(flat: jax.Array, leaves: list[jax.Array]) -> list[jax.Array]:
    """Return the exponents of each leaf [row, ...], from those of all leaves one after the other."""
    shapes = [x.shape[1:] if is_float(x) else (0,) for x in leaves]
    starts = itertools.accumulate(map(math.prod, shapes), initial=0)
    return [
        flat[start : start + math.prod(shape)].reshape(shape)
        for start, shape in zip(starts, shapes)
    ]


def quantized_sums(
    leaves: list[jax.Array], exponents: list[jax.Array], summands: int
) -> list[jax.Array]:
    """Sum leaves [row, ...] over their rows, floats as integers."""
    ints = [
        quantize_values(x, e, summands) if is_float(x) else x for x, e in zip(leaves, exponents)
    ]
    return [x.sum(0, dtype=x.dtype) for x in ints]


def restored_sums(
    sums: list[jax.Array], exponents: list[jax.Array], leaves: list[jax.Array], summands: int
) -> list[jax.Array]:
    """Convert the sums of `quantized_sums` over all devices back to floats, where the leaves were
    floats.
    """
    return [
        restore_values(x, e, summands) if is_float(y) else x
        for x, e, y in zip(sums, exponents, leaves)
    ]


def sum_rows(
    reduction: Reduction, tree: Tree, axis: str, rows: int, keys: jax.Array | None, form: Format
) -> Tree:
    """Sum leaves [row, ...] over their rows and over an axis, of `rows` rows in all; see
    `Arithmetic`.

    The exponents are determined first, by a maximum over all devices, so that the integers always
    fit."""
    leaves, treedef = jax.tree.flatten(tree)
    if not leaves:
        return tree
    if keys is None:
        flat = jnp.concatenate([*map(jnp.ravel, value_exponents(leaves))])
        exponents = split_exponents(jax.lax.pmax(flat, axis), leaves)
        sums = reduction.reduce(quantized_sums(leaves, exponents, rows), axis)
        return jax.tree.unflatten(treedef, restored_sums(sums, exponents, leaves, rows))
    needed = jax.lax.pmax(jnp.stack([exponent_of(x) for x in leaves]), axis)

    def integers_of(i: int, x: jax.Array, exponent: jax.Array) -> jax.Array:
        if not form.stochastic:
            return quantize(x, exponent, form, rows)
        return jax.vmap(
            lambda x, key: quantize(x, exponent, form, rows, jax.random.fold_in(key, i))
        )(x, keys)

    ints = [integers_of(i, x, e) for i, (x, e) in enumerate(zip(leaves, needed))]
    wire = [x.sum(0, dtype=x.dtype).astype(form.wire(x.dtype)) for x in ints]
    sums = [x.astype(y.dtype) for x, y in zip(reduction.reduce(wire, axis), ints)]
    return jax.tree.unflatten(treedef, [restore(x, e, form, rows) for x, e in zip(sums, needed)])


def finish(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `apply`: every operation is rounded as written, and the sums pass a fusion barrier
    first.
    """

    @functools.wraps(apply)
    def run(state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, jax.Array]]:
        live, info = opaque_true(state.step), sums.exponents
        new, metrics = as_written(apply, live)(
            state, fusion_barrier(sums._replace(exponents=None), live)
        )
        bad = jnp.where(
            info.nonfinite > 0, info.nonfinite.astype(jnp.float32), metrics["nonfinite_grads"]
        )
        metrics |= {"nonfinite_grads": bad, "recomputed": info.recomputed}
        return new.replace(exponents=info.exponents), metrics

    return run


def refuse_to_join(name: str) -> Join:
    """Return a `join` hook that raises UsageError: a loss over all examples would see those of one
    microbatch only.
    """

    def refuse(tree: Tree) -> Tree:
        raise UsageError(COUPLED.format(name))

    return refuse


def zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
