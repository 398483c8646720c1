"""A reduction adds one tree up over a mesh axis; the kinds differ only in how many operands they put on the wire."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Reduction(NamedTuple):
    """reduce(tree, axis_name) -> the tree summed over the axis, whole on every device."""

    reduce: Callable[[Any, str], Any]


def xla(bucket_mb: float = 25.0) -> Reduction:
    """One psum over the leaves as they are; XLA's combiner may fuse them."""
    return Reduction(lambda tree, axis: jax.lax.psum(tree, axis))


def bucket(bucket_mb: float = 25.0) -> Reduction:
    """Leaves packed into one operand per bucket of at most `bucket_mb` (10^6 bytes) and dtype, last leaves first.

    Backward passes finish the last layers' gradients first, so the first buckets can leave early (PyTorch DDP, Li et
    al. 2020, section 3.2.1). A leaf larger than a bucket has one to itself.
    """

    def reduce(tree: Any, axis: str) -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        summed: list[Any] = [None] * len(leaves)
        for indices in pack([(x.dtype, x.size * x.dtype.itemsize) for x in leaves], int(bucket_mb * 1e6)):
            flat = jax.lax.psum(jnp.concatenate([jnp.ravel(leaves[i]) for i in indices]), axis)
            start = 0
            for i in indices:
                summed[i] = flat[start : start + leaves[i].size].reshape(leaves[i].shape)
                start += leaves[i].size
        return jax.tree.unflatten(treedef, summed)

    return Reduction(reduce)


def pack(leaves: list[tuple[Any, int]], limit: int) -> list[list[int]]:
    """Buckets of leaf indices, from (dtype, bytes) of each: one dtype and at most `limit` bytes, last leaf first."""
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


REDUCTIONS: dict[str, Callable[[float], Reduction]] = {"xla": xla, "bucket": bucket}


def make_reduction(name: str, bucket_mb: float = 25.0) -> Reduction:
    """The named reduction; 'auto' is bucket where CPU processes talk over Gloo (XLA's combined all-reduce of many
    operands is slow there), else xla."""
    if name == "auto":
        name = "bucket" if jax.process_count() > 1 and jax.default_backend() == "cpu" else "xla"
    return REDUCTIONS[name](bucket_mb)
