"""A small convolutional network with BatchNorm, for images of a few dozen pixels."""

import itertools
from collections.abc import Sequence

import jax
from flax import nnx

from jaxdp.errors import check_sizes
from jaxdp.models.layers import ConvBN, make_dropout, require_image


class CNN(nnx.Module):
    """A CNN: 3x3 ConvBN blocks (all but the first halve the image), mean over pixels, dropout, a
    linear classifier.

    x[example, height, width, channel] -> logits [example, class]. input_shape and num_classes come
    from the data."""

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        widths: Sequence[int] = (16, 32, 64),
        dropout: float = 0.0,
        sync: bool = False,
        *,
        rngs: nnx.Rngs,
    ):
        require_image(input_shape)
        check_sizes("model.args", widths=min(widths, default=1))
        channels = [input_shape[-1], *widths]
        pairs = enumerate(itertools.pairwise(channels))
        self.blocks = nnx.List(
            [ConvBN(a, b, 3, 1 if i == 0 else 2, sync=sync, rngs=rngs) for i, (a, b) in pairs]
        )
        self.dropout = make_dropout(dropout, rngs)
        self.head = nnx.Linear(channels[-1], num_classes, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.dropout(x.mean((1, 2))))
