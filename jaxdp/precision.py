"""A precision policy names the dtype of parameters, of the computation and of reductions, and casts between them."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxdp.logits import Logits

LEAST = 1.0  # a dynamic loss scale does not fall below it


def cast_floats(tree: Any, dtype: Any) -> Any:
    """The tree with its floating leaves as `dtype`; integers, booleans and keys as they are."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


class Policy(NamedTuple):
    """params: parameters and optimizer state; compute: forward and backward pass; reduce: gradients on the wire."""

    params: Any = jnp.float32
    compute: Any = jnp.float32
    reduce: Any = jnp.float32

    @property
    def state(self) -> Any:
        """Of running averages, losses and sums: never below float32."""
        return max(jnp.dtype(self.params), jnp.dtype(jnp.float32), key=lambda d: d.itemsize)

    def inputs(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return cast_floats(batch, self.compute)

    def outputs(self, outputs: Any) -> Any:
        """What a loss gets; logits that it computes itself it makes of that kind."""
        lazy = lambda x: isinstance(x, Logits)
        return jax.tree.map(lambda x: x if lazy(x) else cast_floats(x, self.state), outputs, is_leaf=lazy)


def policy(params: str, compute: str, reduce: str) -> Policy:
    """The policy of three dtype names."""
    return Policy(jnp.dtype(params), jnp.dtype(compute), jnp.dtype(reduce))


class LossScale(struct.PyTreeNode):
    """value []: what the loss is multiplied by; good []: updates without overflow since it last changed."""

    value: jax.Array
    good: jax.Array


class LossScaling(NamedTuple):
    """The loss, multiplied so that gradients do not vanish in float16 (Micikevicius et al., arXiv 1710.03740).

    It is the mean loss that is scaled: losses add up over `weight` examples or tokens an update, a constant, so that
    what overflows does not depend on the size of a batch. An update whose gradients overflow is skipped. Where
    `dynamic`, the scale is then halved, not below 1, and doubled after `interval` updates without overflow.
    """

    initial: float = 2.0**15
    dynamic: bool = True
    interval: int = 2000
    weight: float = 1.0

    def init(self) -> LossScale:
        return LossScale(jnp.asarray(self.initial, jnp.float32), jnp.zeros((), jnp.int32))

    def factor(self, value: jax.Array) -> jax.Array:
        """What a sum of losses is multiplied by: a power of two of the scale's value, so that nothing is rounded."""
        return value * 2.0 ** -round(math.log2(self.weight))

    def adjust(self, scale: LossScale, finite: jax.Array) -> LossScale:
        if not self.dynamic:
            return scale
        good = jnp.where(finite, scale.good + 1, 0)
        grown = good >= self.interval
        value = jnp.where(grown, scale.value * 2, jnp.where(finite, scale.value, scale.value / 2))
        return LossScale(jnp.clip(value, LEAST, 2.0**126), jnp.where(grown, 0, good))

    def can_fall(self, scale: LossScale) -> jax.Array:
        """Whether an overflow may be the scale's, which then falls; of a scale that stays it should not be."""
        return (scale.value > LEAST) & self.dynamic
