"""Sums over all devices from the step's functions on each microbatch, in the arithmetic of a
reduction.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.axes import Axes
from jaxdp.parallel.reduction import Reduction
from jaxdp.split import WHOLE
from jaxdp.train.frozen import merge
from jaxdp.train.norm import plain_total
from jaxdp.train.state import Batch, Gather, Join, Sums, Total, View

MicrobatchSums = Callable[[View, Batch, jax.Array, Gather, Join], Sums]
Reduce = Callable[[Sums], Sums]


class ReductionPlan(NamedTuple):
    """The settings of a sum inside a strategy's program, which defines the named axes.

    assignment[device, local]: the numbers of the microbatches of each device, -1 for none. dims:
    the dim along which each gradient is returned as this device's slice; None: all replicated.
    per_microbatch: sharded gradients are summed over the devices after each microbatch. dtype: of
    the gradient all-reduce, None for their own. is_update: False for an evaluation, which has no
    gradients."""

    reduction: Reduction
    assignment: np.ndarray
    axes: Axes
    dims: Any = None
    per_microbatch: bool = False
    dtype: Any = None
    is_update: bool = False


class Arithmetic(NamedTuple):
    """How a reduction sums; plan: a `ReductionPlan`.

    over_microbatches(f, plan) -> (f over all microbatches of a device, a function that sums its result over devices).
    finish(apply) -> apply(state, sums) -> (state, metrics), for those sums.
    total(dims, axis, update) -> the hook of `Step.apply`; leaves with a dim are slices along the axis.
    live(update): True, opaque to the compiler, if rounding must not depend on fusion; else None.
    sum_rows(reduction, tree, axis, rows, keys[row]) -> the sum of leaves [row, ...] over the rows of all devices of the
    axis, `rows` in all; keys: to round differences to few bits; None for values, which are sent in
    full.
    rounded(f, update) -> f, rounded alike in every program, if rounding must not depend on the program.
    in_backward: the backward pass scatters gradients that are sharded after each microbatch; else
    it returns full ones. elementwise: the advice if the optimizer's state is sharded but it is not
    elementwise; empty: any will do."""

    over_microbatches: Callable[[MicrobatchSums, ReductionPlan], tuple[MicrobatchSums, Reduce]]
    finish: Callable[[Callable[..., Any]], Callable[..., Any]]
    total: Callable[[Any, str, jax.Array], Total]
    live: Callable[[jax.Array], jax.Array | None]
    sum_rows: Callable[..., Any]
    rounded: Callable[[Callable[..., Any], jax.Array], Callable[..., Any]]
    in_backward: bool
    elementwise: str


def arithmetic(reduction: Reduction) -> Arithmetic:
    """Return the reduction's arithmetic, by default that of floats."""
    return reduction.arithmetic or FLOATS


def replica_microbatches(assignment: np.ndarray, axes: Axes) -> jax.Array:
    """Return the numbers of the microbatches of this replica; call it inside a strategy's program."""
    return jnp.asarray(assignment)[jax.lax.axis_index(axes.all)]


def reducer(plan: ReductionPlan) -> Reduce:
    """Return a function that reduces the Sums of each replica to those of all."""
    reduction, axes = plan.reduction, plan.axes

    def reduce(sums: Sums) -> Sums:
        grads = sums.grads
        sent = grads if plan.dtype is None else jax.tree.map(lambda x: x.astype(plan.dtype), grads)
        split = (
            grads if plan.per_microbatch else scatter_split(plan, sent)
        )  # per microbatch: summed already
        replicated = jax.tree.map(lambda x, d: x if d == WHOLE else None, sent, dims_of(plan, sent))
        total = reduction.reduce(sums._replace(grads=replicated, carry=None), axes.all)
        reduced = jax.tree.map(lambda x, g: x.astype(g.dtype), merge(total.grads, split), grads)
        return total._replace(grads=reduced, carry=sums.carry)

    return reduce


def dims_of(plan: ReductionPlan, grads: Any) -> Any:
    """Return the dim of each gradient, WHOLE if it is replicated."""
    return jax.tree.map(lambda _: WHOLE, grads) if plan.dims is None else plan.dims


def scatter_split(plan: ReductionPlan, grads: Any) -> Any:
    """Reduce-scatter the gradients that have a dim; return the others unchanged."""
    along = jax.tree.map(lambda d: None if d == WHOLE else d, dims_of(plan, grads))
    split = jax.tree.map(lambda x, d: None if d == WHOLE else x, grads, dims_of(plan, grads))
    return merge(plan.reduction.scatter(split, along, plan.axes), grads)


def joiner(assignment: np.ndarray, axes: Axes) -> Join:
    """Return the `join` hook of a strategy's program: gather the microbatches of all devices as
    [microbatch, ...].
    """

    def gather(x: jax.Array) -> jax.Array:
        small = jnp.issubdtype(x.dtype, jnp.bool_) or (
            jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 4
        )
        sent = x.astype(jnp.int32) if small else x  # a dtype that all backends support
        return jax.lax.all_gather(sent, axes.all, tiled=True)[order_of(assignment)].astype(x.dtype)

    return lambda tree: jax.tree.map(gather, tree)


def order_of(assignment: np.ndarray) -> np.ndarray:
    """Return the position of each microbatch in [device x local]."""
    return np.argsort(
        np.where(assignment.reshape(-1) < 0, assignment.size, assignment.reshape(-1)), kind="stable"
    )[: assignment.max() + 1]


def _total(dims: Any, axis: str, update: jax.Array) -> Total:
    if dims is None:
        return plain_total

    def total(tree: Any) -> jax.Array:
        is_first = jax.lax.axis_index(axis) == 0
        local = jax.tree.map(
            lambda x, d: jnp.where(is_first, x, jnp.zeros_like(x)) if d == WHOLE else x, tree, dims
        )
        return jax.lax.psum(plain_total(local), axis)

    return total


FLOATS = Arithmetic(
    over_microbatches=lambda f, plan: (f, reducer(plan)),
    finish=lambda apply: apply,
    total=_total,
    live=lambda update: None,
    sum_rows=lambda reduction, tree, axis, rows, keys: reduction.reduce(
        jax.tree.map(lambda x: x.sum(0), tree), axis
    ),
    rounded=lambda f, update: f,
    in_backward=True,
    elementwise="",
)
