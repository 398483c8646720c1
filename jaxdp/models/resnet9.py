"""ResNet-9 for 32x32 images, in two variants: the Needle course project's and the DAWNBench
entries'.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdp.errors import check_one_of, check_sizes
from jaxdp.models.layers import ConvBN, Residual, make_dropout, require_image


class ResNet9(nnx.Module):
    """A ResNet-9: x[example, height, width, channel] -> logits [example, class].

    variant 'needle': ConvBN 16 (7x7, stride 4), 32 (stride 2), residual 32 x2, 64 (stride 2), 128
    (stride 2), residual 128 x2, linear 128, linear: strides make it cheap (CMU 10-414 homework 4).
    'dawnbench': ConvBN w, 2w with pooling and a residual, 4w with pooling, 8w with pooling and a
    residual, global max pooling, linear, logits / 8 (David Page, "How to train your ResNet", 2018).
    width: of the first block, 16 or 64 by default. dropout: before the first linear."""

    def __init__(
        self,
        input_shape: Sequence[int] = (32, 32, 3),
        num_classes: int = 10,
        variant: str = "needle",
        width: int | None = None,
        dropout: float = 0.0,
        sync: bool = False,
        *,
        rngs: nnx.Rngs,
    ):
        require_image(input_shape)
        check_one_of("model.args.variant", variant, VARIANTS)
        check_sizes("model.args", width=width)

        def block(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> ConvBN:
            return ConvBN(inputs, outputs, kernel, stride, sync=sync, rngs=rngs)

        body, head, self.scale = VARIANTS[variant](block, input_shape, num_classes, width, rngs)
        self.body, self.head = nnx.List(body), nnx.List(head)
        self.dropout = make_dropout(dropout, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        for layer in self.body:
            x = layer(x, mask) if isinstance(layer, ConvBN | Residual) else layer(x)
        x = self.dropout(x.reshape(x.shape[0], math.prod(x.shape[1:])))
        for layer in self.head[:-1]:
            x = nnx.relu(layer(x))
        return self.head[-1](x) * self.scale


def _needle(block: Callable, shape: Sequence[int], classes: int, w: int | None, rngs: nnx.Rngs):
    w = w or 16
    body = [
        block(shape[-1], w, 7, 4),
        block(w, 2 * w, 3, 2),
        _residual(block, 2 * w),
        block(2 * w, 4 * w, 3, 2),
        block(4 * w, 8 * w, 3, 2),
        _residual(block, 8 * w),
    ]
    pixels = math.prod(-(-side // 32) for side in shape[:2])
    head = [nnx.Linear(pixels * 8 * w, 8 * w, rngs=rngs), nnx.Linear(8 * w, classes, rngs=rngs)]
    return body, head, 1.0


def _dawnbench(block: Callable, shape: Sequence[int], classes: int, w: int | None, rngs: nnx.Rngs):
    w = w or 64
    body = [
        block(shape[-1], w),
        block(w, 2 * w),
        halve,
        _residual(block, 2 * w),
        block(2 * w, 4 * w),
        halve,
        block(4 * w, 8 * w),
        halve,
        _residual(block, 8 * w),
        brightest,
    ]
    return body, [nnx.Linear(8 * w, classes, use_bias=False, rngs=rngs)], 0.125


def _residual(block: Callable, channels: int) -> Residual:
    return Residual([block(channels, channels), block(channels, channels)])


def halve(x: jax.Array) -> jax.Array:
    """Return the maximum over 2x2 pixels, dropping a last odd row or column; among equal pixels the
    first gets the gradient. Replaces `nnx.max_pool`, whose gradient on CPU scans every window and
    is 16 times slower."""
    height, width = x.shape[1] // 2, x.shape[2] // 2
    x = x[:, : 2 * height, : 2 * width].reshape(x.shape[0], height, 2, width, 2, x.shape[3])
    largest = x[:, :, 0, :, 0]
    for row, column in ((0, 1), (1, 0), (1, 1)):
        other = x[:, :, row, :, column]
        largest = jnp.where((largest >= other) | jnp.isnan(largest), largest, other)
    return largest


def brightest(x: jax.Array) -> jax.Array:
    """Return the maximum over all pixels."""
    return x.max((1, 2))


VARIANTS = {"needle": _needle, "dawnbench": _dawnbench}
