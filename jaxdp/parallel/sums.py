"""From what a step's functions give of each slot to the sums over all devices: how a reduction's arithmetic is used."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.axes import Axes
from jaxdp.core.frozen import merge
from jaxdp.core.norm import plain_total
from jaxdp.core.state import Batch, Gather, Join, Sums, Total, View
from jaxdp.parallel.reduction import Reduction
from jaxdp.split import WHOLE

Summed = Callable[[View, Batch, Gather], Sums]


class Place(NamedTuple):
    """Where sums are made: inside a strategy's program, which has the named axes.

    table: the microbatch, or -1, of [device, slot]. dims: along which gradients come as this device's slice; None
    leaves all whole. per_slot: gradients with a dim are summed over the devices slot by slot. dtype: that gradients
    travel in, where one is given. key(update, microbatch): of what is random in a reduction.
    """

    reduction: Reduction
    table: np.ndarray
    axes: Axes
    dims: Any = None
    per_slot: bool = False
    dtype: Any = None
    key: Any = None


class Arithmetic(NamedTuple):
    """How a reduction adds up.

    over_slots(f, place) -> f(view, batch, gather) of all slots of this device, summed over all devices.
    finish(apply) -> the function of a program that takes what was summed: apply(state, sums) -> (state, metrics).
    total(dims, axis, update) -> the hook of `Step.apply`, where leaves with a dim are slices along the axis.
    live(update): a true value that the compiler does not know, where values are to be rounded as they stand; or None.
    in_backward: where gradients are split slot by slot, the backward pass does it; else it gives whole ones.
    elementwise: advice where an optimizer whose state is split looks beyond an element; empty where it may.
    """

    over_slots: Callable[[Callable[..., Sums], Place], Summed]
    finish: Callable[[Callable[..., Any]], Callable[..., Any]]
    total: Callable[[Any, str, jax.Array], Total]
    live: Callable[[jax.Array], jax.Array | None]
    in_backward: bool
    elementwise: str


def arithmetic(reduction: Reduction) -> Arithmetic:
    """The reduction's own, or that of floats."""
    return reduction.arithmetic or FLOATS


def own_slots(table: np.ndarray, axes: Axes) -> jax.Array:
    """Inside a strategy's program: the microbatch of each slot of the replica that runs it."""
    return jnp.asarray(table)[jax.lax.axis_index(axes.all)]


def reducer(place: Place) -> Callable[[Sums], Sums]:
    """Sums of one replica -> sums of all."""
    reduction, axes = place.reduction, place.axes

    def reduce(sums: Sums) -> Sums:
        grads = sums.grads
        sent = grads if place.dtype is None else jax.tree.map(lambda x: x.astype(place.dtype), grads)
        split = grads if place.per_slot else scatter_split(place, sent)  # summed already
        whole = jax.tree.map(lambda x, d: x if d == WHOLE else None, sent, dims_of(place, sent))
        total = reduction.reduce(sums._replace(grads=whole, carry=None), axes.all)
        back = jax.tree.map(lambda x, g: x.astype(g.dtype), merge(total.grads, split), grads)
        return total._replace(grads=back, carry=sums.carry)

    return reduce


def dims_of(place: Place, grads: Any) -> Any:
    """The dim of each gradient, WHOLE where all are."""
    return jax.tree.map(lambda _: WHOLE, grads) if place.dims is None else place.dims


def scatter_split(place: Place, grads: Any) -> Any:
    """The gradients, but those with a dim as this device's slice of the sum over all devices."""
    along = jax.tree.map(lambda d: None if d == WHOLE else d, dims_of(place, grads))
    split = jax.tree.map(lambda x, d: None if d == WHOLE else x, grads, dims_of(place, grads))
    return merge(place.reduction.scatter(split, along, place.axes), grads)


def joiner(table: np.ndarray, axes: Axes) -> Join:
    """Inside a strategy's program: the slots of all devices, [microbatch, ...], on each."""

    def gather(x: jax.Array) -> jax.Array:
        small = jnp.issubdtype(x.dtype, jnp.bool_) or (jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 4)
        sent = x.astype(jnp.int32) if small else x  # as all backends take them
        return jax.lax.all_gather(sent, axes.all, tiled=True)[order_of(table)].astype(x.dtype)

    return lambda tree: jax.tree.map(gather, tree)


def order_of(table: np.ndarray) -> np.ndarray:
    """Where each microbatch is among [device x slot]."""
    return np.argsort(np.where(table.reshape(-1) < 0, table.size, table.reshape(-1)), kind="stable")[: table.max() + 1]


def _over_slots(f: Callable[..., Sums], place: Place) -> Summed:
    reduce = reducer(place)

    def run(view: View, batch: Batch, gather: Gather) -> Sums:
        slots = own_slots(place.table, place.axes)
        return reduce(f(view, batch, slots, gather, joiner(place.table, place.axes)))

    return run


def _total(dims: Any, axis: str, update: jax.Array) -> Total:
    if dims is None:
        return plain_total

    def total(tree: Any) -> jax.Array:
        once = jax.lax.axis_index(axis) == 0
        own = jax.tree.map(lambda x, d: jnp.where(once, x, jnp.zeros_like(x)) if d == WHOLE else x, tree, dims)
        return jax.lax.psum(plain_total(own), axis)

    return total


FLOATS = Arithmetic(_over_slots, lambda apply: apply, _total, lambda update: None, in_backward=True, elementwise="")
