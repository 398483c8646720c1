"""Formulas that XLA computes faster on CPU. Only `on_cpu` and `backend` say which platform programs
are for.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

target: str | None = None  # the platform that `jaxdp plan` compiles for, if it is not here


def backend() -> str:
    """Return JAX's name of the platform that programs are for."""
    return target or jax.default_backend()


def on_cpu() -> bool:
    """Return True if programs are for the CPU, and so should use the formulas for it."""
    return target is None and jax.default_backend() == "cpu"


def product(
    x: jax.Array, kernel: jax.Array, dimension_numbers: Any = None, **options: Any
) -> jax.Array:
    """Return x[..., inputs] kernel[inputs, outputs] -> [..., outputs]; a `dot_general` for
    `nnx.Linear`.

    JAX's gradient of the kernel sums over all leading dimensions, one of which is that of the
    microbatches. XLA on CPU transposes an operand in memory for such a sum, so there this function
    joins the rows, and sums over one dimension. Raises ValueError for other dimension numbers, and
    for options of `lax.dot_general`: the layers of this package set none.
    """
    usual = dimension_numbers in (None, (((x.ndim - 1,), (0,)), ((), ()))) and kernel.ndim == 2
    if not usual or {*options.values()} - {None}:
        raise ValueError(
            f"product: {dimension_numbers} {options} is not x[..., inputs] kernel[inputs, outputs]"
        )
    return (_product if on_cpu() else _dot)(x, kernel)


def _dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


_product = jax.custom_jvp(_dot)


@functools.partial(_product.defjvp, symbolic_zeros=True)
def _tangent_of_product(primals, tangents):
    (x, kernel), (dx, dkernel) = primals, tangents
    y = _product(x, kernel)
    if isinstance(dkernel, SymbolicZero):
        return y, _product(dx, kernel)
    dy = _of_kernel.bind(x, dkernel)
    return y, dy if isinstance(dx, SymbolicZero) else _product(dx, kernel) + dy


# The product as a linear function of the kernel. Its transpose is the kernel's gradient: one
# product of matrices, with the rows of all examples and, below `vmap`, of all microbatches joined.
_of_kernel = Primitive("product_of_kernel")
_of_kernel.def_impl(_dot)
mlir.register_lowering(_of_kernel, mlir.lower_fun(_dot, multiple_results=False))


@_of_kernel.def_abstract_eval
def _type_of_product(x, kernel):
    y = jax.eval_shape(_dot, x, kernel)
    return x.update(shape=y.shape, dtype=y.dtype)


def _gradient_of_x(dy, x, kernel):
    return _dot(dy, kernel.T).astype(x.aval.dtype)


def _gradient_of_kernel(dy, x, kernel):
    x, dy = (a.reshape(-1, a.shape[-1]) for a in (x, dy))
    return lax.dot_general(x, dy, (((0,), (0,)), ((), ()))).astype(kernel.aval.dtype)


def _batched(args, dims):
    (x, kernel), (along, other) = args, dims
    if along is not None and other is None:
        return _of_kernel.bind(jnp.moveaxis(x, along, 0), kernel), 0
    return jax.vmap(_dot, in_axes=dims)(x, kernel), 0


ad.defbilinear(_of_kernel, _gradient_of_x, _gradient_of_kernel)
batching.primitive_batchers[_of_kernel] = _batched


def convolve(
    x: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    pads: Sequence[tuple[int, int]],
    *,
    lhs_dilation: Sequence[int] = (1, 1),
    rhs_dilation: Sequence[int] = (1, 1),
    feature_group_count: int = 1,
    dimension_numbers: Any = None,
    **options: Any,
) -> jax.Array:
    """Convolve x[example, height, width, input] with kernel[height, width, input, output]; for
    `ConvBN`'s `nnx.Conv`.

    On CPU, with strides or one pixel of output, it gathers the patches of the image and multiplies
    them (Chellapilla et al. 2006, "High Performance Convolutional Neural Networks for Document
    Processing"); the gradients are products too. Taps of the kernel that see only padding are left
    out: a 3x3 kernel on a one-pixel image is one matrix. Other cases call
    `lax.conv_general_dilated`. Raises ValueError for dilation or groups."""
    if {*lhs_dilation, *rhs_dilation, feature_group_count} != {1}:
        raise ValueError("convolve: it neither dilates nor groups")
    sizes, window = x.shape[1:3], kernel.shape[:2]
    dims = list(zip(sizes, window, strides, pads, strict=True))
    height, width = ((n + sum(pad) - k) // s + 1 for n, k, s, pad in dims)
    by_patches = tuple(strides) != (1, 1) or (height, width) == (1, 1)
    if not on_cpu() or not by_patches or min(height, width) < 1:
        return lax.conv_general_dilated(
            x, kernel, strides, pads, dimension_numbers=dimension_numbers, **options
        )
    down, right = strides
    last_row, last_column = (height - 1) * down, (width - 1) * right
    rows, columns = (
        range(max(0, low - last), min(k, n + low))
        for (n, k, _, (low, _)), last in zip(dims, (last_row, last_column), strict=True)
    )
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((*pad, 0) for pad in pads), (0, 0, 0)])
    # The pixels that one tap sees, one for each output, are a slice of the image with strides.
    patches = [
        x[:, i : i + last_row + 1 : down, j : j + last_column + 1 : right]
        for i in rows
        for j in columns
    ]
    kernel = kernel[rows.start : rows.stop, columns.start : columns.stop]
    matrix = kernel.reshape(-1, kernel.shape[3])
    return product(jnp.concatenate(patches, -1), matrix, **options)
