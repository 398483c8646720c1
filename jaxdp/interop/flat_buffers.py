"""Pack many arrays into few buffers: one for each element type to reduce them, one of raw bytes to
move them.

Packing is done outside the compiled program: XLA on CPU takes 8 s to compile a concatenation of 400
arrays, and its copies of a bfloat16 quiet signaling NaNs. NumPy copies bytes. Only a single array
on another platform is not copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Part = Any  # an array of NumPy or of JAX
UINT = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def _assign_buffers(arrays: Sequence[Part], as_bytes: bool) -> list[list[int]]:
    """Return the indices of the arrays in each buffer: all arrays as bytes, else those of one type."""
    if as_bytes:
        return [list(range(len(arrays)))] if arrays else []
    types: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        types.setdefault(x.dtype, []).append(i)
    return list(types.values())


def stays(arrays: Sequence[Part], device: jax.Device) -> bool:
    """Return whether the arrays stay on their device: a single one needs no packing, and a copy to
    the host is slow.
    """
    return len(arrays) == 1 and device.platform != "cpu"


def pack(arrays: Sequence[Part], rows: int, device: jax.Device, as_bytes: bool) -> list[Part]:
    """Return buffers[rows, element]; dim 0 of each array is split over the rows. as_bytes: one
    buffer, of uint32.

    The buffers are copies, since JAX may read the memory while the caller writes to the arrays.
    """
    if stays(arrays, device):
        return [jnp.reshape(x, (rows, x.size // rows)) for x in arrays]
    flat = [np.ascontiguousarray(x).reshape(rows, x.size // rows) for x in arrays]
    if not as_bytes:
        return [
            np.concatenate([flat[i] for i in indices], 1)
            for indices in _assign_buffers(arrays, False)
        ]
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
    """Return `finish(part[rows', element], shape)` for each of the `arrays` that were packed in
    `rows` rows.
    """
    if stays(arrays, device):
        return [finish(b, x.shape) for b, x in zip(buffers, arrays)]
    out: list[Part] = [None] * len(arrays)
    for buffer, indices in zip(buffers, _assign_buffers(arrays, as_bytes)):
        source, start = np.asarray(buffer), 0
        source = source.view(np.uint8) if as_bytes else source
        for i in indices:
            x = arrays[i]
            stop = start + x.size // rows * (x.dtype.itemsize if as_bytes else 1)
            part = source[:, start:stop]
            out[i] = finish(np.ascontiguousarray(part).view(x.dtype) if as_bytes else part, x.shape)
            start = stop
    return out


def to_bits(x: Array) -> Array:
    """Return the bits of x[...] as unsigned integers of its width, those of float32 for numbers of
    less than 8 bits; a complex x gets a leading dim of size 2."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([to_bits(x.real), to_bits(x.imag)])
    if x.dtype == jnp.bool_ or _is_narrow(x.dtype):
        x = x.astype(jnp.uint8 if x.dtype == jnp.bool_ else jnp.float32)
    return lax.bitcast_convert_type(x, UINT[x.dtype.itemsize])


def from_bits(bits: Array, dtype: Any) -> Array:
    """Invert `to_bits`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(*(lax.bitcast_convert_type(b, jnp.finfo(dtype).dtype) for b in bits))
    if dtype == jnp.bool_:
        return bits.astype(dtype)
    if _is_narrow(dtype):
        return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)
    return lax.bitcast_convert_type(bits, dtype)


def _is_narrow(dtype: Any) -> bool:
    """Return whether a number of this type has less than 8 bits; then float32 has its values, and
    its -0.0.
    """
    return jax.dtypes.itemsize_bits(dtype) < 8
