"""A vision transformer: GPT's blocks with full attention over the patches of an image."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdp.errors import check_sizes
from jaxdp.models.attention import full
from jaxdp.models.gpt import EPSILON, WEIGHTS, Block
from jaxdp.models.layers import make_dropout, require, require_divisible, require_image
from jaxdp.models.nnx import Blocks
from jaxdp.models.normalization import LayerNorm


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
        hidden = 4 * dim if hidden is None else hidden
        check_sizes("model.args", patch=patch, layers=layers, heads=heads, dim=dim, hidden=hidden)
        height, width, channels = input_shape
        divides = height % patch == width % patch == 0
        require(divides, "patch", patch, f"does not divide images of {height}x{width}; change it")
        require_divisible("dim", dim, "heads", heads)

        def make_norm(rngs: nnx.Rngs) -> nnx.Module:
            # A norm draws nothing. With streams of its own, it does not count in those that the
            # weights are drawn from, so that the same seed draws the same weights as in version 0.1.
            return LayerNorm(dim, epsilon=EPSILON, rngs=nnx.Rngs(0))

        def block(rngs: nnx.Rngs) -> Block:
            return Block(
                dim, heads, heads, hidden, layers, full, make_norm, dropout=dropout, rngs=rngs
            )

        patches = (height // patch) * (width // patch)
        self.embed = nnx.Linear(patch * patch * channels, dim, rngs=rngs)
        self.positions = nnx.Param(WEIGHTS(rngs(), (patches, dim), jnp.float32))
        self.dropout = make_dropout(dropout, rngs)
        self.blocks = Blocks(block, layers, rngs=rngs)
        self.norm = LayerNorm(dim, epsilon=EPSILON, rngs=rngs)
        self.head = nnx.Linear(dim, num_classes, kernel_init=WEIGHTS, rngs=rngs)
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
