"""Reading of `.safetensors` files slice by slice, and writing them atomically."""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes  # registers bfloat16 with NumPy, as safetensors needs it
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxdp import rundir

__all__ = ["Header", "Parts", "SafetensorError", "assemble", "header", "read", "write"]

DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "I64": np.dtype(np.int64), "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16), "I8": np.dtype(np.int8), "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip


class Array(NamedTuple):
    """dtype: a NumPy dtype, or the file's name of one that NumPy does not have."""

    shape: tuple[int, ...]
    dtype: Any


class Header(NamedTuple):
    arrays: dict[str, Array]
    metadata: dict[str, str]


def header(path: pathlib.Path) -> Header:
    """Read the file's header. Raises OSError or SafetensorError if it cannot be read."""
    with safe_open(path, framework="np") as file:
        arrays = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return Header(
            {k: Array(tuple(x.get_shape()), DTYPES.get(x.get_dtype(), x.get_dtype())) for k, x in arrays.items()},
            file.metadata() or {},
        )


def read(path: pathlib.Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Read arrays with the dtypes and shardings of `wanted`; each process reads only the slices of its devices."""
    with safe_open(path, framework="np") as file:

        def load(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
            stored = file.get_slice(name)
            part = lambda index: np.asarray(stored[index or ...]).astype(like.dtype)
            return jax.make_array_from_callback(like.shape, like.sharding, part)

        return {name: load(name, like) for name, like in wanted.items()}


class Parts(NamedTuple):
    """The parts of an array: one tensor, from `offset` along its last dim; or, stacked, one tensor per name."""

    names: tuple[str, ...]
    stacked: bool = False
    offset: int = 0


def assemble(path: pathlib.Path, wanted: Mapping[str, tuple[jax.ShapeDtypeStruct, Parts]]) -> dict[str, jax.Array]:
    """Read like `read`, assembling arrays from parts; rows that the file does not have are zeros."""
    with safe_open(path, framework="np") as file:

        def cut(name: str, index: list[slice], offset: int) -> np.ndarray:
            stored = file.get_slice(name)
            rows = stored.get_shape()[0]
            *first, last = index
            inside = [*first, slice(last.start + offset, last.stop + offset)]
            has_rows = inside[0].start < rows
            inside[0] = slice(inside[0].start, min(inside[0].stop, rows)) if has_rows else slice(0, 0)
            values = np.asarray(stored[tuple(inside)])
            missing = index[0].stop - index[0].start - len(values)
            return np.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1)) if missing else values

        def load(like: jax.ShapeDtypeStruct, parts: Parts) -> jax.Array:
            def part(index: tuple[slice, ...] | None) -> np.ndarray:
                slices = [slice(*dim.indices(size)[:2]) for dim, size in zip(index or (), like.shape)]
                if not parts.stacked:
                    return cut(parts.names[0], slices, parts.offset).astype(like.dtype)
                names = parts.names[slices[0]]
                return np.stack([cut(name, slices[1:], parts.offset) for name in names]).astype(like.dtype)

            return jax.make_array_from_callback(like.shape, like.sharding, part)

        return {name: load(like, parts) for name, (like, parts) in wanted.items()}


def write(path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write a file atomically, by a rename. Raises OSError or SafetensorError, and leaves no file then."""
    with rundir.replaced(path, durable=True) as new:
        save_file({name: np.asarray(x, order="C") for name, x in arrays.items()}, new, dict(metadata))
