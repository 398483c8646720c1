"""Normalization over the last dim, with a derivative computed from the result, like
`attention.shares`.

The variance is the mean squared deviation from the mean. Flax's default, the mean square less the
squared mean, loses all digits in float32 if the mean is a thousand times the standard deviation.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdp.losses import wide


class Normalization:
    """The call of a norm over the last dim of x[..., dim], in at least float32."""

    centers: bool

    def __call__(self: Any, x: jax.Array) -> jax.Array:
        y = standardize(x.astype(wide(x.dtype)), self.epsilon, self.centers) * self.scale[...]
        return (y if self.bias is None else y + self.bias[...]).astype(x.dtype)


class LayerNorm(Normalization, nnx.LayerNorm):  # type: ignore[misc]  # its call takes less
    """Flax's LayerNorm (Ba et al., arXiv 1607.06450)."""

    centers = True


class RMSNorm(Normalization, nnx.RMSNorm):  # type: ignore[misc]
    """Flax's RMSNorm (Zhang and Sennrich, arXiv 1910.07467)."""

    centers, bias = False, None


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def standardize(x: jax.Array, epsilon: float, center: bool) -> jax.Array:
    """Return x[..., dim] / sqrt(mean square + epsilon); `center` subtracts the mean first."""
    return _parts(x, epsilon, center)[0]


@standardize.defjvp
def _(epsilon, center, primals, tangents):
    (x,), (change,) = primals, tangents
    y, inverse = _parts(x, epsilon, center)
    tangent = change - y * _mean(y * change)
    return y, inverse * (tangent - _mean(change) if center else tangent)


def _parts(x: jax.Array, epsilon: float, center: bool) -> tuple[jax.Array, jax.Array]:
    if center:
        x = x - _mean(x)
    inverse = jax.lax.rsqrt(_mean(jnp.square(x)) + epsilon)
    return x * inverse, inverse


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, -1, keepdims=True)
