"""Logits are the largest array of a language model; its loss can do with a piece of them at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

AT_ONCE = 2**24  # logits of a microbatch that are there at a time on CPU: 64 MB in float32
ON_ACCELERATORS = 2**28  # 1 GB: each piece reads the whole kernel, and adds to the whole of its gradient
TILE = 128  # rows that an accelerator computes together


class Logits(struct.PyTreeNode):
    """x[..., dim] times kernel[row, dim], not computed yet: the last step of a model, left to its loss.

    classes: the first so many rows are the vocabulary; the others only make the product a better size.
    """

    x: jax.Array
    kernel: jax.Array
    classes: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], self.classes)

    def whole(self) -> jax.Array:
        """[..., classes], in at least float32."""
        return _product(self.x, self.kernel)[..., : self.classes]

    def map(self, f: Callable[..., Any], *more: jax.Array) -> Any:
        """f(logits[row, classes], *more[row]) -> tree of [row], over all rows [...], a piece of the logits at a time.

        The backward pass computes them again, piece by piece.
        """
        rows, lead = self.x.reshape(-1, self.x.shape[-1]), self.x.shape[:-1]
        more = tuple(x.reshape(-1) for x in more)
        shape = lambda tree: jax.tree.map(lambda x: x.reshape(lead), tree)
        size = rows_at_once(len(self.kernel), jax.default_backend())
        if len(rows) <= size:
            return shape(f(self.whole().reshape(-1, self.classes), *more))
        wide = self.kernel.astype(_wide(self.kernel.dtype))  # its gradient adds up over the pieces

        @jax.checkpoint
        def piece(args: tuple[jax.Array, ...]) -> Any:
            x, *rest = args
            return f(_product(x, wide.astype(self.kernel.dtype))[:, : self.classes], *rest)

        pad = -len(rows) % size
        cut = lambda x: jnp.pad(x, ((0, pad), *[(0, 0)] * (x.ndim - 1))).reshape(-1, size, *x.shape[1:])
        found = jax.lax.map(piece, (cut(rows), *map(cut, more)))
        return shape(jax.tree.map(lambda x: x.reshape(-1)[: len(rows)], found))


def rows_at_once(classes: int, backend: str) -> int:
    """Rows of logits that are computed together."""
    if backend == "cpu":
        return max(1, AT_ONCE // classes)
    rows = max(1, ON_ACCELERATORS // classes)
    return rows - rows % TILE or rows


def whole(outputs: Any) -> Any:
    """A model's outputs with their logits computed."""
    is_leaf = lambda x: isinstance(x, Logits)
    return jax.tree.map(lambda x: x.whole() if is_leaf(x) else x, outputs, is_leaf=is_leaf)


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.einsum("...d,vd->...v", x, kernel).astype(_wide(x.dtype))


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)
