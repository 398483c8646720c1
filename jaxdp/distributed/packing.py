"""Many arrays travel as one: of each element type there is one buffer, and bits that are only moved go as integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax

UINT = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def to_bits(x: Array) -> list[Array]:
    """x[...] as unsigned integers of its width, bit for bit; of a complex x two, its real and its imaginary part."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*to_bits(x.real), *to_bits(x.imag)]
    return [x.astype(jnp.uint8) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, UINT[x.dtype.itemsize])]


def from_bits(bits: list[Array], dtype: jnp.dtype) -> Array:
    """The inverse of `to_bits`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(*(lax.bitcast_convert_type(b, jnp.finfo(dtype).dtype) for b in bits))
    return bits[0].astype(dtype) if dtype == jnp.bool_ else lax.bitcast_convert_type(bits[0], dtype)


def fused(transfer: Callable[[Array], Array], arrays: Sequence[Array], rows: int) -> list[Array]:
    """`transfer` on one buffer[rows, element] per element type; per array, its part [rows', element] of what came back.

    Each array's leading dim is a multiple of `rows`, and is dealt into them (any array does for rows = 1).
    """
    flat = [x.reshape(rows, x.size // rows) for x in arrays]
    out: list[Array] = list(flat)
    for dtype in dict.fromkeys(x.dtype for x in flat):
        mine = [i for i, x in enumerate(flat) if x.dtype == dtype]
        back = transfer(jnp.concatenate([flat[i] for i in mine], axis=1))
        start = 0
        for i in mine:
            width = flat[i].shape[1]
            out[i] = back[:, start : start + width]
            start += width
    return out
