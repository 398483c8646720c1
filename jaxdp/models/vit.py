"""A vision transformer: GPT's blocks with full attention over the patches of an image."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdp.cpu import product
from jaxdp.errors import check_sizes
from jaxdp.models.attention import Attention, full
from jaxdp.models.gpt import DEVIATION, EPSILON, GELU, NORMS, Block
from jaxdp.models.layers import make_dropout, require, require_image
from jaxdp.models.nnx import Blocks


class ViT(nnx.Module):
    """A vision transformer: x[example, height, width, channel] -> logits [example, class].

    Dosovitskiy et al., "An Image is Worth 16x16 Words" (arXiv 2010.11929): linear patch embedding,
    learned positions, pre-norm blocks; the classifier reads the mean over the patches instead of a
    class token, as in Beyer et al. (arXiv 2205.01580). input_shape and num_classes come from the
    data. The defaults are DeiT's tiny model (Touvron et al., arXiv 2012.12877) with patches for
    small images. patch: side in pixels. hidden: width of the MLP, 4 dim by default. dropout: rate
    for the embedding and for the output of each block's branches. Raises UsageError for arguments
    that do not fit each other."""

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        patch: int = 4,
        layers: int = 12,
        heads: int = 3,
        dim: int = 192,
        hidden: int | None = None,
        dropout: float = 0.0,
        *,
        rngs: nnx.Rngs,
    ):
        require_image(input_shape)
        hidden = GELU.hidden(dim) if hidden is None else hidden
        check_sizes("model.args", patch=patch, layers=layers, heads=heads, dim=dim, hidden=hidden)
        height, width, channels = input_shape
        divides = height % patch == width % patch == 0
        require(divides, "patch", patch, f"does not divide images of {height}x{width}; change it")
        require(dim % heads == 0, "dim", dim, f"does not divide by heads: {heads}; change either")

        normal = nnx.initializers.normal
        linear = functools.partial(nnx.Linear, kernel_init=normal(DEVIATION), dot_general=product)
        back = functools.partial(linear, kernel_init=normal(DEVIATION / math.sqrt(2 * layers)))
        key = functools.partial(linear, use_bias=False)  # softmax cancels a key bias, as in GPT

        def block(rngs: nnx.Rngs) -> Block:
            attention = Attention(
                dim, dim // heads, heads, heads, linear, key, back, full, rngs=rngs
            )
            mlp = GELU(dim, hidden, linear, back, rngs=rngs)
            norms = [NORMS["layer"](dim, True, EPSILON, rngs) for _ in range(2)]
            return Block(norms[0], attention, norms[1], mlp, make_dropout(dropout, rngs))

        patches = (height // patch) * (width // patch)
        self.embed = nnx.Linear(patch * patch * channels, dim, rngs=rngs)
        self.positions = nnx.Param(normal(DEVIATION)(rngs(), (patches, dim), jnp.float32))
        self.dropout = make_dropout(dropout, rngs)
        self.blocks = Blocks(block, layers, rngs=rngs)
        self.norm = NORMS["layer"](dim, True, EPSILON, rngs)
        self.head = nnx.Linear(dim, num_classes, kernel_init=normal(DEVIATION), rngs=rngs)
        self.patch = patch

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.dropout(self.embed(patches(x, self.patch)) + self.positions[...])
        return self.head(self.norm(self.blocks(x)).mean(1))


def patches(x: jax.Array, side: int) -> jax.Array:
    """Split x[example, height, width, channel] into patches [example, patch, side x side x
    channel], row by row.
    """
    example, height, width, channels = x.shape
    x = x.reshape(example, height // side, side, width // side, side, channels).swapaxes(2, 3)
    return x.reshape(example, (height // side) * (width // side), side * side * channels)
