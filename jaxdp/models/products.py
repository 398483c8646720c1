"""A linear layer's product, written so that XLA on CPU computes the kernel's gradient fast."""

from typing import Any

import jax
from jax import lax


def product(x: jax.Array, kernel: jax.Array, dimension_numbers: Any = None, **options: Any) -> jax.Array:
    """Return x[..., inputs] kernel[inputs, outputs] -> [..., outputs]; a `dot_general` for `nnx.Linear`.

    The leading dimensions are joined: XLA on CPU transposes operands in memory for a gradient that sums over several.
    Raises ValueError for other dimension numbers.
    """
    if dimension_numbers not in (None, (((x.ndim - 1,), (0,)), ((), ()))) or kernel.ndim != 2:
        raise ValueError(f"product: {dimension_numbers} is not x[..., inputs] kernel[inputs, outputs]")
    y = lax.dot_general(x.reshape(-1, x.shape[-1]), kernel, (((1,), (0,)), ((), ())), **options)
    return y.reshape(*x.shape[:-1], kernel.shape[-1])
