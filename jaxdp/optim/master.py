"""Bfloat16 parameters that learn: the optimizer updates a float32 master copy, of which its state
has the lower halves.

An update of less than half of a parameter's last digit would be rounded away. A parameter is the
upper half of the master copy's bits, rounded to the nearest; the rest is exact, so the master copy
takes two bytes a parameter."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.precision import cast_floats

Tree = Any
HALF = 16  # bits


class Master(NamedTuple):
    """The state of an optimizer that updates a master copy. inner: its own. low: the lower halves,
    int16, like the parameters; None: the parameters are not bfloat16, and are their own master
    copy."""

    inner: Tree
    low: Tree


def with_master(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with a float32 master copy of bfloat16 parameters, and with its own
    state in float32.
    """
    inner = optax.with_extra_args_support(tx)

    def init(params):
        is_narrow = any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))
        low = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int16), params) if is_narrow else None
        return Master(inner.init(params if low is None else join(params, low)), low)

    def update(grads, state, params=None, **extra):
        if state.low is None:
            updates, new = inner.update(grads, state.inner, params, **extra)
            return updates, Master(new, None)
        copy = join(params, state.low)
        updates, new = inner.update(cast_floats(grads, jnp.float32), state.inner, copy, **extra)
        high, low = split(optax.apply_updates(copy, updates))
        # the difference of two bfloat16 is added in float32 and rounded to the new one
        moves = jax.tree.map(
            lambda x, y: x.astype(jnp.float32) - y.astype(jnp.float32), high, params
        )
        return moves, Master(new, low)

    return optax.GradientTransformationExtraArgs(init, update)


def master_copy(params: Tree, opt_state: Any) -> Tree:
    """Return the values that the optimizer updates: the parameters, or their master copy."""
    narrow = isinstance(opt_state, Master) and opt_state.low is not None
    return join(params, opt_state.low) if narrow else params


def moving_share(params: Tree, size: float) -> jax.Array:
    """Return the share [] of bfloat16 elements that an update of this size changes; rounding loses
    it in the others.
    """
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(params)]

    def bits(x):
        return jax.lax.bitcast_convert_type(split(x)[0], jnp.int16)

    moves = [
        jnp.sum((bits(x + size) != bits(x)) | (bits(x - size) != bits(x)), dtype=jnp.float32)
        for x in leaves
    ]
    return sum(moves) / sum(x.size for x in leaves)


def join(high: Tree, low: Tree) -> Tree:
    """Return the float32 values of two halves."""

    def one(high: jax.Array, low: jax.Array) -> jax.Array:
        upper = jax.lax.bitcast_convert_type(high, jnp.int16).astype(jnp.int32) << HALF
        return jax.lax.bitcast_convert_type(upper + low.astype(jnp.int32), jnp.float32)

    return jax.tree.map(one, high, low)


def split(copy: Tree) -> tuple[Tree, Tree]:
    """Return float32 values rounded to bfloat16, and the rest of their bits, positive or negative,
    as int16.
    """
    bits = jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.int32), copy)
    upper = jax.tree.map(lambda x: (x + (1 << HALF - 1) >> HALF).astype(jnp.int16), bits)
    high = jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.bfloat16), upper)
    return high, jax.tree.map(lambda x: x.astype(jnp.int16), bits)
