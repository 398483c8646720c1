"""The exact reductions: integer sums over all devices, and the same rounding in every program.

The gradients of each microbatch are quantized (`jaxdp.exact.fixed_point`) with exponents stored
in the state. An update that does not fit is recomputed with the exponents that it needs: the
maximum over all devices, so that all devices decide alike. Losses, weights, metrics and model state
are small: they are summed after all slots, each element with its own exponent of this update. Equal
sums need equal summands, so each microbatch, and `apply`, is computed separately
(`jaxdp.exact.rounding`). Microbatches are the logical workers of EasyScale (arXiv 2208.14228).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

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
from jaxdp.parallel.reading import ShardedReplica
from jaxdp.parallel.reduction import EVERY, Plan, Reduction, in_buckets, sum_to_slice
from jaxdp.parallel.sums import FLOATS, FloatSums, GradFunction
from jaxdp.split import WHOLE
from jaxdp.train.state import Batch, Sums, TrainState, microbatch_key
from jaxdp.train.step import Replica

Tree = Any
EXPONENTS = "exponents"  # the entry of `TrainState.extra`
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
    """The content of `Sums.extra`: the next update's exponents, the number of recomputations,
    `Part.nonfinite`.
    """

    exponents: jax.Array
    recomputed: jax.Array
    nonfinite: jax.Array


class IntegerSums(FloatSums):
    """Sums that are exact, and the same rounding in every program.

    Args:
        form: the integers.
        group: the number of microbatches that are computed and rounded together.
    """

    in_backward = False
    advice = ELEMENTWISE

    def __init__(self, name: str, group: int = 1):
        self.form, self.group = FORMATS[name], group
        self.coupled = COUPLED.format(name)

    def replica(self, plan: Plan, numbers: jax.Array, step: jax.Array) -> Replica:
        return UnfusedReplica(plan, numbers, opaque_true(step), self.coupled)

    def over_microbatches(
        self, f: GradFunction, plan: Plan, state: TrainState, batch: Batch, replica: Replica
    ) -> Sums:
        """Sum f of each group of microbatches separately, as integers over all devices."""
        summands = (int(plan.assignment.max()) + 1) // self.group
        live = opaque_true(state.step)

        def groups(tree: Tree) -> Tree:
            return jax.tree.map(lambda x: x.reshape(-1, self.group, *x.shape[1:]), tree)

        pieces = groups((state.kept, batch, replica.numbers))
        exponents = state.extra[EXPONENTS] if plan.is_update else jnp.zeros(0, jnp.int32)

        @functools.partial(jax.jit, inline=True)  # traced once
        def compute(state: TrainState, piece: Tree) -> Sums:
            kept, batch, numbers = piece
            part = self.replica(plan, numbers, state.step)
            return fusion_barrier(f(state.replace(kept=kept), batch, part), opaque_true(state.step))

        def attempt(before: Attempt) -> Attempt:
            def add(total: Part, piece: Tree) -> tuple[Part, Sums]:
                sums, number = compute(state, piece), piece[2][0]

                def real(tree):
                    return jax.tree.map(
                        lambda x: jnp.where(number >= 0, x, jnp.zeros_like(x)), tree
                    )

                key = None
                if self.form.stochastic and plan.is_update:
                    key = microbatch_key(state.seed, state.step, number)
                part = group_part(sums.grads, before.exponents, self.form, summands, key, live)
                part = real(part)
                ints = jax.tree.map(
                    jnp.add, total.ints, scatter_by_group(plan, part.ints, self.form)
                )
                needed = jnp.maximum(total.needed, part.needed)
                rest = real(sums._replace(grads=None, kept=None))._replace(kept=sums.kept)
                return Part(ints, needed, total.nonfinite + part.nonfinite), rest

            part, rest = scan_unfused(
                add, zeros(before.part), pieces, live, like._replace(grads=None)
            )
            values = value_exponents(jax.tree.leaves(rest._replace(kept=None)))
            local = [part.needed, *map(jnp.ravel, values)]
            needed = jax.lax.pmax(jnp.concatenate(local), plan.axes.all)
            grads = needed[: part.needed.size]
            good = fits(before.exponents, grads, self.form, summands)
            after = jnp.where(good, before.exponents, (grads + self.form.headroom) * PER_BIT)
            return Attempt(after, part, rest, needed, before.times + 1, jnp.all(good))

        like = jax.eval_shape(compute, state, jax.tree.map(lambda x: x[0], pieces))
        first = empty_attempt(like, exponents, plan, self.form, len(pieces[2]))
        done = jax.lax.while_loop(lambda a: ~a.fits, attempt, first)
        return reduce_attempt(done, plan, self.form, summands)

    def over_devices(self, plan: Plan, sums: Sums) -> Sums:
        """Return the sums, which `over_microbatches` has reduced already."""
        return sums

    def update(self, apply: Callable[..., Any], state: TrainState, sums: Sums) -> Any:
        """Apply the update: every operation is rounded as written, and the sums pass a fusion
        barrier first."""
        live, info = opaque_true(state.step), sums.extra
        apply = as_written(apply, live)
        new, metrics = apply(state, fusion_barrier(sums._replace(extra=None), live))
        bad = metrics["nonfinite_grads"]
        bad = jnp.where(info.nonfinite > 0, info.nonfinite.astype(jnp.float32), bad)
        metrics |= {"nonfinite_grads": bad, "recomputed": info.recomputed}
        return new.replace(extra={**new.extra, EXPONENTS: info.exponents}), metrics

    def total(self, grads: Tree, dims: Tree, axis: str, step: jax.Array) -> jax.Array:
        return squares_and_bad(grads, dims, axis, opaque_true(step))

    def sum_rows(
        self, reduction: Reduction, tree: Tree, axis: str, rows: int, keys: jax.Array | None
    ) -> Tree:
        return sum_rows(reduction, tree, axis, rows, keys, self.form)

    def rounded(self, f: Callable[..., Any], step: jax.Array) -> Callable[..., Any]:
        return as_written(f, opaque_true(step))

    def make_state(self, make: Callable[[], TrainState], mesh: Any) -> TrainState:
        """Compute full leaves on every device before it keeps its slices: the partitioner would
        divide sums, such as the norm that scales a matrix, over devices. The barriers are inside:
        it would move its slicing in front of a barrier outside."""

        def unfused() -> TrainState:
            """Return the state leaf by leaf, so that not all full leaves are in memory at once."""
            state = make()
            live = opaque_true(state.step)

            def barrier(x: jax.Array) -> jax.Array:
                return fusion_barrier(x, live) if is_float(x) else x

            return jax.tree.map(barrier, state)

        everywhere = P()
        return jax.shard_map(
            unfused, mesh=mesh, in_specs=(), out_specs=everywhere, check_vma=False
        )()


class UnfusedReplica(ShardedReplica):
    """A device's part in a step whose blocks, and what is gathered, are computed separately.

    Args:
        live: from `opaque_true`.
        coupled: the text of the error for a loss that couples the examples of all microbatches.
    """

    def __init__(self, plan: Plan, numbers: jax.Array, live: jax.Array, coupled: str):
        super().__init__(plan, numbers)
        self.live, self.coupled = live, coupled

    def summed(self, last: bool) -> Tree:
        """Return that no gradients are summed where they are computed: they are no integers yet."""
        return jax.tree.map(lambda _: False, self.plan.dims)

    def settle(self, arrays: list[jax.Array], moved: bool, in_block: bool, live: Any) -> Any:
        """Put a barrier around what moves, and around a block in every layout, so that a block is
        the same program in all."""
        return fusion_barrier(arrays, live) if moved or in_block else arrays

    def join(self, tree: Tree) -> Tree:
        """Refuse: a loss over all examples would see those of one microbatch only."""
        raise UsageError(self.coupled)


def integers(name: str, bucket_mb: float = 25.0, safe: bool = False, group: int = 1) -> Reduction:
    """Return a reduction that sums integers in buckets. group: number of microbatches computed and
    rounded together."""
    lower_on_cpu()

    def add_up(flat: jax.Array, axes: Any) -> jax.Array:
        return unpack(jax.lax.psum(pack(flat), axes), flat.dtype, flat.size)

    def row_of(rows: jax.Array, axes: Any) -> jax.Array:
        row = sum_to_slice(pack(rows), 0, axes, safe)[0]
        return unpack(row, rows.dtype, rows.shape[-1])

    reduction = in_buckets(int(bucket_mb * 1e6), add_up, row_of)
    return reduction._replace(arithmetic=IntegerSums(name, group), group=group)


def remembering(
    make: Callable[..., TrainState], trainable: Callable[[Tree], Tree]
) -> Callable[..., TrainState]:
    """Add an exponent for each gradient to the initial state: too small, so the first update
    determines it."""

    def make_state(*arguments: Any) -> TrainState:
        state = make(*arguments)
        exponents = jnp.zeros(len(jax.tree.leaves(trainable(state.params))), jnp.int32)
        return state.replace(extra={**state.extra, EXPONENTS: exponents})

    return make_state


def empty_attempt(
    like: Sums, exponents: jax.Array, plan: Plan, form: Format, slots: int
) -> Attempt:
    """Return the attempt before the first computation; like: the shapes of a slot's sums."""
    leaves = exponents.size

    def ints():
        return scatter_by_group(
            plan, quantized(zeros(like.grads), jnp.zeros(leaves, jnp.int32), form, 1), form
        )

    part = Part(zeros(jax.eval_shape(ints)), jnp.zeros(leaves, jnp.int32), jnp.int32(0))
    rest = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), like._replace(grads=None))
    values = jax.eval_shape(value_exponents, jax.tree.leaves(rest._replace(kept=None)))
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


def scatter_by_group(plan: Plan, ints: Tree, form: Format) -> Tree:
    """Reduce-scatter one group's integers if gradients are sharded microbatch by microbatch; else
    return them unchanged."""
    if plan.when != EVERY:
        return ints
    leaves, treedef = jax.tree.flatten(ints)
    dims = jax.tree.leaves(plan.trainable(plan.dims))
    sent = [x if dim == WHOLE else x.astype(form.wire(x.dtype)) for x, dim in zip(leaves, dims)]
    total = plan.reduction.scatter(sent, dims, plan.axes)
    return jax.tree.unflatten(treedef, [new.astype(x.dtype) for new, x in zip(total, leaves)])


def reduce_attempt(done: Attempt, plan: Plan, form: Format, summands: int) -> Sums:
    """Reduce one device's integers over all devices and return the sums as floats."""
    number = done.exponents.size
    grad_needed, rest_needed = done.needed[:number], done.needed[number:]
    rest, treedef = jax.tree.flatten(done.rest._replace(kept=None))
    exponents_of_rest = split_exponents(rest_needed, rest)
    sums: Sums = jax.tree.unflatten(treedef, quantized_sums(rest, exponents_of_rest, summands))
    sums = sums._replace(grads=done.part.ints, extra=done.part.nonfinite)
    wire = None if form.bits == 32 else form.wire(jnp.int32)
    sums = FLOATS.over_devices(dataclasses.replace(plan, dtype=wire), sums)

    grads, grad_treedef = jax.tree.flatten(sums.grads)
    bits = jnp.where(grad_needed == NOT_FINITE, grad_needed, in_bits(done.exponents))
    float_grads = [restore(x, e, form, summands) for x, e in zip(grads, bits)]
    totals = jax.tree.leaves(sums._replace(grads=None, extra=None))
    floats = restored_sums(totals, exponents_of_rest, rest, summands)
    result: Sums = jax.tree.unflatten(treedef, floats)
    exponents = remembered(done.exponents, grad_needed, form.headroom)
    info = ExactInfo(exponents, done.times - 1, sums.extra) if plan.is_update else None
    return result._replace(
        grads=jax.tree.unflatten(grad_treedef, float_grads),
        kept=jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), done.rest.kept),
        extra=info,
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
    `FloatSums`.

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


def zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
