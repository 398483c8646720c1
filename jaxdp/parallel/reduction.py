"""A reduction sums trees over the devices and gathers slices; its kinds differ only in the number
of operands.

    reduce(tree, axes)          sum every leaf over the axes, replicated on every device
    scatter(tree, dims, axes)   sum leaves that have a dim, each to this device's slice along it; skip the others
    gather(tree, dims, axis)    gather slices along their dims to full leaves; skip the others

`on_any_devices` pads leaves before they are scattered, so every reduction gets dims that the number
of devices divides.

`dims` is a tree of the same structure, with WHOLE for a leaf that is not split; see `jaxdp.split`.

A `Plan` says how the devices of a program store parameters, when gradients are summed over the
devices by a reduction, and so what a pass over microbatches returns:

    EVERY   Stages 2 and 3, any model. The backward pass of each pass over microbatches sums the
            gradients of sharded parameters, to slices (`reading`); the others are summed afterwards.
    LAST    Stages 0 and 1, or a replicated gradient buffer, of a model with scanned blocks. The
            backward pass of the last pass sums all gradients, with those of earlier passes: those
            of a block where it is differentiated.
    NEVER   Otherwise: other models and buckets where all gradients are summed once; one device. The
            backward pass returns this device's full gradients; all are summed after it
            (`FloatSums.over_devices`).
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.split import WHOLE, Axes, fit, from_slices, padded_shape, take, to_slices

Tree = Any
NEVER, LAST, EVERY = "never", "last", "every"
Bucket = list[tuple[jax.Array, int]]  # leaves with their dims


class Reduction(NamedTuple):
    reduce: Callable[[Tree, Any], Tree]
    scatter: Callable[[Tree, Tree, Axes], Tree]
    gather: Callable[[Tree, Tree, str], Tree]
    arithmetic: Any = None  # `jaxdp.parallel.sums.FloatSums`, or a subclass; None: floats
    group: int = 1  # microbatches that stay together on a device
    overlaps: bool = False  # the gradients of a block are sent while others are computed


def xla(bucket_mb: float = 25.0, safe: bool = False) -> Reduction:
    """Return a reduction with one operation per leaf, which XLA's combiner may fuse. safe: without
    a reduce-scatter.
    """

    def scatter(tree: Tree, dims: Tree, axes: Axes) -> Tree:
        def one(x: jax.Array, dim: int) -> jax.Array:
            return x if dim == WHOLE else sum_to_slice(x, dim, axes, safe)

        return jax.tree.map(one, tree, dims)

    def gather(tree: Tree, dims: Tree, axis: str) -> Tree:
        def one(x: jax.Array, dim: int) -> jax.Array:
            return x if dim == WHOLE else jax.lax.all_gather(x, axis, axis=dim, tiled=True)

        return jax.tree.map(one, tree, dims)

    return Reduction(jax.lax.psum, scatter, gather, overlaps=True)


def sum_to_slice(x: jax.Array, dim: int, axes: Axes, safe: bool) -> jax.Array:
    """Return this device's slice along a dim of the sum over all devices; safe: by an all-reduce."""
    if safe:
        index, parts = jax.lax.axis_index(axes.shard), jax.lax.axis_size(axes.shard)
        return take(jax.lax.psum(x, axes.all), dim, index, parts)
    part = jax.lax.psum_scatter(x, axes.shard, scatter_dimension=dim, tiled=True)
    return part if axes.replica is None else jax.lax.psum(part, axes.replica)


def bucket(bucket_mb: float = 25.0, safe: bool = False) -> Reduction:
    """Return a reduction that packs leaves into buckets of at most `bucket_mb` (10^6 bytes) and one
    dtype, last first.

    Backward passes finish the last layers' gradients first, so the first buckets can be sent early
    (PyTorch DDP, Li et al. 2020, section 3.2.1). A leaf larger than a bucket gets its own.
    """

    def row_of(rows: jax.Array, axes: Axes) -> jax.Array:
        return sum_to_slice(rows, 0, axes, safe)[0]

    return in_buckets(int(bucket_mb * 1e6), jax.lax.psum, row_of)


def in_buckets(
    limit: int,
    add_up: Callable[[jax.Array, Any], jax.Array],
    row_of: Callable[[jax.Array, Axes], jax.Array],
) -> Reduction:
    """Return a reduction in buckets by add_up(flat [n], axes) -> sum [n], row_of(rows [part, n],
    axes) -> this device's row [n] of the sum.
    """

    def reduce(tree: Tree, axes: Any) -> Tree:
        def send(bucket: Bucket) -> list[jax.Array]:
            flat = add_up(jnp.concatenate([jnp.ravel(x) for x, _ in bucket]), axes)
            pieces = _cut(flat, [x.size for x, _ in bucket])
            return [piece.reshape(x.shape) for piece, (x, _) in zip(pieces, bucket)]

        return _by_bucket(send, tree, jax.tree.map(lambda _: 0, tree), limit)

    def scatter(tree: Tree, dims: Tree, axes: Axes) -> Tree:
        parts = jax.lax.axis_size(axes.shard)

        def send(bucket: Bucket) -> list[jax.Array]:
            cut = [to_slices(x, dim, parts) for x, dim in bucket]
            row = row_of(jnp.concatenate([x.reshape(parts, -1) for x in cut], axis=1), axes)
            pieces = _cut(row, [x.size // parts for x in cut])
            return [piece.reshape(x.shape[1:]) for piece, x in zip(pieces, cut)]

        return _by_bucket(send, tree, dims, limit)

    def gather(tree: Tree, dims: Tree, axis: str) -> Tree:
        def send(bucket: Bucket) -> list[jax.Array]:
            rows = jax.lax.all_gather(jnp.concatenate([jnp.ravel(x) for x, _ in bucket]), axis)
            columns = _cut(rows, [x.size for x, _ in bucket])
            return [from_slices(y.reshape(-1, *x.shape), d) for y, (x, d) in zip(columns, bucket)]

        return _by_bucket(send, tree, dims, limit)

    return Reduction(reduce, scatter, gather)


def _by_bucket(
    send: Callable[[Bucket], list[jax.Array]], tree: Tree, dims: Tree, limit: int
) -> Tree:
    """Send the leaves that have a dim, bucket by bucket; return the others unchanged."""
    leaves, treedef = jax.tree.flatten(tree)
    pairs = list(zip(leaves, jax.tree.leaves(dims), strict=True))
    split = [i for i, (_, dim) in enumerate(pairs) if dim != WHOLE]
    for indices in pack([(leaves[i].dtype, leaves[i].nbytes) for i in split], limit):
        numbers = [split[i] for i in indices]
        for i, new in zip(numbers, send([pairs[i] for i in numbers])):
            leaves[i] = new
    return jax.tree.unflatten(treedef, leaves)


def _cut(flat: jax.Array, sizes: list[int]) -> list[jax.Array]:
    """Cut the last dim of an array into pieces of these sizes."""
    starts = itertools.accumulate(sizes, initial=0)
    return [flat[..., start : start + size] for start, size in zip(starts, sizes)]


def pack(leaves: list[tuple[Any, int]], limit: int) -> list[list[int]]:
    """Assign leaves (dtype, bytes) to buckets of indices: one dtype and at most `limit` bytes each,
    last leaf first.
    """
    full: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for i in reversed(range(len(leaves))):
        dtype, size = leaves[i]
        indices, used = filling.get(dtype, ([], 0))
        if indices and used + size > limit:
            full.append(indices)
            indices, used = [], 0
        filling[dtype] = ([*indices, i], used + size)
    return full + [indices for indices, _ in filling.values()]


def on_any_devices(reduction: Reduction) -> Reduction:
    """Pad leaves before they are scattered, each along its dim to a multiple of the number of
    devices; and do nothing on one device, where XLA would copy the operands and not fuse across.
    """

    def is_alone(axes: Any) -> bool:
        return jax.lax.axis_size(axes) == 1

    def reduce(tree: Tree, axes: Any) -> Tree:
        return tree if is_alone(axes) else reduction.reduce(tree, axes)

    def scatter(tree: Tree, dims: Tree, axes: Axes) -> Tree:
        def pad(x: jax.Array, dim: int) -> jax.Array:
            return fit(x, padded_shape(x.shape, dim, jax.lax.axis_size(axes.shard)))

        if is_alone(axes.all):
            return tree
        return reduction.scatter(jax.tree.map(pad, tree, dims), dims, axes)

    def gather(tree: Tree, dims: Tree, axis: str) -> Tree:
        return tree if is_alone(axis) else reduction.gather(tree, dims, axis)

    return reduction._replace(reduce=reduce, scatter=scatter, gather=gather)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a program's devices store parameters and sum gradients. The program defines the axes.

    Args:
        assignment: int32 [device, local], the numbers of the microbatches of each device, -1 for
            none.
        param_dims: of the parameters, the dim along which each is sharded where it is, or WHOLE.
        shapes: of the full parameters, without padding.
        trainable: see `Step`.
        params_sharded: parameters are stored as slices along `param_dims`.
        update_in_slices: the update wants slices of gradients along `param_dims`.
        when: gradients are summed over the devices inside the backward pass of EVERY pass over
            microbatches, those that are sharded; inside the LAST pass; or NEVER.
        later: a block's gradients are summed while those of the block below are computed.
        in_blocks: a tree of booleans like the parameters: those that are read one block at a time.
        dtype: of gradients while they are sent; None: their own.
        is_update: False for an evaluation, which has no gradients.
    """

    reduction: Reduction
    axes: Axes
    assignment: np.ndarray
    param_dims: Tree
    shapes: Tree
    trainable: Callable[[Tree], Tree]
    params_sharded: bool = False
    update_in_slices: bool = False
    when: str = NEVER
    later: bool = False
    in_blocks: Tree = None
    dtype: Any = None
    is_update: bool = False

    def numbers(self) -> jax.Array:
        """Return the numbers [local] of this device's microbatches; call it inside the program."""
        return jnp.asarray(self.assignment)[jax.lax.axis_index(self.axes.all)]

    def summed(self, last: bool) -> Tree:
        """Return a tree of booleans like the parameters: those whose gradients the backward pass of
        a pass over microbatches sums over the devices."""

        def in_this_pass(dim: int) -> bool:
            return dim != WHOLE if self.when == EVERY else self.when == LAST and last

        return jax.tree.map(in_this_pass, self.param_dims)

    def send(self, grads: list[jax.Array], dims: list[int]) -> list[jax.Array]:
        """Sum full gradients over the devices: to slices along dims, or to full ones (WHOLE)."""
        return self.send_with(grads, dims, None)[0]

    def send_with(
        self, grads: list[jax.Array], dims: list[int], rest: Tree
    ) -> tuple[list[jax.Array], Tree]:
        """Do what `send` does, and sum the rest in one operand with the full gradients, which a
        packed all-reduce needs."""
        sent = [x if self.dtype is None else x.astype(self.dtype) for x in grads]
        whole = [i for i, dim in enumerate(dims) if dim == WHOLE]
        if len(whole) < len(sent):
            sent = self.reduction.scatter(sent, dims, self.axes)
        if whole or rest is not None:
            operands = ([sent[i] for i in whole], rest)
            full, rest = self.reduction.reduce(operands, self.axes.all)
            for i, x in zip(whole, full):
                sent[i] = x
        return [total.astype(x.dtype) for total, x in zip(sent, grads, strict=True)], rest


def order_of(assignment: np.ndarray) -> np.ndarray:
    """Return the position of each microbatch in [device x local]."""
    flat = assignment.reshape(-1)
    order = np.argsort(np.where(flat < 0, flat.size, flat), kind="stable")
    return order[: flat.max() + 1]
