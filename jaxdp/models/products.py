"""A linear layer's product, written so that XLA on CPU uses its fast path for the weight gradient too."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

SMALL = 2**18  # up to this many elements, transposing the weight gradient is faster than transposing its operands
Options = tuple[tuple[str, Any], ...]


def product(x: jax.Array, kernel: jax.Array, dimension_numbers: Any = None, **options: Any) -> jax.Array:
    """Return x[..., inputs] kernel[inputs, outputs] -> [..., outputs]; a `dot_general` for `nnx.Linear`.

    JAX's kernel gradient (dy' x)' sums over all leading dims. XLA on CPU transposes dy in memory for it and uses its
    slowest kernel: 12 ms instead of 3.6 for [1024, 256] and [1024, 1024] on one core. This function uses a product of
    matrices on CPU, and `lax.dot_general` elsewhere. Raises ValueError for other dimension numbers.
    """
    if dimension_numbers not in (None, (((x.ndim - 1,), (0,)), ((), ()))) or kernel.ndim != 2:
        raise ValueError(f"product: {dimension_numbers} is not x[..., inputs] kernel[inputs, outputs]")
    if jax.default_backend() != "cpu":
        return _dot(x, kernel, options=tuple(options.items()))
    return _product(x, kernel, tuple(options.items()))


def _dot(x: jax.Array, kernel: jax.Array, *, options: Options) -> jax.Array:
    return lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), **dict(options))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _product(x: jax.Array, kernel: jax.Array, options: Options) -> jax.Array:
    return _dot(x, kernel, options=options)


def _derivative(options: Options, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> Any:
    (x, kernel), (dx, change) = primals, tangents
    y, parts = _product(x, kernel, options), []
    if not isinstance(dx, SymbolicZero):
        parts.append(_product(dx, kernel, options))
    if not isinstance(change, SymbolicZero):
        parts.append(_changed.bind(x, change, options=options))
    return y, functools.reduce(jnp.add, parts) if parts else jnp.zeros_like(y)


_product.defjvp(_derivative, symbolic_zeros=True)


# `_dot` with the kernel's tangent, as a separate primitive with its own transpose. Reverse mode runs only its
# transpose, so checkpoint policies and operation counts see `dot_general`.
_changed = Primitive("product_of_change")
_changed.def_impl(_dot)


@_changed.def_abstract_eval
def _(x: Any, change: Any, *, options: Options) -> Any:
    struct = lambda aval: jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    y = jax.eval_shape(functools.partial(_dot, options=options), struct(x), struct(change))
    return x.update(shape=y.shape, dtype=y.dtype)


def _gradient_of_x(dy: Any, x: Any, change: Any, *, options: Options) -> Any:
    return lax.dot_general(dy, change, (((dy.ndim - 1,), (1,)), ((), ())), **dict(options)).astype(x.aval.dtype)


def _gradient_of_kernel(dy: Any, x: Any, change: Any, *, options: Options) -> Any:
    """Return the gradient of the kernel [inputs, outputs], from dy[..., outputs] and x[..., inputs]."""
    inputs, outputs = x.shape[-1], dy.shape[-1]
    x, dy, rows = x.reshape(-1, inputs), dy.reshape(-1, outputs), (((0,), (0,)), ((), ()))
    if outputs < inputs and inputs * outputs <= SMALL:  # the barrier keeps the transpose out of the product
        gradient = lax.optimization_barrier(lax.dot_general(dy, x, rows, **dict(options))).T
    else:
        gradient = lax.dot_general(x, dy, rows, **dict(options))
    return gradient.astype(change.aval.dtype)


def _batched(args: Sequence[Any], dims: Sequence[int | None], *, options: Options) -> tuple[Any, int]:
    (x, change), (along, other) = args, dims
    if along is not None and other is None:
        return _changed.bind(jnp.moveaxis(x, along, 0), change, options=options), 0
    return jax.vmap(functools.partial(_dot, options=options), in_axes=tuple(dims))(x, change), 0


ad.defbilinear(_changed, _gradient_of_x, _gradient_of_kernel)
batching.primitive_batchers[_changed] = _batched
mlir.register_lowering(_changed, mlir.lower_fun(_dot, multiple_results=False))
