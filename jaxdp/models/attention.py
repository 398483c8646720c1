"""Attention, by tables of implementations: each token looks at itself and those before it, or at all of them.

segments[example, token]: integers, one for each of the documents that an example is packed of; a token looks at those
of its own segment only.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdp.errors import UsageError

PIECES, SHORTEST = 4, 128  # of the queries of `causal`: at most so many, each of at least so many tokens
Rotation = tuple[jax.Array, jax.Array]  # cosines and sines [token, 1, half the width of a head]


class Attention(nnx.Module):
    """Every token looks at those that `attend` lets it; x[example, token, dim]."""

    def __init__(
        self,
        dim: int,
        width: int,
        heads: int,
        kv_heads: int,
        linear: Callable,
        key: Callable,
        back: Callable,
        attend: Callable,
        *,
        rngs: nnx.Rngs,
    ):
        self.query = linear(dim, heads * width, rngs=rngs)
        self.key = key(dim, kv_heads * width, rngs=rngs)
        self.value = linear(dim, kv_heads * width, rngs=rngs)
        self.back = back(heads * width, dim, rngs=rngs)
        self.width, self.attend = width, attend

    def __call__(self, x: jax.Array, turn: Rotation | None = None, segments: jax.Array | None = None) -> jax.Array:
        query, key, value = (
            y.reshape(*x.shape[:2], y.shape[2] // self.width, self.width)
            for y in (self.query(x), self.key(x), self.value(x))
        )
        if turn is not None:
            query, key = rotate(query, turn), rotate(key, turn)
        found = self.attend(query, key, value, segments)
        return self.back(found.reshape(*x.shape[:2], found.shape[2] * self.width))


def rotation(tokens: int, width: int, base: float, dtype: Any) -> Rotation:
    """The angle of token t in pair i is t / base^(2i / width)."""
    angles = np.outer(np.arange(tokens), base ** (-np.arange(0, width, 2) / width))[:, None]
    return jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)


def rotate(x: jax.Array, turn: Rotation) -> jax.Array:
    """x[example, token, head, width] with dims i and i + width / 2 turned as a pair, as GPT-NeoX does."""
    cosine, sine = turn
    first, second = jnp.split(x.astype(cosine.dtype), 2, -1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1).astype(x.dtype)


def full(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    """As `softmax`, over all tokens of the same segment."""
    return softmax(query, key, value, None if segments is None else same(segments)[:, None])


def causal(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    """As `softmax`, over each token and those before it of the same segment.

    On CPU in pieces of the queries, so that most of what none of them sees is not computed.
    """
    tokens = query.shape[1]
    pieces = max(1, min(PIECES, tokens // SHORTEST)) if jax.default_backend() == "cpu" else 1
    before = np.tri(tokens, dtype=bool)
    found = []
    for rows in np.array_split(np.arange(tokens), pieces):
        first, end = int(rows[0]), int(rows[-1]) + 1
        seen = jnp.asarray(before[first:end, :end])
        if segments is not None:
            seen = seen & (segments[:, first:end, None] == segments[:, None, :end])[:, None, None]
        found.append(softmax(query[:, first:end], key[:, :end], value[:, :end], seen))
    return found[0] if pieces == 1 else jnp.concatenate(found, 1)


def fused(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    """As `causal`, by cuDNN's kernel that never has all scores in memory (Dao et al., arXiv 2205.14135)."""
    if query.dtype != jnp.bfloat16 or jax.default_backend() != "gpu":
        raise UsageError(
            f"model.args.attention: 'cudnn' takes bfloat16 on an NVIDIA GPU, not {query.dtype} on "
            f"{jax.default_backend()}; use xla, or precision.compute: bfloat16"
        )
    mask = None if segments is None else same(segments)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, implementation="cudnn")


def either(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    """`fused` for bfloat16 on an NVIDIA GPU where JAX says that its kernel takes such arrays, else `causal`."""
    if query.dtype == jnp.bfloat16 and jax.default_backend() == "gpu":
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            return fused(query, key, value, segments)
    return causal(query, key, value, segments)


def softmax(query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array | None) -> jax.Array:
    """softmax(query key' / sqrt(width)) value over the tokens that are seen, softmax in float32 at least.

    query[example, token, head, width]; key and value of a divisor of the heads; seen: booleans [(example, 1, 1,) token,
    token of the keys], or None for all -> like query. jax.nn's own (dot_product_attention) does its softmax in float32
    in float64 too. Each head's matrices lie together, as the products want them.
    """
    example, tokens, heads, width = query.shape
    groups, looks = (example, key.shape[2], heads // key.shape[2]), key.shape[1]
    rows = groups[2] * tokens
    query = query.swapaxes(1, 2).reshape(*groups[:2], rows, width)
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    scores = jnp.einsum("ektw,eksw->ekts", query, key).reshape(*groups, tokens, looks)
    scores = scores.astype(wide(query.dtype)) / math.sqrt(width)
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    weights = shares(scores).astype(value.dtype).reshape(*groups[:2], rows, looks)
    found = jnp.einsum("ekts,eksw->ektw", weights, value)
    return found.reshape(example, heads, tokens, width).swapaxes(1, 2)


@jax.custom_jvp
def shares(scores: jax.Array) -> jax.Array:
    """The softmax over the last dim, of which the derivative is made of the result: JAX's own differentiates the
    quotient, which takes 2 more passes over the scores."""
    return jax.nn.softmax(scores)


@shares.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    found, (change,) = shares(*primals), tangents
    return found, found * (change - jnp.sum(found * change, -1, keepdims=True))


def same(segments: jax.Array) -> jax.Array:
    """[example, 1, token, token]: whether two tokens are of one segment."""
    return segments[:, None, :, None] == segments[:, None, None, :]


def wide(dtype: Any) -> Any:
    """float32, or `dtype` where that is wider."""
    return jnp.promote_types(dtype, jnp.float32)


ATTENTION: dict[str, Callable] = {"auto": either, "xla": causal, "cudnn": fused}
