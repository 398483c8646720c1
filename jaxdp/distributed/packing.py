"""Many arrays travel as one: what is reduced in a buffer for each element type, what is moved as the bytes it is.

Packing is done outside the compiled program: XLA on CPU takes 8 s to compile a concatenation of 400 arrays, and its
copies of a bfloat16 quiet signaling NaNs. NumPy copies bytes. Only a single array on another platform stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Part = Any  # an array of NumPy or of JAX
UINT = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def _shared(arrays: Sequence[Part], as_bytes: bool) -> list[list[int]]:
    """Which arrays share a buffer: all, as bytes; or those of one type."""
    if as_bytes:
        return [list(range(len(arrays)))] if arrays else []
    types: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        types.setdefault(x.dtype, []).append(i)
    return list(types.values())


def stays(arrays: Sequence[Part], device: jax.Device) -> bool:
    """Whether there is nothing to pack, and a copy to the host would cost something."""
    return len(arrays) == 1 and device.platform != "cpu"


def pack(arrays: Sequence[Part], rows: int, device: jax.Device, as_bytes: bool) -> list[Part]:
    """Buffers[rows, element]; dim 0 of each array is dealt to the rows (or rows is 1). as_bytes: one, of uint32.

    The buffers are copies: JAX may use the memory while the arrays' owner writes to them.
    """
    if stays(arrays, device):
        return [jnp.reshape(x, (rows, x.size // rows)) for x in arrays]
    flat = [np.ascontiguousarray(x).reshape(rows, x.size // rows) for x in arrays]
    if not as_bytes:
        return [np.concatenate([flat[i] for i in mine], 1) for mine in _shared(arrays, False)]
    if not flat:
        return []
    flat = [x.view(np.uint8) for x in flat]
    padding = -sum(x.shape[1] for x in flat) % 4
    return [np.concatenate([*flat, np.zeros((rows, padding), np.uint8)], 1).view(np.uint32)]


def unpack(
    buffers: Sequence[Array],
    arrays: Sequence[Part],
    rows: int,
    device: jax.Device,
    as_bytes: bool,
    finish: Callable[[Part, tuple[int, ...]], Part],
) -> list[Part]:
    """`finish(part[rows', element], shape)` of each of the `arrays` that were packed in `rows` rows."""
    if stays(arrays, device):
        return [finish(b, x.shape) for b, x in zip(buffers, arrays)]
    out: list[Part] = [None] * len(arrays)
    for buffer, mine in zip(buffers, _shared(arrays, as_bytes)):
        source, start = np.asarray(buffer), 0
        source = source.view(np.uint8) if as_bytes else source
        for i in mine:
            x = arrays[i]
            stop = start + x.size // rows * (x.dtype.itemsize if as_bytes else 1)
            part = source[:, start:stop]
            out[i] = finish(np.ascontiguousarray(part).view(x.dtype) if as_bytes else part, x.shape)
            start = stop
    return out


def to_bits(x: Array) -> Array:
    """x[...] as unsigned integers of its width, bit for bit; of a complex x, one more dim in front, of two."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([to_bits(x.real), to_bits(x.imag)])
    return x.astype(jnp.uint8) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, UINT[x.dtype.itemsize])


def from_bits(bits: Array, dtype: Any) -> Array:
    """The inverse of `to_bits`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(*(lax.bitcast_convert_type(b, jnp.finfo(dtype).dtype) for b in bits))
    return bits.astype(dtype) if dtype == jnp.bool_ else lax.bitcast_convert_type(bits, dtype)
