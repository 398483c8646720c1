"""Lazy logits: the largest array of a language model, computed by its loss one chunk at a time."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxdp.cpu import on_cpu

AT_ONCE = 2**24  # logits in memory at a time on CPU: 64 MB in float32
ON_ACCELERATORS = (
    2**28
)  # 1 GB: larger chunks, since each reads the full kernel and adds to its full gradient
TILE = 128  # the number of rows of a chunk is a multiple of this on accelerators


class Logits(struct.PyTreeNode):
    """The lazy product x[..., dim] kernel[row, dim]': the last step of a model, left to its loss to
    compute.

    classes: the size of the vocabulary; kernel rows beyond it are padding that makes the product
    faster."""

    x: jax.Array
    kernel: jax.Array
    classes: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], self.classes)

    def compute(self) -> jax.Array:
        """Compute all logits [..., classes], in at least float32."""
        return wide_einsum("...d,vd->...v", self.x, self.kernel)[..., : self.classes]

    def map(self, f: Callable[..., Any], *more: jax.Array) -> Any:
        """Apply f(logits[row, classes], *more[row]) -> tree of [row] to all rows, in chunks; return
        a tree of [...].

        The backward pass recomputes the logits chunk by chunk.
        """
        rows, lead = self.x.reshape(-1, self.x.shape[-1]), self.x.shape[:-1]
        more = tuple(x.reshape(-1) for x in more)

        def restore_shape(tree):
            return jax.tree.map(lambda x: x.reshape(lead), tree)

        size = rows_at_once(len(self.kernel), on_cpu())
        if len(rows) <= size:
            return restore_shape(f(self.compute().reshape(-1, self.classes), *more))
        kernel = self.kernel.astype(
            wide(self.kernel.dtype)
        )  # accumulate its gradient over the chunks in float32

        @jax.checkpoint
        def apply_to_chunk(args: tuple[jax.Array, ...]) -> Any:
            x, *rest = args
            return f(Logits(x, kernel.astype(self.kernel.dtype), self.classes).compute(), *rest)

        pad = -len(rows) % size

        def chunked(x):
            return jnp.pad(x, ((0, pad), *[(0, 0)] * (x.ndim - 1))).reshape(-1, size, *x.shape[1:])

        results = jax.lax.map(apply_to_chunk, (chunked(rows), *map(chunked, more)))
        return restore_shape(jax.tree.map(lambda x: x.reshape(-1)[: len(rows)], results))


def rows_at_once(classes: int, cpu: bool) -> int:
    """Return the number of rows of logits in one chunk."""
    if cpu:
        return max(1, AT_ONCE // classes)
    rows = max(1, ON_ACCELERATORS // classes)
    return rows - rows % TILE or rows


def is_lazy(outputs: Any) -> bool:
    """Return whether outputs are lazy `Logits`."""
    return isinstance(outputs, Logits)


def compute_logits(outputs: Any) -> Any:
    """Return a model's outputs with every lazy `Logits` computed."""
    return jax.tree.map(lambda x: x.compute() if is_lazy(x) else x, outputs, is_leaf=is_lazy)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def wide_einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return `jnp.einsum` in at least float32. Gradients are products in the dtype of x and y,
    which are faster.
    """
    return jnp.einsum(equation, x, y, preferred_element_type=wide(x.dtype))


@wide_einsum.defjvp
def _(equation, primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    outputs = wide_einsum(equation, x, y)
    tangent = jnp.einsum(equation, dx, y) + jnp.einsum(equation, x, dy)
    return outputs, tangent.astype(outputs.dtype)


def wide(dtype: Any) -> Any:
    """Return float32, or `dtype` if that is wider."""
    return jnp.promote_types(dtype, jnp.float32)
