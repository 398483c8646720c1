"""Products, convolutions and sums on CPU that are rounded alike on any number of threads, for the
exact reductions.

XLA computes a product with its own kernels, or with Eigen, which divides a long sum among its
threads and so rounds by their number. Eigen gets the products with a transposed left operand
(gradients of kernels) and most convolutions. Here, such an operand is transposed in memory first,
and a convolution becomes one product for each position in its window. Several microbatches at once
(`exact_group`) are also faster so: XLA's grouped convolutions are slow. Sums are products with
ones, since XLA's own are slow in exact mode."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jaxdp.losses import wide_einsum
from jaxdp.precision import is_float
from jaxdp.process import private_jax
from jaxdp.split import fit, padded_shape

WINDOW = 32  # XLA divides longer sums into windows
ROWS = 256  # summed one after the other; longer sums are sums of such sums


def lower_on_cpu() -> None:
    """Lower the products, convolutions and sums that this process compiles for CPU in this way from
    now on.
    """
    mlir.register_lowering(lax.dot_general_p, _lower_dot, platform="cpu")
    for primitive, f in ((lax.conv_general_dilated_p, _convolution), (lax.reduce_sum_p, _sum)):
        lowering = mlir.lower_fun(f, multiple_results=False)
        mlir.register_lowering(primitive, lowering, platform="cpu")


def _lower_dot(ctx: Any, *operands: Any, **params: Any) -> Any:
    (contracted, _), _ = params["dimension_numbers"]
    ndim = ctx.avals_in[0].ndim
    lower = mlir.lower_fun(_transposed_dot, multiple_results=False)
    if tuple(contracted) == tuple(range(ndim - len(contracted), ndim)):
        lower = private_jax.lower_dot
    return lower(ctx, *operands, **params)


def _transposed_dot(
    lhs: jax.Array, rhs: jax.Array, *, dimension_numbers: Any, **params: Any
) -> jax.Array:
    """Compute `lax.dot_general` after transposing the smaller operand in memory to [batch...,
    free..., contracted...].

    If that is rhs, the operands change places, and so do the dimensions of the result. The choice
    also decides how a product with few columns is rounded.
    """
    (contracted, rhs_contracted), (batch, rhs_batch) = dimension_numbers
    if swap := rhs.size <= lhs.size:
        lhs, rhs = rhs, lhs
        contracted, rhs_contracted, batch, rhs_batch = rhs_contracted, contracted, rhs_batch, batch
    free = [d for d in range(lhs.ndim) if d not in (*contracted, *batch)]
    lhs = lax.optimization_barrier(lhs.transpose(*batch, *free, *contracted))
    first, own = len(batch), len(batch) + len(free)
    dimensions = (range(own, lhs.ndim), rhs_contracted), (range(first), rhs_batch)
    y = lax.dot_general(lhs, rhs, dimensions, **params)
    return jnp.moveaxis(y, range(first, own), range(first - own, 0)) if swap else y


def _sum(x: jax.Array, *, axes: Any, **params: Any) -> jax.Array:
    """Compute `lax.reduce_sum`: of many rows with products with ones, of ROWS rows each; else as
    XLA does.
    """
    first, after = (axes[0], axes[-1] + 1) if axes else (0, 0)
    rows, columns = math.prod(x.shape[first:after]), math.prod(x.shape[after:])
    adjacent = tuple(axes) == tuple(range(first, after))
    if not (is_float(x) and adjacent and rows > WINDOW and columns >= WINDOW):
        # `lax.add` itself would recurse.
        return lax.reduce(x, jnp.zeros((), x.dtype), lambda a, b: lax.add(a, b), axes)
    y = x
    while rows > 1:
        block = min(rows, ROWS)
        y = y.reshape(-1, rows, columns)
        y = fit(y, padded_shape(y.shape, 1, block)).reshape(-1, block, columns)
        ones = jnp.ones(y.shape[:2], y.dtype)
        y = wide_einsum("br,brc->bc", ones, y)
        rows = -(-rows // block)
    return y.reshape(*x.shape[:first], *x.shape[after:]).astype(x.dtype)


def _convolution(x: jax.Array, w: jax.Array, **params: Any) -> jax.Array:
    """Compute `lax.conv_general_dilated` with one product for each position in the window, and add
    these up. If the output has fewer positions (the gradient of a kernel), compute one product for
    each of them instead."""
    like = jax.eval_shape(functools.partial(lax.conv_general_dilated_p.bind, **params), x, w)
    if not (x.size and w.size and like.size):  # a sum of nothing, or no sum
        return jnp.zeros(like.shape, like.dtype)
    x_spec, w_spec, y_spec = params["dimension_numbers"]
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    order = (0, -1, *range(1, x.ndim - 1))
    x = jnp.moveaxis(x, x_spec, order)  # to [batch, *space, channel]
    # To [*window, channel of a group, output channel].
    w = w.transpose(*w_spec[2:], w_spec[1], w_spec[0])
    pads = [(low, high, d - 1) for (low, high), d in zip(params["padding"], params["lhs_dilation"])]
    if any(map(any, pads)):  # XLA would not remove an operation that pads nothing
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
    *window, inputs, outputs = w.shape
    out = [like.shape[d] for d in y_spec[2:]]
    kernel = w.reshape(-1, inputs, outputs)
    wide = jnp.promote_types(like.dtype, jnp.float32) if is_float(like) else like.dtype

    def product(patch, kernel):
        """patch [batch, *, channel], kernel [k, channel, output channel] -> [group of the batch,
        group of channels, example, position, output channel].
        """
        patch = patch.reshape(batches, len(x) // batches, -1, len(kernel), groups, inputs)
        kernel = kernel.reshape(len(kernel), inputs, batches, groups, -1)
        dimensions = "aepkgm,kmago->agepo"
        return jnp.einsum(
            dimensions, patch, kernel, precision=params["precision"], preferred_element_type=wide
        )

    if math.prod(window) <= math.prod(out):
        starts = _starts(window, dilation)

        def term(i):
            return product(_strided(x, starts[i], out, strides), kernel[i][None])

        zero = jnp.zeros_like(jax.eval_shape(term, 0))
        y = lax.fori_loop(0, len(starts), lambda i, total: total + term(i), zero)
    else:

        def one(start):
            return product(_strided(x, start, window, dilation), kernel)[..., 0, :]

        y = jnp.moveaxis(lax.map(one, _starts(out, strides)), 0, 3)
    y = y.transpose(2, 3, 0, 1, 4).reshape(-1, *out, outputs).astype(like.dtype)
    return jnp.moveaxis(y, order, y_spec)


def _starts(counts: list[int], steps: Any) -> jax.Array:
    """Return the first index of every position, [position, dimension]."""
    return jnp.asarray(np.argwhere(np.ones(counts)) * steps, jnp.int32)


def _strided(x: jax.Array, start: jax.Array, counts: list[int], strides: Any) -> jax.Array:
    """Return the elements [batch, *counts, channel] of x that begin at start [dimension]."""
    for dim, (first, count, stride) in enumerate(zip(start, counts, strides), 1):
        x = lax.dynamic_slice_in_dim(x, first, (count - 1) * stride + 1, dim)
        x = lax.slice_in_dim(x, 0, None, stride, dim)
    return x
