"""The norm of gradients and the number of their elements that are not finite, measured together."""

from typing import Any

import jax
import jax.numpy as jnp

SMALL = 4096  # elements of a leaf
Tree = Any


def plain_total(tree: Tree) -> jax.Array:
    """Return [2]: the sum of squares, and the number of elements that are not finite; at least in float32.

    On CPU small leaves are measured together, since an operation costs more to start than to run, and elements are
    counted only where the sum is not finite.
    """
    if jax.default_backend() != "cpu":
        return _squares_and_nonfinite(tree)
    leaves = [x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(-1) for x in jax.tree.leaves(tree)]
    small = [x for x in leaves if x.size <= SMALL]
    vectors = [x for x in leaves if x.size > SMALL] + ([jnp.concatenate(small)] if small else [])
    squares = sum((jnp.dot(x, x) for x in vectors), jnp.zeros((), jnp.float32))
    no_count = lambda _: jnp.stack([squares, jnp.zeros_like(squares)])
    return jax.lax.cond(jnp.isfinite(squares), no_count, _squares_and_nonfinite, leaves)


def _squares_and_nonfinite(tree: Tree) -> jax.Array:
    leaves = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in jax.tree.leaves(tree)]
    zero = jnp.zeros((), jnp.float32)
    squares = sum((jnp.sum(jnp.square(x)) for x in leaves), zero)
    return jnp.stack([squares, sum((jnp.sum(~jnp.isfinite(x)) for x in leaves), zero).astype(squares.dtype)])


def clip(grads: Tree, norm: jax.Array, most: float) -> Tree:
    """Scale the gradients so that their norm is at most `most`."""
    scale = jnp.minimum(1.0, most / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
