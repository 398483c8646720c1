"""A reduction sums trees over the devices and gathers slices; its kinds differ only in the number
of operands.

    reduce(tree, axes)          sum every leaf over the axes, replicated on every device
    scatter(tree, dims, axes)   sum leaves that have a dim, each to this device's slice along it; skip the others
    gather(tree, dims, axis)    gather slices along their dims to full leaves; skip the others

`with_padding` pads leaves before they are scattered, so every reduction gets dims that the number
of devices divides.

`dims` is a tree of the same structure, with WHOLE for a leaf that is not split; see `jaxdp.split`.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.axes import Axes
from jaxdp.split import WHOLE, fit, from_slices, padded_shape, take, to_slices

Tree = Any


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

    def scatter_one(x: jax.Array, dim: int, axes: Axes) -> jax.Array:
        if dim == WHOLE:
            return x
        if safe:
            return take(
                jax.lax.psum(x, axes.all),
                dim,
                jax.lax.axis_index(axes.shard),
                jax.lax.axis_size(axes.shard),
            )
        part = jax.lax.psum_scatter(x, axes.shard, scatter_dimension=dim, tiled=True)
        return part if axes.replica is None else jax.lax.psum(part, axes.replica)

    def gather_one(x: jax.Array, dim: int, axis: str) -> jax.Array:
        return x if dim == WHOLE else jax.lax.all_gather(x, axis, axis=dim, tiled=True)

    return Reduction(
        jax.lax.psum,
        lambda tree, dims, axes: jax.tree.map(lambda x, d: scatter_one(x, d, axes), tree, dims),
        lambda tree, dims, axis: jax.tree.map(lambda x, d: gather_one(x, d, axis), tree, dims),
        overlaps=True,
    )


def bucket(bucket_mb: float = 25.0, safe: bool = False) -> Reduction:
    """Return a reduction that packs leaves into buckets of at most `bucket_mb` (10^6 bytes) and one
    dtype, last first.

    Backward passes finish the last layers' gradients first, so the first buckets can be sent early
    (PyTorch DDP, Li et al. 2020, section 3.2.1). A leaf larger than a bucket gets its own.
    """
    return in_buckets(int(bucket_mb * 1e6), jax.lax.psum, functools.partial(exchange, safe=safe))


def exchange(rows: jax.Array, axes: Axes, safe: bool) -> jax.Array:
    """Reduce-scatter rows [part, n]: return the sum [n] over devices of this device's row; safe: by
    an all-reduce.
    """
    if safe:
        index = jax.lax.axis_index(axes.shard)
        return jax.lax.dynamic_index_in_dim(jax.lax.psum(rows, axes.all), index, keepdims=False)
    row = jax.lax.psum_scatter(rows, axes.shard, scatter_dimension=0)
    return row if axes.replica is None else jax.lax.psum(row, axes.replica)


def in_buckets(
    limit: int,
    add_up: Callable[[jax.Array, Any], jax.Array],
    exchange: Callable[[jax.Array, Axes], jax.Array],
) -> Reduction:
    """Return a reduction in buckets by add_up(flat [n], axes) -> sum [n], exchange(rows [part, n],
    axes) -> row [n].
    """

    def reduce(tree: Tree, axes: Any) -> Tree:
        leaves, treedef = jax.tree.flatten(tree)
        summed: list[Any] = [None] * len(leaves)
        for indices in pack(_sizes(leaves), limit):
            flat = add_up(jnp.concatenate([jnp.ravel(leaves[i]) for i in indices]), axes)
            for i, piece in zip(indices, _cut(flat, [leaves[i].size for i in indices])):
                summed[i] = piece.reshape(leaves[i].shape)
        return jax.tree.unflatten(treedef, summed)

    def scatter(tree: Tree, dims: Tree, axes: Axes) -> Tree:
        parts = jax.lax.axis_size(axes.shard)

        def pieces(chosen: list[tuple[jax.Array, int]]) -> list[jax.Array]:
            cut = [to_slices(x, d, parts) for x, d in chosen]
            row = exchange(jnp.concatenate([x.reshape(parts, -1) for x in cut], axis=1), axes)
            sizes = [x.size // parts for x in cut]
            return [piece.reshape(x.shape[1:]) for piece, x in zip(_cut(row, sizes), cut)]

        return _packed(tree, dims, limit, pieces)

    def gather(tree: Tree, dims: Tree, axis: str) -> Tree:
        def pieces(chosen: list[tuple[jax.Array, int]]) -> list[jax.Array]:
            rows = jax.lax.all_gather(jnp.concatenate([jnp.ravel(x) for x, _ in chosen]), axis)
            columns = _cut(rows, [x.size for x, _ in chosen])
            return [from_slices(y.reshape(-1, *x.shape), d) for (x, d), y in zip(chosen, columns)]

        return _packed(tree, dims, limit, pieces)

    return Reduction(reduce, scatter, gather)


def _packed(
    tree: Tree, dims: Tree, limit: int, pieces: Callable[[list[tuple[Any, int]]], list[Any]]
) -> Tree:
    """Apply `pieces` to the split leaves, bucket by bucket; return the others unchanged."""
    leaves, treedef = jax.tree.flatten(tree)
    leaf_dims = jax.tree.leaves(jax.tree.map(lambda _, d: d, tree, dims))
    split = [i for i, d in enumerate(leaf_dims) if d != WHOLE]
    for indices in pack(_sizes([leaves[i] for i in split]), limit):
        chosen = [split[i] for i in indices]
        for i, new in zip(chosen, pieces([(leaves[i], leaf_dims[i]) for i in chosen])):
            leaves[i] = new
    return jax.tree.unflatten(treedef, leaves)


def _sizes(leaves: list[Any]) -> list[tuple[Any, int]]:
    return [(x.dtype, x.size * x.dtype.itemsize) for x in leaves]


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


def with_padding(reduction: Reduction) -> Reduction:
    """Pad leaves before they are scattered, each along its dim to a multiple of the number of
    devices.
    """

    def scatter(tree: Tree, dims: Tree, axes: Axes) -> Tree:
        parts = jax.lax.axis_size(axes.shard)

        def pad(x, d):
            return fit(x, padded_shape(x.shape, d, parts))

        return reduction.scatter(jax.tree.map(pad, tree, dims), dims, axes)

    return reduction._replace(scatter=scatter)


def not_alone(reduction: Reduction) -> Reduction:
    """Skip the reduction on one device, where XLA would copy its operands and not fuse across it."""

    def alone(axes):
        return jax.lax.axis_size(axes) == 1

    return reduction._replace(
        reduce=lambda tree, axes: tree if alone(axes) else reduction.reduce(tree, axes),
        scatter=lambda tree, dims, axes: (
            tree if alone(axes.all) else reduction.scatter(tree, dims, axes)
        ),
        gather=lambda tree, dims, axis: tree if alone(axis) else reduction.gather(tree, dims, axis),
    )
