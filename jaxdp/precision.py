"""Mixed precision: the dtypes of parameters, computation and reductions, casts between them, and
loss scaling.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxdp.losses import is_lazy, wide

MIN_SCALE = 1.0  # of a dynamic loss scale


def is_key(x: Any) -> bool:
    """Return whether x, or what its shape and dtype describe, is an array of typed PRNG keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def kind(dtype: Any) -> str:
    """Return the kind of a dtype; dtypes of one kind can be cast into each other."""
    kinds = {"float": jnp.floating, "integer": jnp.integer, "bool": jnp.bool_}
    if isinstance(dtype, str):  # the name of a dtype that NumPy does not have
        return dtype
    return next((name for name, group in kinds.items() if jnp.issubdtype(dtype, group)), str(dtype))


def cast_floats(tree: Any, dtype: Any) -> Any:
    """Cast the floating-point leaves of a tree to `dtype`, and complex ones to the complex type
    that contains it, at least complex64; integers, booleans and keys are unchanged."""

    def cast(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return x.astype(jnp.promote_types(dtype, jnp.complex64))
        return x.astype(dtype) if is_float(x) else x

    return jax.tree.map(cast, tree)


def is_float(x: Any) -> bool:
    """Return whether an array, or a shape, is of real floats."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def is_narrow(dtype: Any) -> bool:
    """Return whether a dtype is a float of less than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


def at_least_float32(x: jax.Array) -> jax.Array:
    """Return float32 for narrower floats; other arrays are unchanged."""
    return x.astype(jnp.float32) if is_narrow(x.dtype) else x


class Policy(NamedTuple):
    """Dtypes of params: the parameters; compute: the passes; reduce: the gradient all-reduce."""

    params: Any = jnp.float32
    compute: Any = jnp.float32
    reduce: Any = jnp.float32

    @property
    def state(self) -> Any:
        """The dtype of running averages, losses and sums: at least float32."""
        return wide(self.params)

    def inputs(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return cast_floats(batch, self.compute)

    def outputs(self, outputs: Any) -> Any:
        """Cast the model's outputs for the loss, those that are arrays; lazy `Logits` are cast when
        the loss computes them."""

        def cast(x: Any) -> Any:
            return x if is_lazy(x) or not hasattr(x, "dtype") else cast_floats(x, self.state)

        return jax.tree.map(cast, outputs, is_leaf=is_lazy)


def policy(params: str, compute: str, reduce: str) -> Policy:
    """Build a policy from three dtype names."""
    return Policy(jnp.dtype(params), jnp.dtype(compute), jnp.dtype(reduce))


class LossScale(struct.PyTreeNode):
    """value []: the factor of the loss; good []: the number of updates without overflow since it
    last changed.
    """

    value: jax.Array
    good: jax.Array


class LossScaling(NamedTuple):
    """Loss scaling, so that gradients do not underflow in float16 (Micikevicius et al., arXiv
    1710.03740).

    The scale applies to the mean loss: sums are divided by `weight`, the constant number of
    examples or tokens per update, so that overflow does not depend on the batch size. An update
    whose gradients overflow is skipped. If `dynamic`, the scale is then halved, at least 1, and
    doubled after `interval` updates without overflow."""

    initial: float = 2.0**15
    dynamic: bool = True
    interval: int = 2000
    weight: float = 1.0

    def init(self) -> LossScale:
        return LossScale(jnp.asarray(self.initial, jnp.float32), jnp.zeros((), jnp.int32))

    def factor(self, value: jax.Array) -> jax.Array:
        """Return the factor of a sum of losses: the scale's value times a power of two, so that
        nothing is rounded.
        """
        return value * 2.0 ** -round(math.log2(self.weight))

    def adjust(self, scale: LossScale, finite: jax.Array) -> LossScale:
        if not self.dynamic:
            return scale
        good = jnp.where(finite, scale.good + 1, 0)
        grown = good >= self.interval
        value = jnp.where(grown, scale.value * 2, jnp.where(finite, scale.value, scale.value / 2))
        return LossScale(jnp.clip(value, MIN_SCALE, 2.0**126), jnp.where(grown, 0, good))
