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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from jaxdp.errors import UsageError
from jaxdp.exact.fixed_point import (
    PER_BIT,
    fits,
    in_bits,
    in_words,
    needed_exponents,
    quantized,
    remembered,
    restore_values,
    restored,
    squares_and_bad,
    sum_values,
    value_exponents,
)
from jaxdp.exact.formats import FORMATS
from jaxdp.exact.products import lower_on_cpu
from jaxdp.exact.rounding import as_written, fusion_barrier, scan_unfused, zeros
from jaxdp.parallel.reading import ShardedReplica
from jaxdp.parallel.reduction import EVERY, NEVER, Plan, Reduction, in_buckets, sum_to_slice
from jaxdp.parallel.sums import FLOATS, FloatSums, GradFunction
from jaxdp.train.state import Batch, Sums, TrainState, microbatch_key, select
from jaxdp.train.step import Replica

Tree = Any
EXPONENTS = "exponents"  # the entry of `TrainState.extra`


class Attempt(NamedTuple):
    """The result of one attempt to sum gradients with given exponents.

    Args:
        exponents: [leaf], for the next attempt; unchanged where a leaf fits.
        needed: the exponents of gradients [leaf] and of all values that were needed.
        ints: the sums of gradients; wrong unless all fit.
        values: the other sums [group, ...].
        kept: the new `TrainState.kept` [group, ...].
        fits: all gradients have fit, as they do in a second attempt.
    """

    exponents: jax.Array
    needed: Tree
    ints: Tree
    values: Sums
    kept: Tree
    fits: jax.Array


class IntegerSums(FloatSums):
    """Sums that are exact, and the same rounding in every program.

    Args:
        name: of the format of the integers.
    """

    in_backward = False
    advice = "with reduction: exact, ZeRO needs an elementwise one, such as sgd, adam, adamw or lion, or zero: 0"

    def __init__(self, name: str):
        self.name, self.form = name, FORMATS[name]

    def replica(self, plan: Plan, numbers: jax.Array, step: jax.Array) -> Replica:
        # No gradients are summed where they are computed: they are no integers yet.
        replica = UnfusedReplica(dataclasses.replace(plan, when=NEVER), numbers)
        replica.live = step
        return replica

    def over_microbatches(
        self, f: GradFunction, plan: Plan, state: TrainState, batch: Batch, replica: Replica
    ) -> Sums:
        """Sum f of each group of microbatches separately, as integers over all devices."""
        form, group, step = self.form, plan.reduction.group, state.step
        summands = (int(plan.assignment.max()) + 1) // group
        local = state.kept, batch, replica.numbers
        pieces = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), local)

        @functools.partial(jax.jit, inline=True)  # traced once
        def add(exponents, piece):
            """Return the integers of one group, and what is not summed here."""
            kept, batch, numbers = piece
            of_group = self.replica(plan, numbers, step)
            sums = fusion_barrier(f(state.replace(kept=kept), batch, of_group), step)
            key = microbatch_key(state.seed, step, numbers[0])
            # Without the fusion barrier, every reader of one exponent would compute all of them
            needed = fusion_barrier(needed_exponents(sums.grads), step)
            ints = quantized(sums.grads, in_bits(exponents), form, summands, key, 2)
            part = ints, needed, sums._replace(grads=None, kept=None)
            ints, *rest = select(numbers[0] >= 0, part, zeros(part))
            if plan.when == EVERY:
                dims = plan.trainable(plan.param_dims)
                ints = plan.reduction.scatter(ints, dims, plan.axes)
            return ints, (*rest, sums.kept)

        def attempt(exponents):
            ints, (needed, values, kept) = scan_unfused(
                functools.partial(add, exponents), pieces, step
            )
            here = jnp.max(needed, 0, initial=0), value_exponents(values)
            needed = largest(here, plan.axes.all)
            good = fits(exponents, needed[0], form, summands)
            exponents = jnp.where(good, exponents, (needed[0] + form.headroom) * PER_BIT)
            return Attempt(exponents, needed, ints, values, kept, jnp.all(good))

        exponents = state.extra[EXPONENTS] if plan.is_update else jnp.zeros(0, jnp.int32)
        first = zeros(jax.eval_shape(attempt, exponents))._replace(exponents=exponents)
        done = jax.lax.while_loop(lambda a: ~a.fits, lambda a: attempt(a.exponents), first)

        needed, value_needed = done.needed
        values = sum_values(done.values, value_needed, summands)
        as_integers = dataclasses.replace(plan, dtype=None)  # sent as they are
        total = FLOATS.over_devices(as_integers, values._replace(grads=done.ints))
        bits = jnp.maximum(needed, in_bits(done.exponents))  # more only if NOT_FINITE
        sums = restore_values(total._replace(grads=None), value_needed, summands)
        recomputed = jnp.any(done.exponents != exponents).astype(jnp.int32)
        info = remembered(done.exponents, needed, form.headroom), recomputed
        return sums._replace(
            grads=restored(total.grads, bits, summands),
            kept=jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), done.kept),
            extra=info if plan.is_update else None,
        )

    def over_devices(self, plan: Plan, sums: Sums) -> Sums:
        """Return the sums, which `over_microbatches` has reduced already."""
        return sums

    def width(self, itemsize: int) -> int:
        bits = self.form.bits
        return max(itemsize, 4) if bits == 32 else bits // 8

    def update(self, apply: Callable[..., Any], state: TrainState, sums: Sums) -> Any:
        """Apply the update: every operation is rounded as written, and the sums pass a fusion
        barrier first."""
        exponents, recomputed = sums.extra
        sums = fusion_barrier(sums, state.step)
        new, metrics = as_written(apply, state.step)(state, sums)
        new = new.replace(extra={**new.extra, EXPONENTS: exponents})
        return new, {**metrics, "recomputed": recomputed}

    total = staticmethod(squares_and_bad)
    rounded = staticmethod(as_written)

    def sum_rows(
        self, reduction: Reduction, tree: Tree, axis: str, rows: int, keys: jax.Array | None
    ) -> Tree:
        """See `FloatSums`. The exponents are determined first, by a maximum over all devices, so
        that the integers always fit."""
        if not jax.tree.leaves(tree):
            return tree
        if keys is None:
            exponents = largest(value_exponents(tree), axis)
            sums = reduction.reduce(sum_values(tree, exponents, rows), axis)
            return restore_values(sums, exponents, rows)
        needed = largest(needed_exponents(tree), axis)
        ints = jax.vmap(lambda x, key: quantized(x, needed, self.form, rows, key))(tree, keys)
        sums = jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), ints)
        return restored(reduction.reduce(sums, axis), needed, rows)

    def make_state(self, make: Callable[[], TrainState], mesh: Any) -> TrainState:
        """Compute full leaves on every device before it keeps its slices: the partitioner would
        divide sums, such as the norm that scales a matrix, over devices. The barriers are inside:
        it would move its slicing in front of a barrier outside."""

        def unfused():
            """Return the state leaf by leaf, so that not all full leaves are in memory at once."""
            state = make()
            return jax.tree.map(lambda x: fusion_barrier(x, state.step), state)

        return jax.shard_map(unfused, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)()


class UnfusedReplica(ShardedReplica):
    """A device's part in a step whose blocks, and what is gathered, are computed separately."""

    def settle(self, arrays: list[jax.Array], moved: bool, in_block: bool, live: Any) -> Any:
        """Put a barrier around what moves, and around a block in every layout, so that a block is
        the same program in all."""
        return fusion_barrier(arrays, live) if moved or in_block else arrays

    def join(self, tree: Tree) -> Tree:
        """Refuse: a loss over all examples would see those of one microbatch only."""
        raise UsageError(
            f"parallel.reduction: {self.plan.reduction.arithmetic.name} computes each microbatch separately, but this "
            "loss couples the examples of all; use xla or bucket"
        )


def integers(name: str, bucket_mb: float = 25.0, safe: bool = False, group: int = 1) -> Reduction:
    """Return a reduction that sums integers in buckets. group: number of microbatches computed and
    rounded together."""
    lower_on_cpu()

    def add_up(flat, axes):
        return in_words(lambda words: jax.lax.psum(words, axes), flat)

    def row_of(rows, axes):
        return in_words(lambda words: sum_to_slice(words, 0, axes, safe)[0], rows)

    reduction = in_buckets(int(bucket_mb * 1e6), add_up, row_of)
    return reduction._replace(arithmetic=IntegerSums(name), group=group)


def with_exponents(state: TrainState, trainable: Callable[[Tree], Tree]) -> TrainState:
    """Return the initial state with an exponent for each gradient: too small, so the first update
    determines it."""
    exponents = jnp.zeros(len(jax.tree.leaves(trainable(state.params))), jnp.int32)
    return state.replace(extra={**state.extra, EXPONENTS: exponents})


def largest(exponents: Tree, axes: Any) -> Tree:
    """Return the largest exponents of all devices."""
    flat, unravel = ravel_pytree(exponents)
    return unravel(jax.lax.pmax(flat, axes))


exact, exact16, exact8 = (functools.partial(integers, name) for name in FORMATS)
