"""The exact reductions: sums of integers over all devices, and everything else rounded alike in every program.

A microbatch's gradient becomes integers (`jaxdp.parallel.fixed_point`) with exponents that the state remembers. An
update that does not fit is computed again with the exponents that it needs: the largest over all devices, so that all
decide alike. Losses, weights, metrics and statistics are small: they wait until all slots are done, and their exponents
are of this update. Equal sums need equal summands: each microbatch, and `apply`, is computed by itself
(`jaxdp.parallel.rounding`). Microbatches are the logical workers of EasyScale (arXiv 2208.14228).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.core.state import Batch, Gather, Join, Sums, TrainState, View
from jaxdp.errors import UsageError
from jaxdp.parallel.fixed_point import (
    FORMATS,
    LARGEST,
    NOT_FINITE,
    Format,
    exponent_of,
    in_bits,
    is_float,
    pack,
    quantize,
    quantized,
    remembered,
    restore,
    squares_and_bad,
    unpack,
)
from jaxdp.parallel.reduction import Reduction, exchange, in_buckets
from jaxdp.parallel.rounding import as_written, each, running, settle
from jaxdp.parallel.sums import Arithmetic, Place, Summed, own_slots, reducer, scatter_split

Tree = Any
ELEMENTWISE = "with reduction: exact, ZeRO needs an elementwise one, such as sgd, adam, adamw or lion, or zero: 0"

COUPLED = (
    "parallel.reduction: {} computes each microbatch by itself, and this loss couples the examples of all; "
    "use xla or bucket"
)


class Part(NamedTuple):
    """Of gradients: a tree of their sums; the exponent that each leaf needs; how many elements are not finite."""

    ints: Tree
    needed: jax.Array
    nonfinite: jax.Array


class Attempt(NamedTuple):
    """exponents[leaf] to compute with; what was computed with those before: part, the rest of each group [group, ...],
    and the exponents that leaves of both need; how many times; whether all fit."""

    exponents: jax.Array
    part: Part
    rest: Sums
    needed: jax.Array
    times: jax.Array
    fits: jax.Array


class Kept(NamedTuple):
    """What `Sums.exponents` holds: those of the next update; whether this one was computed twice; `Part.nonfinite`."""

    exponents: jax.Array
    recomputed: jax.Array
    nonfinite: jax.Array


def integers(name: str, bucket_mb: float = 25.0, safe: bool = False, group: int = 1) -> Reduction:
    """Sum integers in buckets. group: so many microbatches are computed, and rounded, together."""
    add_up = lambda flat, axes: unpack(jax.lax.psum(pack(flat), axes), flat.dtype, flat.size)
    row_of = lambda rows, axes: unpack(exchange(pack(rows), axes, safe), rows.dtype, rows.shape[-1])
    total = lambda dims, axis, update: lambda tree: squares_and_bad(tree, dims, axis, running(update))
    slots = functools.partial(over_slots, form=FORMATS[name], group=group, join=refuse_to_join(name))
    arithmetic = Arithmetic(slots, finish, total, running, in_backward=False, elementwise=ELEMENTWISE)
    return in_buckets(int(bucket_mb * 1e6), add_up, row_of)._replace(arithmetic=arithmetic, group=group)


def remembering(make: Callable[[], TrainState], trainable: Callable[[Tree], Tree]) -> Callable[[], TrainState]:
    """Add to the state before the first update an exponent for each gradient: too small, until one is known."""

    def make_state() -> TrainState:
        state = make()
        return state.replace(exponents=jnp.zeros(len(jax.tree.leaves(trainable(state.params))), jnp.int32))

    return make_state


def over_slots(f: Callable[..., Sums], place: Place, form: Format, group: int, join: Join) -> Summed:
    """f(view, batch, gather) -> Sums: f of each group of slots by itself, summed as integers over all devices."""
    summands = (int(place.table.max()) + 1) // group

    def run(view: View, batch: Batch, gather: Gather) -> Sums:
        live = running(view.step)
        pieces = (view.carry, batch, own_slots(place.table, place.axes))
        pieces = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), pieces)
        known = view.exponents if place.key else jnp.zeros(0, jnp.int32)

        def compute(piece: Tree) -> Sums:
            carry, batch, slots = piece
            return settle(f(view._replace(carry=carry), batch, slots, gather, join), live)

        def attempt(before: Attempt) -> Attempt:
            def add(total: Part, piece: Tree) -> tuple[Part, Sums]:
                sums, slot = compute(piece), piece[2][0]
                real = lambda tree: jax.tree.map(lambda x: jnp.where(slot >= 0, x, jnp.zeros_like(x)), tree)
                key = place.key(view.step, slot) if form.stochastic and place.key else None
                part = real(part_of(sums.grads, before.exponents, form, summands, key, live))
                ints = jax.tree.map(jnp.add, total.ints, sent_by_slot(place, part.ints, form))
                needed = jnp.maximum(total.needed, part.needed)
                rest = real(sums._replace(grads=None, carry=None))._replace(carry=sums.carry)
                return Part(ints, needed, total.nonfinite + part.nonfinite), rest

            part, rest = each(add, zeros(before.part), pieces, live, like._replace(grads=None))
            here = [part.needed, *(exponent_of(x)[None] for x in jax.tree.leaves(rest._replace(carry=None)))]
            needed = jax.lax.pmax(jnp.concatenate(here), place.axes.all)
            grads = needed[: part.needed.size]
            fits = jnp.all((grads <= in_bits(before.exponents)) | (grads == NOT_FINITE))
            more = remembered(before.exponents, grads, form.headroom)
            exponents = jnp.where(fits, before.exponents, more)
            return Attempt(exponents, part, rest, needed, before.times + 1, fits)

        like = jax.eval_shape(compute, jax.tree.map(lambda x: x[0], pieces))
        first = start(like, known, place, form, len(pieces[2]))
        done = jax.lax.while_loop(lambda a: ~a.fits, attempt, first)
        return totalled(done, place, form, summands)

    return run


def start(like: Sums, known: jax.Array, place: Place, form: Format, slots: int) -> Attempt:
    """Nothing computed yet; like: the shapes of a slot's sums, known: the exponents."""
    leaves = known.size
    ints = lambda: sent_by_slot(place, quantized(zeros(like.grads), jnp.zeros(leaves, jnp.int32), form, 1), form)
    part = Part(zeros(jax.eval_shape(ints)), jnp.zeros(leaves, jnp.int32), jnp.int32(0))
    rest = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), like._replace(grads=None))
    needed = jnp.zeros(leaves + len(jax.tree.leaves(rest._replace(carry=None))), jnp.int32)
    return Attempt(known, part, rest, needed, jnp.int32(0), jnp.bool_(False))


def part_of(
    grads: Tree, exponents: jax.Array, form: Format, summands: int, key: jax.Array | None, live: jax.Array
) -> Part:
    """What one group adds to the sums."""
    leaves, none = jax.tree.leaves(grads), jnp.int32(0)
    if not leaves:
        return Part(grads, jnp.zeros(0, jnp.int32), none)
    # settled, or each of those who read one of them would compute all
    needed = settle(jnp.stack([exponent_of(x) for x in leaves]), live)
    count = lambda: sum((jnp.sum(~(jnp.abs(x) < 2.0**LARGEST), dtype=jnp.int32) for x in leaves), none)
    bad = jax.lax.cond(jnp.any(needed == NOT_FINITE), count, lambda: none)
    return Part(quantized(grads, exponents, form, summands, key), needed, bad)


def sent_by_slot(place: Place, ints: Tree, form: Format) -> Tree:
    """Where gradients are split slot by slot: each leaf with a dim as this device's slice of the sum over devices."""
    if not place.per_slot:
        return ints
    sent = jax.tree.map(lambda x: x.astype(form.wire(x.dtype)), ints)
    return jax.tree.map(lambda x, y: x.astype(y.dtype), scatter_split(place, sent), ints)


def totalled(done: Attempt, place: Place, form: Format, summands: int) -> Sums:
    """What one device has of an update -> the sums of all devices, as floats."""
    own, others = done.needed[: done.exponents.size], done.needed[done.exponents.size :]
    rest, treedef = jax.tree.flatten(done.rest._replace(carry=None))
    wide = FORMATS["exact"]

    def total(x: jax.Array, exponent: jax.Array) -> jax.Array:
        ints = quantize(x, exponent, wide, summands) if is_float(x) else x
        return ints.sum(0, dtype=ints.dtype)

    sums: Sums = jax.tree.unflatten(treedef, map(total, rest, others))
    sums = sums._replace(grads=done.part.ints, exponents=done.part.nonfinite)
    sums = reducer(place._replace(dtype=None if form.bits == 32 else form.wire(jnp.int32)))(sums)

    grads, structure = jax.tree.flatten(sums.grads)
    used = jnp.where(own == NOT_FINITE, own, in_bits(done.exponents))
    back = [restore(x, e, form, summands) for x, e in zip(grads, used)]
    found = jax.tree.leaves(sums._replace(grads=None, exponents=None))
    floats = [restore(x, e, wide, summands) if is_float(y) else x for x, e, y in zip(found, others, rest)]
    result: Sums = jax.tree.unflatten(treedef, floats)
    kept = Kept(remembered(done.exponents, own, form.headroom), done.times - 1, sums.exponents) if place.key else None
    carry = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), done.rest.carry)
    return result._replace(grads=jax.tree.unflatten(structure, back), carry=carry, exponents=kept)


def finish(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`apply` with every operation rounded as it is written, from sums that have been written to memory."""

    @functools.wraps(apply)
    def run(state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, jax.Array]]:
        live, kept = running(state.step), sums.exponents
        new, metrics = as_written(apply, live)(state, settle(sums._replace(exponents=None), live))
        bad = jnp.where(kept.nonfinite > 0, kept.nonfinite.astype(jnp.float32), metrics["nonfinite_grads"])
        metrics |= {"nonfinite_grads": bad, "recomputed": kept.recomputed}
        return new.replace(exponents=kept.exponents), metrics

    return run


def refuse_to_join(name: str) -> Join:
    """Raises UsageError when it is called: a loss over all examples would see those of one microbatch."""

    def refuse(tree: Tree) -> Tree:
        raise UsageError(COUPLED.format(name))

    return refuse


def zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
