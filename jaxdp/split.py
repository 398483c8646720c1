"""The sharding rule: split a leaf along its largest dim that the number of parts divides; else pad
a dim, or replicate.

Nothing is flattened, so every optimizer that works on arrays of any shape works on slices, and
masks by path keep their meaning. The dims of a tree are a tree of the same structure, with an
integer for every leaf: the dim, or `WHOLE`. A padded leaf has zeros at the end of its dim.

And the names of the mesh axes that models, reductions and strategies share.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

DATA = "data"  # one entry per device: every replica's share of the batch
# The devices in groups: state is split inside a group and replicated over groups.
REPLICA, SHARD = "replica", "shard"


class Axes(NamedTuple):
    """shard: the axis over which state is split; replica: the axis over which it is replicated, or
    None.
    """

    shard: str = DATA
    replica: str | None = None

    @property
    def all(self) -> str | tuple[str, ...]:
        return self.shard if self.replica is None else (self.replica, self.shard)


FLAT = Axes()


def data_axes() -> str | tuple[str, ...] | None:
    """Return the axes of the devices that share a batch, inside a strategy's program; None outside."""
    for axes in (DATA, (REPLICA, SHARD)):
        try:
            jax.lax.axis_size(axes)
        except NameError:
            continue
        return axes
    return None


Tree = Any
WHOLE = -1
SMALL = 1024  # elements: smaller leaves are not padded


def path_string(path: Any) -> str:
    """Format a key path as a/b/c."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_by_path(tree: Tree) -> dict[str, Any]:
    """Return {a/b/c: leaf}."""
    return {path_string(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def is_below(name: str, heads: Iterable[str]) -> bool:
    """Return whether a path (a/b/c) is one of these, or below one."""
    return f"{name}/".startswith(tuple(f"{head}/" for head in heads))


def is_stacked(path: Any, blocks: Iterable[str]) -> bool:
    """Return whether a leaf is below one of these paths (a/b), anywhere in its own: optimizer state
    contains trees like the parameters."""
    return any(f"/{block}/" in f"/{path_string(path)}/" for block in blocks)


def split_dim(shape: tuple[int, ...], parts: int, stacked: bool = False, pad: bool = False) -> int:
    """Return the largest dim that `parts` divides, the first of equals; never the first dim of
    stacked blocks.

    pad: if there is none, return the dim that needs the least padding, unless the leaf is `SMALL`
    or more than doubles."""
    candidates = [d for d in range(int(stacked), len(shape)) if shape[d]] if parts > 1 else []
    dims = [d for d in candidates if shape[d] % parts == 0]
    if dims:
        return max(dims, key=lambda d: shape[d])
    growth = {d: padded_shape(shape, d, parts)[d] / shape[d] for d in candidates}
    best = min(growth, key=growth.__getitem__, default=WHOLE)
    return best if pad and math.prod(shape) >= SMALL and growth.get(best, math.inf) <= 2 else WHOLE


def split_dims(tree: Tree, parts: int, blocks: Iterable[str] = (), pad: bool = False) -> Tree:
    """Return the dims of a tree of arrays (or shapes). blocks: paths (a/b) below which leaves are
    stacked [block, ...]. pad: see `split_dim`."""

    def dim(path, x):
        return split_dim(x.shape, parts, is_stacked(path, blocks), pad)

    return jax.tree_util.tree_map_with_path(dim, tree)


def take(x: jax.Array, dim: int, index: Any, parts: int) -> jax.Array:
    """Return slice number `index` of `parts`, of the padded leaf; or x itself if it is not split."""
    if dim == WHOLE:
        return x
    x = fit(x, padded_shape(x.shape, dim, parts))
    size = x.shape[dim] // parts
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, dim)


def to_slices(x: jax.Array, dim: int, parts: int) -> jax.Array:
    """Return all slices [part, ...slice] of a leaf whose dim `parts` divides."""
    x = x.reshape(*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
    return jnp.moveaxis(x, dim, 0)


def from_slices(x: jax.Array, dim: int) -> jax.Array:
    """Invert `to_slices`."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def padded_shape(shape: tuple[int, ...], dim: int, parts: int) -> tuple[int, ...]:
    """Return the shape with its dim rounded up to a multiple of `parts`."""
    return tuple(-(-size // parts) * parts if d == dim else size for d, size in enumerate(shape))


def fit(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return x with each dim cut, or padded with zeros, at its end."""
    if x.shape == tuple(shape):
        return x
    return jax.lax.pad(
        x, jnp.zeros((), x.dtype), [(0, new - old, 0) for old, new in zip(x.shape, shape)]
    )


def spec(dim: int, axis: Any) -> P:
    """Return the PartitionSpec of a leaf that is split along `dim` over a mesh axis."""
    return P() if dim == WHOLE else P(*[None] * dim, axis)
