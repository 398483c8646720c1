"""The same bits on any number of devices: everything is added up by one fixed tree over the microbatches.

After EasyScale (Li et al., arXiv 2208.14228), with microbatches for its logical workers. The tree pairs neighbours:
((0 + 1) + (2 + 3)) + ... Where a device adds up its own microbatches first, it has consecutive ones: the low bits of a
microbatch's number are its slot, the high ones its device. Where each slot is reduced over the devices as it comes,
it is the other way round. Either way the low bits are added up first.

Equal sums need equal summands, and a compiler rounds the same expression otherwise where it stands among others: a
product goes unrounded into the addition behind it. So what must not depend on the layout is computed in a loop whose
length only the run knows, over a buffer of at least two entries: nothing gets out of it, or into it, by fusion.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.errors import UsageError
from jaxdp.parallel.rounding import pin, settle
from jaxdp.split import WHOLE, split_dims, take
from jaxdp.split import pieces as cuts

Tree = Any


def largest(microbatches: int) -> int:
    """The largest power of two that divides it: the most devices of exact mode."""
    return microbatches & -microbatches


def check_devices(microbatches: int, devices: int, per_slot: bool) -> None:
    """UsageError where so many devices cannot add up by the tree; per_slot: each slot is reduced as it comes."""
    most = largest(microbatches)
    if devices & (devices - 1) or devices > most:
        counts = ", ".join(str(2**i) for i in range(most.bit_length()))
        raise UsageError(
            f"parallel.reduction: exact does not work on {devices} devices with {microbatches} microbatches; it needs "
            f"a power of two that divides the microbatches: {counts} devices",
            rank=0,
        )
    if per_slot and most != microbatches:
        raise UsageError(
            f"parallel.reduction: exact with gradients split slot by slot needs microbatches that are a power of two, "
            f"not {microbatches}; set parallel.accumulator to whole",
            rank=0,
        )


def add_up(f: Callable[..., Tree], pieces: Tree, live: jax.Array, keep: Callable[[Tree], tuple[Tree, Tree]]) -> Tree:
    """f(*piece) of every slot, added up by the tree; pieces: leaves [slot, ...], of which f gets [1, ...].

    keep(result) -> (what adds up, what stays with its slot [1, ...]); both come back, the latter as [slot, ...].
    Of slots that are q x 2^j, q odd, q consecutive ones are added one after the other, such groups in pairs. Sums wait
    at their level of the tree, as digits do in a binary counter: log2(slots) + 1 of them, not one for every slot.
    """
    slots = len(jax.tree.leaves(pieces)[0])
    pieces = at_least_two(pieces)
    stop, store = _counter(slots)
    first = jax.eval_shape(lambda pieces: keep(f(*_at(pieces, 0))), pieces)
    levels = jax.tree.map(lambda x: jnp.zeros((max(2, int(store.max()) + 1), *x.shape), x.dtype), first[0])
    stays = jax.tree.map(lambda x: jnp.zeros((max(2, slots), *x.shape[1:]), x.dtype), first[1])

    def slot(i: jax.Array, carried: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        levels, stays = carried
        new, own = keep(f(*settle(_at(pieces, i), live)))
        waiting = lambda level: jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, level, keepdims=False), levels)
        plus = lambda level, new: jax.tree.map(jnp.add, waiting(level), new)
        new = jax.lax.fori_loop(0, jnp.asarray(stop)[i], plus, new)
        put = lambda buffer, x, at: jax.lax.dynamic_update_index_in_dim(buffer, x, at, 0)
        levels = jax.tree.map(lambda buffer, x: put(buffer, x, jnp.asarray(store)[i]), levels, new)
        return levels, jax.tree.map(lambda buffer, x: put(buffer, x[0], i), stays, own)

    levels, stays = jax.lax.fori_loop(0, jnp.where(live, slots, 0), slot, (levels, stays))
    return jax.tree.map(lambda x: x[int(store[-1])], levels), jax.tree.map(lambda x: x[:slots], stays)


def _counter(slots: int) -> tuple[np.ndarray, np.ndarray]:
    """(how many levels, from the lowest, a slot's value is added to; the level where it then waits), by slot."""
    odd = slots // largest(slots)
    group, place = np.divmod(np.arange(slots), odd)
    carries = np.array([largest(int(g) + 1).bit_length() - 1 for g in group])
    if odd == 1:
        return carries.astype(np.int32), carries.astype(np.int32)
    last = place == odd - 1
    stop = np.where(last, 1 + carries, np.minimum(place, 1))
    return stop.astype(np.int32), np.where(last, 1 + carries, 0).astype(np.int32)


def at_least_two(tree: Tree) -> Tree:
    """Leaves [n, ...], or twice the only entry: one alone would not be looked up, and the loop compiled otherwise."""
    return jax.tree.map(lambda x: x if len(x) > 1 else jnp.concatenate([x, x]), tree)


def _at(tree: Tree, i: Any) -> Tree:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1), tree)


def halve(rows: jax.Array, axis: Any) -> jax.Array:
    """Recursive halving: rows [device, n] of every device -> the sum [n] over devices of this device's row.

    (Thakur, Rabenseifner & Gropp 2005.) The neighbour across the lowest bit comes first, so that sums pair neighbours.
    A device sends (N - 1)/N of its rows, as it does in a ring.
    """
    devices, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    rounds = devices.bit_length() - 1
    rest = rows.reshape(*[2] * rounds, -1)  # one dim for each bit of the row's number, the highest first
    for bit in range(rounds):
        own, dim = (index >> bit) & 1, rounds - 1 - bit
        half = lambda side, x=rest, dim=dim: jax.lax.dynamic_index_in_dim(x, side, dim, keepdims=False)
        got = jax.lax.ppermute(half(1 - own), axis, [(i, i ^ 1 << bit) for i in range(devices)])
        rest = half(own) + got
    return rest.reshape(-1)


def sum_all(flat: jax.Array, axis: Any) -> jax.Array:
    """[n] of every device -> their sum [n] on each: halving, then what all have gathered."""
    devices = jax.lax.axis_size(axis)
    if devices == 1:
        return flat
    padded = jnp.pad(flat, (0, -flat.size % devices))
    row = halve(padded.reshape(devices, -1), axis)
    return jax.lax.all_gather(row, axis, tiled=True)[: flat.size]


class Piece(NamedTuple):
    """Into how many pieces a leaf is cut to be measured, and along which dim; a slice has its part of them."""

    dim: int
    number: int


def pieces_of(tree: Tree, blocks: tuple[str, ...], most: int) -> Tree:
    """The same whatever the number of devices: as a leaf would be split over `most`, or as many as there can be."""
    dims = split_dims(tree, min(2, most), blocks, most)
    return jax.tree.map(lambda x, d: Piece(d, 1 if d == WHOLE else cuts(x.shape, d, most)), tree, dims)


def total(
    measure: Callable[[Tree], jax.Array], tree: Tree, dims: Tree, pieces: Tree, axis: str, live: jax.Array
) -> jax.Array:
    """measure(the whole tree), measured in pieces that are the same however it is split.

    dims: along which leaves are slices over the axis, WHOLE for whole ones. pieces: see `pieces_of`.
    """
    leaves, along = jax.tree.leaves(tree), jax.tree.leaves(dims)
    cuts: list[Piece] = jax.tree.leaves(pieces, is_leaf=lambda x: isinstance(x, Piece))
    found = []
    for number in sorted({cut.number for cut in cuts}):
        group = [(x, d, cut.dim) for x, d, cut in zip(leaves, along, cuts, strict=True) if cut.number == number]
        split = any(d != WHOLE for _, d, _ in group)
        assert all((d == cut) if split else (d == WHOLE) for _, d, cut in group), "leaves alike are split alike"
        here = number // jax.lax.axis_size(axis) if split else number
        measured = _each(measure, [(x, cut) for x, _, cut in group], here, live)
        if split:
            measured = jax.lax.all_gather(measured, axis, tiled=True)
        while len(measured) > 1:
            measured = measured[0::2] + measured[1::2]
        found.append(measured[0])
    return pin(functools.reduce(jnp.add, found), live)


def _each(measure: Callable, leaves: list[tuple[jax.Array, int]], number: int, live: jax.Array) -> jax.Array:
    """[piece, ...]: measure([a piece of each leaf]), one piece after the other."""
    double = lambda x, dim: jnp.stack([x, x]) if dim == WHOLE else jnp.concatenate([x, x], dim)
    if number == 1:  # see `at_least_two`
        leaves = [(double(x, dim), dim) for x, dim in leaves]
    there = max(2, number)

    def piece(i: Any) -> list[jax.Array]:
        """A leaf that cannot be cut is one of two; settled, for the sum over a slice depends on what it is cut from."""
        return settle([take(x, max(dim, 0), i, there) for x, dim in leaves], live)

    like = jax.eval_shape(lambda: measure(piece(0)))
    put = lambda i, found: jax.lax.dynamic_update_index_in_dim(found, measure(piece(i)), i, 0)
    found = jnp.zeros((there, *like.shape), like.dtype)
    return jax.lax.fori_loop(0, jnp.where(live, number, 0), put, found)[:number]
