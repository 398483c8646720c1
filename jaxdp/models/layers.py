"""Dropout, residual blocks, and Conv-BatchNorm-ReLU blocks that exclude padding examples from the
statistics.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdp.cpu import convolve
from jaxdp.errors import UsageError
from jaxdp.split import data_axes


def require(fits: bool, argument: str, value: Any, problem: str) -> None:
    """Raise UsageError for an argument of a model that does not fit."""
    if not fits:
        raise UsageError(f"model.args.{argument}: {value!r} {problem}")


def require_divisible(argument: str, value: int, other: str, divisor: int) -> None:
    """Raise UsageError unless an argument of a model divides by another one."""
    problem = f"does not divide by {other}: {divisor}; change either"
    require(value % divisor == 0, argument, value, problem)


def require_image(shape: Sequence[int]) -> None:
    """Raise UsageError unless the shape of an example is that of an image with channels."""
    require(
        len(shape) == 3,
        "input_shape",
        shape,
        "is not (height, width, channels); add an axis: images[..., None]",
    )


def require_text(shape: Sequence[int]) -> None:
    """Raise UsageError unless the shape of an example is that of a text."""
    require(len(shape) == 1, "input_shape", shape, "is not (length,); use data of tokens")


def require_tokens(model: str, tokens: jax.Array) -> None:
    """Raise UsageError unless a model of this name gets tokens."""
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise UsageError(
            f"model: {model} reads integers [example, token], not {tokens.dtype}{list(tokens.shape)}"
        )


def make_dropout(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
    """Return a dropout layer. Raises UsageError unless the rate is in [0, 1)."""
    require(
        0 <= rate < 1,
        "dropout",
        rate,
        f"is not in [0, 1); make it {'0' if rate < 0 else 'smaller'}",
    )
    return nnx.Dropout(rate, rngs=rngs)


class ConvBN(nnx.Module):
    """relu(norm(conv(x))) of x[example, height, width, channel]; mask[example] is True for real
    examples.

    The convolution has no bias: the norm cancels it, and its gradient would be rounding noise.
    sync: average statistics over a microbatch of each device, with equal weights whatever the
    padding; they depend on the devices."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        *,
        sync: bool = False,
        rngs: nnx.Rngs,
    ):
        self.conv = nnx.Conv(
            inputs,
            outputs,
            (kernel, kernel),
            strides=stride,
            padding=(kernel - 1) // 2,
            use_bias=False,
            conv_general_dilated=convolve,
            kernel_init=nnx.initializers.he_normal(),
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)
        self.sync = sync

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        if self.sync:
            self.norm.axis_name = data_axes()  # type: ignore[assignment]  # several names are as good as one
        mask = None if mask is None else mask.reshape(-1, 1, 1, 1)
        return nnx.relu(self.norm(self.conv(x), mask=mask))


class Residual(nnx.Module):
    """x + block(block(x))."""

    def __init__(self, blocks: Sequence[ConvBN]):
        self.blocks = nnx.List(blocks)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        y = x
        for block in self.blocks:
            y = block(y, mask)
        return x + y
