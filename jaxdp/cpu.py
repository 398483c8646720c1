"""Formulas that XLA computes faster on CPU. Only `on_cpu` asks for the backend to choose between
two formulas.
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

# With fewer channels, strided convolutions move pixels to channels: a processor reads 16 floats at
# once.
FEW = 16
Pads = list[tuple[int, int]]


def on_cpu() -> bool:
    """Return True if programs run on the CPU by default, and so should use the formulas for it."""
    return jax.default_backend() == "cpu"


def product(
    x: jax.Array, kernel: jax.Array, dimension_numbers: Any = None, **options: Any
) -> jax.Array:
    """Return x[..., inputs] kernel[inputs, outputs] -> [..., outputs]; a `dot_general` for
    `nnx.Linear`.

    JAX's gradient of the kernel sums over all leading dimensions, one of which is that of the
    microbatches. XLA on CPU transposes an operand in memory for such a sum, so there this function
    joins the rows, and sums over one dimension. Raises ValueError for other dimension numbers.
    """
    if dimension_numbers not in (None, (((x.ndim - 1,), (0,)), ((), ()))) or kernel.ndim != 2:
        raise ValueError(
            f"product: {dimension_numbers} is not x[..., inputs] kernel[inputs, outputs]"
        )
    named = tuple(options.items())
    return (_product if on_cpu() else _dot)(x, kernel, named)


def _dot(x: jax.Array, kernel: jax.Array, options: Any) -> jax.Array:
    return lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), **dict(options))


_product = jax.custom_jvp(_dot, nondiff_argnums=(2,))


@functools.partial(_product.defjvp, symbolic_zeros=True)
def _tangent_of_product(options: Any, primals: Any, tangents: Any) -> Any:
    (x, kernel), (dx, dkernel) = primals, tangents
    y = _product(x, kernel, options)
    if isinstance(dkernel, SymbolicZero):
        return y, _product(dx, kernel, options)
    dy = _of_kernel.bind(x, dkernel, options=options)
    return y, dy if isinstance(dx, SymbolicZero) else _product(dx, kernel, options) + dy


# The product as a linear function of the kernel. Its transpose is the kernel's gradient: one
# product of matrices, with the rows of all examples and, below `vmap`, of all microbatches joined.
_of_kernel = Primitive("product_of_kernel")
_of_kernel.def_impl(_dot)
mlir.register_lowering(_of_kernel, mlir.lower_fun(_dot, multiple_results=False))


@_of_kernel.def_abstract_eval
def _type_of_product(x: Any, kernel: Any, *, options: Any) -> Any:
    y = jax.eval_shape(functools.partial(_dot, options=options), x, kernel)
    return x.update(shape=y.shape, dtype=y.dtype)


def _gradient_of_x(dy: Any, x: Any, kernel: Any, *, options: Any) -> Any:
    return _dot(dy, kernel.T, options=options).astype(x.aval.dtype)


def _gradient_of_kernel(dy: Any, x: Any, kernel: Any, *, options: Any) -> Any:
    x, dy = (a.reshape(-1, a.shape[-1]) for a in (x, dy))
    return lax.dot_general(x, dy, (((0,), (0,)), ((), ())), **dict(options)).astype(
        kernel.aval.dtype
    )


def _batched(args: Any, dims: Any, *, options: Any) -> Any:
    (x, kernel), (along, other) = args, dims
    if along is not None and other is None:
        return _of_kernel.bind(jnp.moveaxis(x, along, 0), kernel, options=options), 0
    return jax.vmap(functools.partial(_dot, options=options), in_axes=tuple(dims))(x, kernel), 0


ad.defbilinear(_of_kernel, _gradient_of_x, _gradient_of_kernel)
batching.primitive_batchers[_of_kernel] = _batched


def unfused(x: jax.Array) -> jax.Array:
    """Return x, on CPU with a fusion barrier: a sum of products that reads it is ten times slower
    if fused with it.
    """
    return lax.optimization_barrier(x) if on_cpu() else x


def convolve(
    x: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    pads: Pads,
    *,
    lhs_dilation: Sequence[int] = (1, 1),
    rhs_dilation: Sequence[int] = (1, 1),
    feature_group_count: int = 1,
    dimension_numbers: Any = None,
    **options: Any,
) -> jax.Array:
    """Convolve x[example, height, width, input] with kernel[height, width, input, output]; for
    `ConvBN`'s `nnx.Conv`.

    On CPU, on images not smaller than the window, it drops kernel taps that see only padding (a 3x3
    kernel on a one-pixel image becomes a matrix product). With strides, or one pixel of output, it
    gathers patches and multiplies them (Chellapilla et al. 2006, "High Performance Convolutional
    Neural Networks for Document Processing"); the gradients are products too. Other cases call
    `lax.conv_general_dilated`. Raises ValueError for dilation or groups."""
    if {*lhs_dilation, *rhs_dilation, feature_group_count} != {1}:
        raise ValueError("convolve: it neither dilates nor groups")
    if not on_cpu() or min(_outputs(x.shape[1:3], kernel.shape[:2], strides, pads)) < 1:
        return lax.conv_general_dilated(
            x, kernel, strides, pads, dimension_numbers=dimension_numbers, **options
        )
    kernel, pads = _crop_kernel(x.shape[1:3], kernel, strides, pads)
    height, width = _outputs(x.shape[1:3], kernel.shape[:2], strides, pads)
    if tuple(strides) == (1, 1) and (height, width) != (1, 1):
        return lax.conv_general_dilated(
            x, kernel, strides, pads, dimension_numbers=dimension_numbers, **options
        )
    if x.shape[3] < FEW and all(k >= s for k, s in zip(kernel.shape[:2], strides, strict=True)):
        x, kernel = _blocks(x, kernel, strides, pads, (height, width))
        strides, pads = (1, 1), [(0, 0), (0, 0)]
    return product(
        _patches(x, kernel.shape[:2], strides, pads), kernel.reshape(-1, kernel.shape[3]), **options
    )


def _outputs(
    sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], pads: Pads
) -> tuple[int, ...]:
    return tuple(
        (n + sum(p) - k) // s + 1 for n, k, s, p in zip(sizes, window, strides, pads, strict=True)
    )


def _crop_kernel(
    sizes: Sequence[int], kernel: jax.Array, strides: Sequence[int], pads: Pads
) -> tuple[jax.Array, Pads]:
    """Crop the kernel to the taps that see the image for some output; return it with the matching
    padding.
    """
    outputs, crops, new_pads = _outputs(sizes, kernel.shape[:2], strides, pads), [], []
    for n, k, s, (low, high), o in zip(
        sizes, kernel.shape[:2], strides, pads, outputs, strict=True
    ):
        taps = [t for t in range(k) if any(0 <= i * s + t - low < n for i in range(o))] or [
            0,
            k - 1,
        ]
        crops.append(slice(taps[0], taps[-1] + 1))
        new_pads.append((low - taps[0], high - (k - 1 - taps[-1])))
    return kernel[tuple(crops)], new_pads


def _patches(x: jax.Array, window: Sequence[int], strides: Sequence[int], pads: Pads) -> jax.Array:
    """Return the patch of each output pixel: [example, height, width, tap x channel]."""
    height, width = _outputs(x.shape[1:3], window, strides, pads)
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((*p, 0) for p in pads), (0, 0, 0)])
    down, right = strides
    ends = (height - 1) * down + 1, (width - 1) * right + 1
    taps = [(i, j) for i in range(window[0]) for j in range(window[1])]
    return jnp.concatenate(
        [x[:, i : i + ends[0] : down, j : j + ends[1] : right] for i, j in taps], -1
    )


def _blocks(
    x: jax.Array, kernel: jax.Array, strides: Sequence[int], pads: Pads, outputs: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Convert to a convolution with stride 1: the pixels of each block of the strides' size become
    channels. Pads the kernel with zeros to full blocks, and leaves out pixels after the last
    window: 0 x NaN would be NaN."""
    across = [-(-k // s) for k, s in zip(kernel.shape[:2], strides, strict=True)]
    padded = [(o + b - 1) * s for o, b, s in zip(outputs, across, strides, strict=True)]
    ends = [(o - 1) * s + k for o, s, k in zip(outputs, strides, kernel.shape[:2], strict=True)]
    x = x[:, : max(0, ends[0] - pads[0][0]), : max(0, ends[1] - pads[1][0])]
    fit = [
        (low, size - n - low, 0)
        for n, size, (low, _) in zip(x.shape[1:3], padded, pads, strict=True)
    ]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *fit, (0, 0, 0)])
    fill = [(0, b * s - k) for b, s, k in zip(across, strides, kernel.shape[:2], strict=True)]
    kernel = jnp.pad(kernel, [*fill, (0, 0), (0, 0)])
    (down, right), channels = strides, x.shape[3]
    x = x.reshape(
        x.shape[0], padded[0] // down, down, padded[1] // right, right, channels
    ).swapaxes(2, 3)
    kernel = kernel.reshape(across[0], down, across[1], right, channels, -1).swapaxes(1, 2)
    inside = down * right * channels
    return x.reshape(*x.shape[:3], inside), kernel.reshape(*across, inside, kernel.shape[-1])
