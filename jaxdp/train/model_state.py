"""The model state (BatchNorm's averages, counters) as sums over microbatches: floats by weight,
integers by change.

Complex numbers are floats with a leading dim for the real and imaginary part. An array that no
microbatch changes, such as a table of constants, is not averaged, since that would round it in each
update. The change of an integer is summed byte by byte, so that no sum overflows, whatever the
width of the integer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any


class Average(NamedTuple):
    """Floats: the sum of values times the weight, and the number [] of microbatches that changed
    any of them.
    """

    sum: jax.Array
    changes: jax.Array


class Change(NamedTuple):
    """The bytes [..., byte] of an integer's change, over all microbatches that have examples: the
    number of these microbatches, the sum, the sum of squares.

    The microbatches agree if and only if number x squares = sum^2 (equality in the Cauchy-Schwarz
    inequality)."""

    number: jax.Array
    sum: jax.Array
    squares: jax.Array


def weighted_state(old: Tree, new: Tree, weight: jax.Array, real: jax.Array) -> Tree:
    """Return the model state of one microbatch in a form that can be summed; real []: the
    microbatch has examples.
    """

    def weigh(old: jax.Array, new: jax.Array) -> Average | Change:
        if jnp.issubdtype(old.dtype, jnp.inexact):
            # 0 times infinity is NaN
            value = jnp.where(weight != 0, _parts(new).astype(weight.dtype), 0)
            changed = (weight != 0) & jnp.any(new != old)
            return Average(value * weight, changed.astype(weight.dtype))
        change = jax.lax.bitcast_convert_type(_wide(new) - _wide(old), jnp.uint8).astype(jnp.int32)
        change = jnp.where(real, change, 0)
        return Change(real.astype(jnp.int32), change, change * change)

    return jax.tree.map(weigh, old, new)


def mean_state(old: Tree, sums: Tree, weight: jax.Array) -> tuple[Tree, jax.Array | None]:
    """Return (the model state after the update, the number of integers on which microbatches
    disagree or None).
    """
    disagreeing = []

    def mean(old: jax.Array, new: Average | Change) -> jax.Array:
        if isinstance(new, Average):
            average = new.sum / jnp.where(weight > 0, weight, 1)
            average = jax.lax.complex(*average) if jnp.iscomplexobj(old) else average
            return jnp.where((weight > 0) & (new.changes > 0), average.astype(old.dtype), old)
        differ = new.number * new.squares != new.sum * new.sum
        disagreeing.append(jnp.sum(jnp.any(differ, axis=-1)))
        change = (new.sum // jnp.maximum(new.number, 1)).astype(jnp.uint8)
        change = jax.lax.bitcast_convert_type(change, _wide(old).dtype)
        return (_wide(old) + change).astype(old.dtype)

    new = jax.tree.map(mean, old, sums)
    return new, (sum(disagreeing, jnp.zeros((), jnp.int32)) if disagreeing else None)


def floats(tree: Tree) -> Tree:
    """Return the tree with None for integers, such as counters."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree)


def _parts(x: jax.Array) -> jax.Array:
    """Return [real, imaginary part] of complex numbers; floats are unchanged."""
    return jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x


def _wide(x: jax.Array) -> jax.Array:
    """Return integers, or booleans, of at least 32 bits."""
    return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
