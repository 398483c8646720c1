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


def _of_one_type(arrays: Sequence[Part]) -> list[list[int]]:
    """Return the indices of the arrays of each type."""
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
    if flat and as_bytes:
        flat = [x.view(np.uint8) for x in flat]
        padding = np.zeros((rows, -sum(x.shape[1] for x in flat) % 4), np.uint8)
        return [np.concatenate([*flat, padding], 1).view(np.uint32)]
    return [np.concatenate([flat[i] for i in indices], 1) for indices in _of_one_type(flat)]


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
    groups = [range(len(arrays))] if as_bytes else _of_one_type(arrays)
    for buffer, indices in zip(buffers, groups):
        source, start = np.asarray(buffer), 0
        source = source.view(np.uint8) if as_bytes else source
        for i in indices:
            x = arrays[i]
            stop = start + x.size // rows * (x.itemsize if as_bytes else 1)
            part, start = source[:, start:stop], stop
            out[i] = finish(np.ascontiguousarray(part).view(x.dtype) if as_bytes else part, x.shape)
    return out


def to_bits(x: Array) -> Array:
    """Return the bits of x[...] as unsigned integers of its width, those of float32 for numbers of
    less than 8 bits; a complex x gets a leading dim of size 2."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([to_bits(x.real), to_bits(x.imag)])
    x = x.astype(jnp.float32) if _is_narrow(x.dtype) else x
    return x.view(f"uint{8 * x.dtype.itemsize}")


def from_bits(bits: Array, dtype: Any) -> Array:
    """Invert `to_bits`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(*bits.view(jnp.finfo(dtype).dtype))
    return bits.view(jnp.float32).astype(dtype) if _is_narrow(dtype) else bits.view(dtype)


def _is_narrow(dtype: Any) -> bool:
    """Return whether a number of this type has less than 8 bits; then float32 has its values, and
    its -0.0.
    """
    return jax.dtypes.itemsize_bits(dtype) < 8
