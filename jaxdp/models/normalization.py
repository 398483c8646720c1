"""Normalization over the last dim, with a derivative that is made of the result, as `attention.shares` has it.

The variance is the mean of the squares of what differs from the mean: of their difference (Flax's default) nothing is
left in float32 where the mean is a thousand times the deviation.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdp.models.attention import wide


class LayerNorm(nnx.LayerNorm):
    """Flax's (Ba et al., arXiv 1607.06450) over the last dim of x[..., dim]; computed in float32 at least."""

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        return _scaled(standardize(x.astype(wide(x.dtype)), self.epsilon, True), self.scale, self.bias, x)


class RMSNorm(nnx.RMSNorm):
    """Flax's (Zhang and Sennrich, arXiv 1910.07467), as `LayerNorm`."""

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        return _scaled(standardize(x.astype(wide(x.dtype)), self.epsilon, False), self.scale, None, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def standardize(x: jax.Array, epsilon: float, center: bool) -> jax.Array:
    """x[..., dim] / sqrt(mean square + epsilon), for `center` less its mean first."""
    return _parts(x, epsilon, center)[0]


@standardize.defjvp
def _(epsilon: float, center: bool, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple:
    (x,), (change,) = primals, tangents
    found, inverse = _parts(x, epsilon, center)
    moved = change - found * _apart(jnp.broadcast_to(_mean(found * change), x.shape))
    return found, inverse * (moved - _mean(change) if center else moved)


def _parts(x: jax.Array, epsilon: float, center: bool) -> tuple[jax.Array, jax.Array]:
    if center:
        x = x - _mean(x)
    inverse = jax.lax.rsqrt(_mean(jnp.square(x)) + epsilon)
    return x * inverse, inverse


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, -1, keepdims=True)


def _apart(x: jax.Array) -> jax.Array:
    """x; on CPU the transpose, a sum of products, is not fused into one operation, which is ten times as slow there."""
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "cpu" else x


def _scaled(y: jax.Array, scale: nnx.Param | None, bias: nnx.Param | None, x: jax.Array) -> jax.Array:
    if scale is not None:
        y = y * scale[...]
    if bias is not None:
        y = y + bias[...]
    return y.astype(x.dtype)
