"""Causal and full attention, with a table of implementations.

segments[example, token]: the number of the packed document of a token; tokens attend only within
their segment."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdp.cpu import backend
from jaxdp.errors import UsageError
from jaxdp.losses import wide_einsum
from jaxdp.models.layers import require

Rotation = tuple[jax.Array, jax.Array]  # cosines and sines [token, 1, half the width of a head]


class Attention(nnx.Module):
    """Multi-head attention on x[example, token, dim] by the implementation `attend`."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        linear: Callable,
        key: Callable,
        back: Callable,
        attend: Callable,
        *,
        rngs: nnx.Rngs,
    ):
        width = dim // heads
        self.query = linear(dim, dim, rngs=rngs)
        self.key = key(dim, kv_heads * width, rngs=rngs)
        self.value = linear(dim, kv_heads * width, rngs=rngs)
        self.back = back(dim, dim, rngs=rngs)
        self.width, self.attend = width, attend

    def __call__(
        self, x: jax.Array, turn: Rotation | None = None, segments: jax.Array | None = None
    ) -> jax.Array:
        query, key, value = (
            y.reshape(*x.shape[:2], y.shape[2] // self.width, self.width)
            for y in (self.query(x), self.key(x), self.value(x))
        )
        if turn is not None:
            query, key = rotate(query, turn), rotate(key, turn)
        mask = None if segments is None else same(segments)
        outputs = self.attend(query, key, value, mask)
        return self.back(outputs.reshape(x.shape))


def rotation(tokens: int, width: int, base: float, dtype: Any) -> Rotation:
    """Return the cosines and sines of rotary embedding: the angle of token t in pair i is t /
    base^(2i / width).
    """
    require(base > 0, "rotary_base", base, "must be greater than 0, such as 10000")
    angles = np.outer(np.arange(tokens), base ** (-np.arange(0, width, 2) / width))[:, None]
    return jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)


def rotate(x: jax.Array, turn: Rotation) -> jax.Array:
    """Rotate dims i and i + width / 2 of x[example, token, head, width] as a pair, as GPT-NeoX
    does.
    """
    cosine, sine = turn
    first, second = jnp.split(x.astype(cosine.dtype), 2, -1)
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], -1
    ).astype(x.dtype)


# The implementations below take query, key and value like `softmax`, and the mask of `same`; None:
# all tokens share a segment.


def full(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Compute `softmax` attention over all tokens of the same segment."""
    return softmax(query, key, value, None if mask is None else mask[:, None])


def causal(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Compute `softmax` attention over each token and the tokens before it in the same segment."""
    before = jnp.asarray(np.tri(query.shape[1], dtype=bool))
    return softmax(query, key, value, before if mask is None else before & mask[:, None])


def fused(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Compute `causal` attention by cuDNN's fused kernel, which never stores all scores (Dao et
    al., arXiv 2205.14135). Raises UsageError unless the query is bfloat16 on an NVIDIA GPU."""
    if query.dtype != jnp.bfloat16 or backend() != "gpu":
        raise UsageError(
            f"model.args.attention: 'cudnn' needs bfloat16 on an NVIDIA GPU, not {query.dtype} on "
            f"{backend()}; use xla, or precision.compute: bfloat16"
        )
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=True, implementation="cudnn"
    )


def either(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Compute `fused` attention for bfloat16 on an NVIDIA GPU if its kernel supports the arrays,
    else `causal`.
    """
    if query.dtype == jnp.bfloat16 and backend() == "gpu":
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            return fused(query, key, value, mask)
    return causal(query, key, value, mask)


def softmax(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """Return softmax(query key' / sqrt(width)) value over the unmasked tokens, with the softmax in
    at least float32.

    query[example, token, head, width]; key and value: their number of heads divides that of the
    query; mask: booleans [(example, 1, 1,) token, token of the keys], True to attend, or None for
    all -> shape of query. Unlike `jax.nn.dot_product_attention`, float64 inputs get a float64
    softmax. Heads are moved before tokens, so that each head's matrices are contiguous for the
    products."""
    example, tokens, heads, width = query.shape
    groups, keys = (example, key.shape[2], heads // key.shape[2]), key.shape[1]
    rows = groups[2] * tokens
    query = query.swapaxes(1, 2).reshape(*groups[:2], rows, width)
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    scores = wide_einsum("ektw,eksw->ekts", query, key).reshape(*groups, tokens, keys) / math.sqrt(
        width
    )
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    weights = shares(scores).astype(value.dtype).reshape(*groups[:2], rows, keys)
    outputs = jnp.einsum("ekts,eksw->ektw", weights, value)
    return outputs.reshape(example, heads, tokens, width).swapaxes(1, 2)


@jax.custom_jvp
def shares(scores: jax.Array) -> jax.Array:
    """Return the softmax over the last dim, with a derivative computed from the result: JAX's own
    derivative of the quotient takes 2 more passes over the scores."""
    return jax.nn.softmax(scores)


@shares.defjvp
def _(primals, tangents):
    weights, (change,) = shares(*primals), tangents
    return weights, weights * (change - jnp.sum(weights * change, -1, keepdims=True))


def same(segments: jax.Array) -> jax.Array:
    """Return [example, 1, token, token] bool: True where two tokens share a segment."""
    return segments[:, None, :, None] == segments[:, None, None, :]


ATTENTION: dict[str, Callable] = {"auto": either, "xla": causal, "cudnn": fused}
