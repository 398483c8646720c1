"""A decoder-only transformer with scanned blocks; its arguments cover GPT-2 and Llama."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdp.cpu import product
from jaxdp.errors import UsageError, check_one_of, check_sizes
from jaxdp.losses import Logits, wide
from jaxdp.models.attention import ATTENTION, Attention, Rotation, rotation
from jaxdp.models.layers import (
    make_dropout,
    require,
    require_divisible,
    require_text,
    require_tokens,
)
from jaxdp.models.nnx import Blocks
from jaxdp.models.normalization import LayerNorm, RMSNorm

DEVIATION = 0.02  # of initial weights, except the projections into the residual stream
WEIGHTS = nnx.initializers.normal(DEVIATION)
EPSILON = 1e-5  # of a norm
linear = functools.partial(nnx.Linear, kernel_init=WEIGHTS, dot_general=product)


class GPT(nnx.Module):
    """A causal language model: tokens[example, token] integers -> `Logits` [example, token,
    vocabulary].

    If the data has segments[example, token], integers that number the documents packed into an
    example, tokens attend only within their segment.

    The defaults are the smallest GPT-2 (Radford et al. 2019, "Language Models are Unsupervised
    Multitask Learners"): pre-norm blocks, weights normal(0.02), divided by sqrt(2 layers) in the
    projections into the residual stream. Llama (Touvron et al., arXiv 2302.13971) is norm: rms,
    mlp: swiglu, positions: rotary, tied: false, bias: false.

    input_shape: (length,), the context, and num_classes, the vocabulary, default to those of the
    data. vocabulary_multiple: pads the rows of the embedding (and of an untied head) to a multiple
    of it, as 50304 = 393 x 128 for GPT-2's 50257 tokens, since products of such sizes are faster;
    padding rows have no logits. kv_heads: heads of keys and values; fewer than heads is
    grouped-query attention (Ainslie et al., arXiv 2305.13245). hidden: width of the MLP; by default
    4 dim, for swiglu 8/3 dim rounded up to a multiple of 256. positions: learned, or rotary (Su et
    al., arXiv 2104.09864), which has no longest context. tied: compute logits with the embedding
    matrix. dropout: rate for the embedding and for the output of each block's branches. attention:
    cudnn is fused, for bfloat16 on an NVIDIA GPU; xla works anywhere; auto uses cudnn where it
    works. scan: compile one block and scan it over stacked parameters; false compiles every block
    separately: slower to compile, sometimes faster to run, and ZeRO-3 gathers all blocks at once.
    epsilon: of the norms.

    Raises UsageError for arguments that do not fit each other.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        layers: int = 12,
        heads: int = 12,
        dim: int = 768,
        kv_heads: int | None = None,
        hidden: int | None = None,
        norm: str = "layer",
        mlp: str = "gelu",
        positions: str = "learned",
        rotary_base: float = 10_000.0,
        tied: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
        attention: str = "auto",
        scan: bool = True,
        vocabulary_multiple: int = 128,
        epsilon: float = EPSILON,
        *,
        rngs: nnx.Rngs,
    ):
        check_one_of("model.args.norm", norm, NORMS)
        check_one_of("model.args.mlp", mlp, ("gelu", "swiglu"))
        check_one_of("model.args.positions", positions, ("learned", "rotary"))
        check_one_of("model.args.attention", attention, ATTENTION)
        kv_heads = heads if kv_heads is None else kv_heads
        hidden = default_hidden(mlp, dim) if hidden is None else hidden
        check_sizes(
            "model.args",
            num_classes=num_classes,
            layers=layers,
            heads=heads,
            dim=dim,
            kv_heads=kv_heads,
            hidden=hidden,
            vocabulary_multiple=vocabulary_multiple,
        )
        problem = f"is negative; make it at least 0, such as {EPSILON}"
        require(epsilon >= 0, "epsilon", epsilon, problem)
        require_text(input_shape)
        require(
            input_shape[0] >= 1, "input_shape", input_shape, "is too short; it must be at least 1"
        )
        require_divisible("dim", dim, "heads", heads)
        require_divisible("heads", heads, "kv_heads", kv_heads)
        width, rotary = dim // heads, positions == "rotary"
        problem = f"of {width} dims cannot rotate by pairs; change it"
        require(not rotary or width % 2 == 0, "heads", heads, problem)

        options = {"use_bias": bias} if norm == "layer" else {}
        make_norm = functools.partial(NORMS[norm], dim, epsilon=epsilon, **options)

        def block(rngs: nnx.Rngs) -> Block:
            return Block(
                dim,
                heads,
                kv_heads,
                hidden,
                layers,
                ATTENTION[attention],
                make_norm,
                swiglu=mlp == "swiglu",
                rotary=rotary,
                bias=bias,
                dropout=dropout,
                rngs=rngs,
            )

        rows = -(-num_classes // vocabulary_multiple) * vocabulary_multiple
        self.embed = nnx.Embed(rows, dim, embedding_init=WEIGHTS, rngs=rngs)
        self.positions = (
            None if rotary else nnx.Param(WEIGHTS(rngs(), (*input_shape, dim), jnp.float32))
        )
        self.dropout = make_dropout(dropout, rngs)
        make_blocks = Blocks if scan else Chain
        self.blocks = make_blocks(block, layers, rngs=rngs)
        self.norm = make_norm(rngs=rngs)
        self.head = None if tied else linear(dim, rows, use_bias=False, rngs=rngs)
        self.width, self.base, self.classes = width, rotary_base, num_classes

    def __call__(self, tokens: jax.Array, segments: jax.Array | None = None) -> Logits:
        if segments is not None and segments.shape != tokens.shape:
            raise UsageError(
                f"model: segments{list(segments.shape)} do not fit tokens{list(tokens.shape)}"
            )
        require_tokens("GPT", tokens)
        x = look_up(self.embed.embedding[...], tokens, self.classes)
        turn = None
        if self.positions is None:
            turn = rotation(tokens.shape[1], self.width, self.base, wide(x.dtype))
        elif tokens.shape[1] > len(self.positions):
            raise UsageError(
                f"model: {tokens.shape[1]} tokens, but learned positions for {len(self.positions)}"
            )
        else:
            x = x + self.positions[: tokens.shape[1]]
        x = self.norm(self.blocks(self.dropout(x), turn, segments))
        kernel = self.embed.embedding[...] if self.head is None else self.head.kernel[...].T
        return Logits(x, kernel.astype(x.dtype), self.classes)


class Block(nnx.Module):
    """A pre-norm block on x[example, token, dim]: y = x + attention(norm1(x)), then y +
    mlp(norm2(y)).

    layers: the number of blocks, for the initial projections into the residual stream. attend: the
    implementation of attention. make_norm: returns a norm of `dim`. rotary: attention rotates.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        layers: int,
        attend: Callable,
        make_norm: Callable[..., nnx.Module],
        *,
        swiglu: bool = False,
        rotary: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        into_stream = nnx.initializers.normal(DEVIATION / math.sqrt(2 * layers))
        biased = functools.partial(linear, use_bias=bias)
        back = functools.partial(biased, kernel_init=into_stream)
        # Without rotation, a key bias shifts all scores of a query equally, which softmax cancels:
        # its gradient would be rounding noise, which Adam scales up to full steps.
        key = functools.partial(linear, use_bias=bias and rotary)
        self.norm1 = make_norm(rngs=rngs)
        self.attention = Attention(dim, heads, kv_heads, biased, key, back, attend, rngs=rngs)
        self.norm2 = make_norm(rngs=rngs)
        self.mlp = MLP(dim, hidden, biased, back, swiglu, rngs)
        self.dropout = make_dropout(dropout, rngs)

    def __call__(
        self, x: jax.Array, turn: Rotation | None = None, segments: jax.Array | None = None
    ) -> jax.Array:
        x = x + self.dropout(self.attention(self.norm1(x), turn, segments))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Chain(nnx.Module):
    """A chain of modules like `Blocks`, but with separate, unstacked variables."""

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], count: int, *, rngs: nnx.Rngs):
        self.modules = nnx.List([make(rngs) for _ in range(count)])

    def __call__(self, x: jax.Array, *args: Any) -> jax.Array:
        for module in self.modules:
            x = module(x, *args)
        return x


class MLP(nnx.Module):
    """back(gelu(up(x))), or SwiGLU (Shazeer, arXiv 2002.05202): back(silu(gate(x)) up(x))."""

    def __init__(
        self, dim: int, hidden: int, linear: Callable, back: Callable, swiglu: bool, rngs: nnx.Rngs
    ):
        self.gate = linear(dim, hidden, rngs=rngs) if swiglu else None
        self.up, self.back = linear(dim, hidden, rngs=rngs), back(hidden, dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gate is None:
            return self.back(nnx.gelu(self.up(x)))
        return self.back(nnx.silu(self.gate(x)) * self.up(x))


def default_hidden(mlp: str, dim: int) -> int:
    """Return the width of an MLP between its products."""
    return -(-8 * dim // 768) * 256 if mlp == "swiglu" else 4 * dim


def look_up(embedding: jax.Array, tokens: jax.Array, classes: int) -> jax.Array:
    """Look up tokens [...] in embedding[row, dim] -> [..., dim]; accumulate the gradient in at
    least float32.

    A token that is not in [0, classes) becomes NaN.
    In bfloat16 the gradient of a token seen 2,500 times was 18 % off: a sum stops growing at 256
    times its terms."""
    tokens = tokens.astype(jnp.int32)
    tokens = jnp.where((tokens >= 0) & (tokens < classes), tokens, len(embedding))
    rows = jnp.take(embedding.astype(wide(embedding.dtype)), tokens, axis=0)
    return rows.astype(embedding.dtype)


NORMS: dict[str, Callable] = {"layer": LayerNorm, "rms": RMSNorm}
