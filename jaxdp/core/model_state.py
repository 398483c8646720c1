"""The model state (BatchNorm's averages, counters) as sums over microbatches: floats by weight, integers by change."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any


class Change(NamedTuple):
    """The change of an integer, over all microbatches that have examples: their number, the sum, the sum of squares.

    The microbatches agree if and only if number x squares = sum^2 (equality in the Cauchy-Schwarz inequality).
    """

    number: jax.Array
    sum: jax.Array
    squares: jax.Array


def weighted_state(old: Tree, new: Tree, weight: jax.Array, real: jax.Array) -> Tree:
    """Return the model state of one microbatch in a form that can be summed; real []: the microbatch has examples."""

    def weigh(old: jax.Array, new: jax.Array) -> jax.Array | Change:
        if jnp.issubdtype(old.dtype, jnp.floating):
            return new.astype(weight.dtype) * weight
        change = jnp.where(real, new.astype(jnp.int32) - old.astype(jnp.int32), 0)
        return Change(real.astype(jnp.int32), change, change * change)

    return jax.tree.map(weigh, old, new)


def mean_state(old: Tree, sums: Tree, weight: jax.Array) -> tuple[Tree, jax.Array | None]:
    """Return (the model state after the update, the number of integers on which microbatches disagree or None)."""
    disagreeing = []

    def mean(old: jax.Array, new: jax.Array | Change) -> jax.Array:
        if not isinstance(new, Change):
            return jnp.where(weight > 0, new / jnp.where(weight > 0, weight, 1), old).astype(old.dtype)
        disagreeing.append(jnp.sum(new.number * new.squares != new.sum * new.sum))
        change = new.sum // jnp.maximum(new.number, 1)
        return (old.astype(jnp.int32) + change).astype(old.dtype)

    new = jax.tree.map(mean, old, sums)
    return new, (sum(disagreeing, jnp.zeros((), jnp.int32)) if disagreeing else None)
