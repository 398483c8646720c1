"""The sharding rule: split a leaf along its largest dim that the number of parts divides, or replicate it.

Nothing is flattened, so every optimizer that works on arrays of any shape works on slices, and masks by path keep their
meaning. The dims of a tree are a tree of the same structure, with an integer for every leaf: the dim, or `WHOLE`.
"""

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

Tree = Any
WHOLE = -1


def path_string(path: Any) -> str:
    """Format a key path as a/b/c."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def split_dim(shape: tuple[int, ...], parts: int, stacked: bool = False) -> int:
    """Return the largest dim that `parts` divides, the first of equals; never the first dim of stacked blocks."""
    if parts == 1:
        return WHOLE
    candidates = range(int(stacked), len(shape))
    dims = [d for d in candidates if shape[d] and shape[d] % parts == 0]
    return max(dims, key=lambda d: shape[d]) if dims else WHOLE


def split_dims(tree: Tree, parts: int, blocks: Iterable[str] = ()) -> Tree:
    """Return the dims of a tree of arrays (or shapes). blocks: paths (a/b) below which leaves are stacked [block, ...].

    Such a path may occur anywhere in a leaf's path, since optimizer state contains trees like the parameters.
    """
    stacks = [f"/{path}/" for path in blocks]

    def dim(path: Any, x: Any) -> int:
        name = f"/{path_string(path)}/"
        return split_dim(x.shape, parts, any(stack in name for stack in stacks))

    return jax.tree_util.tree_map_with_path(dim, tree)


def take(x: jax.Array, dim: int, index: Any, parts: int) -> jax.Array:
    """Return slice number `index` of `parts`, or x itself if it is not split."""
    if dim == WHOLE:
        return x
    size = x.shape[dim] // parts
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, dim)


def spec(dim: int, axis: Any) -> P:
    """Return the PartitionSpec of a leaf that is split along `dim` over a mesh axis."""
    return P() if dim == WHOLE else P(*[None] * dim, axis)
