"""The norm of gradients and the number of their non-finite elements, computed together."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.cpu import on_cpu
from jaxdp.precision import at_least_float32

SMALL = 4096  # elements: smaller leaves are concatenated on CPU
Tree = Any


def plain_total(tree: Tree) -> jax.Array:
    """Return [2]: the sum of squares and the number of non-finite elements, in at least float32.

    On CPU, small leaves are concatenated, since starting an operation costs more than running it,
    and elements are counted only if the sum of squares is not finite.
    """
    if not on_cpu():
        return _squares_and_nonfinite(tree)
    leaves = [at_least_float32(x).reshape(-1) for x in jax.tree.leaves(tree)]
    small = [x for x in leaves if x.size <= SMALL]
    vectors = [x for x in leaves if x.size > SMALL] + ([jnp.concatenate(small)] if small else [])
    squares = sum((jnp.dot(x, x) for x in vectors), jnp.zeros((), jnp.float32))

    def no_count(_):
        return jnp.stack([squares, jnp.zeros_like(squares)])

    return jax.lax.cond(jnp.isfinite(squares), no_count, _squares_and_nonfinite, leaves)


def _squares_and_nonfinite(tree: Tree) -> jax.Array:
    leaves = [*map(at_least_float32, jax.tree.leaves(tree))]
    zero = jnp.zeros((), jnp.float32)
    squares = sum((jnp.sum(jnp.square(x)) for x in leaves), zero)
    return jnp.stack([squares, sum((jnp.sum(~jnp.isfinite(x)) for x in leaves), zero)])


def clip(grads: Tree, norm: jax.Array, max_norm: float) -> Tree:
    """Scale the gradients so that their norm is at most `max_norm`."""
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
