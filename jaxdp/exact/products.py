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
from jax import lax
from jax.interpreters import mlir

from jaxdp.process import private_jax

WINDOW = 32  # XLA divides longer sums into windows
ROWS = 256  # summed one after the other; longer sums are sums of such sums


def lower_on_cpu() -> None:
    """Lower the products, convolutions and sums that this process compiles for CPU in this way from
    now on.
    """
    mlir.register_lowering(lax.dot_general_p, _lower_dot, platform="cpu")
    convolution = mlir.lower_fun(_convolution, multiple_results=False)
    mlir.register_lowering(lax.conv_general_dilated_p, convolution, platform="cpu")
    mlir.register_lowering(
        lax.reduce_sum_p, mlir.lower_fun(_sum, multiple_results=False), platform="cpu"
    )


def _lower_dot(ctx: Any, lhs: Any, rhs: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    (contracted, _), _ = dimension_numbers
    ndim = ctx.avals_in[0].ndim
    if tuple(contracted) == tuple(range(ndim - len(contracted), ndim)):
        return private_jax.lower_dot(ctx, lhs, rhs, dimension_numbers=dimension_numbers, **params)
    transposed = functools.partial(_transposed_dot, dimension_numbers=dimension_numbers, **params)
    return mlir.lower_fun(transposed, multiple_results=False)(ctx, lhs, rhs)


def _transposed_dot(
    lhs: jax.Array, rhs: jax.Array, *, dimension_numbers: Any, **params: Any
) -> jax.Array:
    """Compute `lax.dot_general` after transposing the smaller operand in memory to [batch...,
    free..., contracted...].

    If that is rhs, the operands change places, and so do the dimensions of the result.
    """
    (contracted, rhs_contracted), (batch, rhs_batch) = dimension_numbers
    if swap := rhs.size <= lhs.size:
        lhs, rhs = rhs, lhs
        contracted, rhs_contracted, batch, rhs_batch = rhs_contracted, contracted, rhs_batch, batch
    free = [d for d in range(lhs.ndim) if d not in (*contracted, *batch)]
    order = (*batch, *free, *contracted)
    if order != tuple(range(lhs.ndim)):
        lhs = lax.optimization_barrier(lax.transpose(lhs, order))
    first, last = tuple(range(len(batch))), tuple(range(lhs.ndim - len(contracted), lhs.ndim))
    dimensions = ((last, tuple(rhs_contracted)), (first, tuple(rhs_batch)))
    y = lax.dot_general_p.bind(lhs, rhs, dimension_numbers=dimensions, **params)
    boundary = len(batch) + len(free)
    swapped = (*first, *range(boundary, y.ndim), *range(len(batch), boundary))
    return lax.transpose(y, swapped) if swap else y


def _sum(x: jax.Array, *, axes: Any, **params: Any) -> jax.Array:
    """Compute `lax.reduce_sum`: of many rows with products with ones, of ROWS rows each; else as
    XLA does.
    """
    first, after = (axes[0], axes[-1] + 1) if axes else (0, 0)
    kept, rows, columns = (
        math.prod(x.shape[:first]),
        math.prod(x.shape[first:after]),
        math.prod(x.shape[after:]),
    )
    floats, adjacent = (
        jnp.issubdtype(x.dtype, jnp.floating),
        tuple(axes) == tuple(range(first, after)),
    )
    if not (floats and adjacent and rows > WINDOW and columns >= WINDOW):
        return lax.reduce(
            x, jnp.zeros((), x.dtype), lambda a, b: lax.add(a, b), axes
        )  # `lax.add` itself would recurse
    shape, dtype, wide = (
        (*x.shape[:first], *x.shape[after:]),
        x.dtype,
        jnp.promote_types(x.dtype, jnp.float32),
    )
    batched = (((1,), (1,)), ((0,), (0,)))
    while rows > 1:
        block = min(rows, ROWS)
        x = _padded(x.reshape(kept, rows, columns), [(0, 0, 0), (0, -rows % block, 0), (0, 0, 0)])
        x, rows = x.reshape(-1, block, columns), -(-rows // block)
        x = lax.dot_general(jnp.ones(x.shape[:2], x.dtype), x, batched, preferred_element_type=wide)
    return x.reshape(shape).astype(dtype)


def _padded(x: jax.Array, pads: list[tuple[int, int, int]]) -> jax.Array:
    """Return `lax.pad` with zeros, and no operation where nothing is padded: XLA would not remove
    it.
    """
    return lax.pad(x, jnp.zeros((), x.dtype), pads) if any(any(pad) for pad in pads) else x


def _convolution(x: jax.Array, w: jax.Array, **params: Any) -> jax.Array:
    """Compute `lax.conv_general_dilated` with one product for each position in the window, and add
    these up. If the output has fewer positions (the gradient of a kernel), compute one product for
    each of them instead."""
    x_spec, w_spec, y_spec = params["dimension_numbers"]
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    x = lax.transpose(x, (x_spec[0], *x_spec[2:], x_spec[1]))  # [batch, *space, channel]
    w = lax.transpose(
        w, (*w_spec[2:], w_spec[1], w_spec[0])
    )  # [*window, channel of a group, output channel]
    pads = [(low, high, d - 1) for (low, high), d in zip(params["padding"], params["lhs_dilation"])]
    x = _padded(x, [(0, 0, 0), *pads, (0, 0, 0)])
    size, (*window, inputs, outputs) = x.shape[0], w.shape
    spans = [(k - 1) * d + 1 if k else 0 for k, d in zip(window, dilation)]
    out = [max(0, (s - span) // t + 1) for s, span, t in zip(x.shape[1:-1], spans, strides)]
    kernel = w.reshape(math.prod(window), inputs, outputs)
    dtype = params["preferred_element_type"] or x.dtype
    wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype

    def product(patch: jax.Array, kernel: jax.Array, positions: int) -> jax.Array:
        """patch [batch, *, channel], kernel [k, channel, output channel] -> [group, ..., batch,
        position, channel].
        """
        patch = patch.reshape(batches, size // batches, positions, len(kernel), groups, inputs)
        kernel = kernel.reshape(len(kernel), inputs, batches, groups, outputs // groups // batches)
        dimensions = (((3, 5), (0, 1)), ((0, 4), (2, 3)))
        return lax.dot_general(
            patch, kernel, dimensions, precision=params["precision"], preferred_element_type=wide
        )

    positions = math.prod(out)
    shape = (batches, groups, size // batches, positions, outputs // groups // batches)
    if not (x.size and w.size and positions):  # a sum of nothing, or no sum
        y = jnp.zeros(shape, wide)
    elif math.prod(window) <= positions:
        starts = _starts(window, dilation)

        def term(start, k):
            return product(_strided(x, start, out, strides), k[None], positions)

        def add(i, total):
            return total + term(starts[i], kernel[i])

        y = lax.fori_loop(0, len(starts), add, jnp.zeros(shape, wide))
    else:

        def one(start):
            return product(_strided(x, start, window, dilation), kernel, 1)[..., 0, :]

        y = jnp.moveaxis(lax.map(one, _starts(out, strides)), 0, 3)
    y = y.transpose(2, 3, 0, 1, 4).reshape(size // batches, *out, outputs).astype(dtype)
    order = (y_spec[0], *y_spec[2:], y_spec[1])  # of the dimensions of y in the result
    return y.transpose([order.index(d) for d in range(y.ndim)])


def _starts(counts: list[int], steps: Any) -> jax.Array:
    """Return the first index of every position, [position, dimension]."""
    indices = jnp.indices(counts, jnp.int32).reshape(len(counts), math.prod(counts))
    return indices.T * jnp.asarray(steps, jnp.int32)


def _strided(x: jax.Array, start: jax.Array, counts: list[int], strides: Any) -> jax.Array:
    """Return the elements [batch, *counts, channel] of x that begin at start [dimension]."""
    spans = [(count - 1) * stride + 1 for count, stride in zip(counts, strides)]
    zero = jnp.int32(0)
    box = lax.dynamic_slice(x, (zero, *start, zero), (x.shape[0], *spans, x.shape[-1]))
    return lax.slice(box, [0] * x.ndim, box.shape, (1, *strides, 1))
