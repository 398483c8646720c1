"""A `.safetensors` file holds named arrays behind a header: read slice by slice, written whole or not at all."""

import contextlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes  # must be imported for NumPy to know a bfloat16, which safetensors asks it for
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

__all__ = ["Header", "Parts", "SafetensorError", "assemble", "header", "read", "write"]

DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "I64": np.dtype(np.int64), "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16), "I8": np.dtype(np.int8), "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip


class Array(NamedTuple):
    """dtype: NumPy's; or the file's name of one that NumPy does not have."""

    shape: tuple[int, ...]
    dtype: Any


class Header(NamedTuple):
    arrays: dict[str, Array]
    metadata: dict[str, str]


def header(path: pathlib.Path) -> Header:
    """What the file holds. Raises OSError or SafetensorError where it cannot be read."""
    with safe_open(path, framework="np") as file:
        arrays = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return Header(
            {k: Array(tuple(x.get_shape()), DTYPES.get(x.get_dtype(), x.get_dtype())) for k, x in arrays.items()},
            file.metadata() or {},
        )


def read(path: pathlib.Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Arrays with the dtypes and shardings of `wanted`; of the file, only what this process's devices hold is read."""
    with safe_open(path, framework="np") as file:

        def place(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
            stored = file.get_slice(name)
            part = lambda index: np.asarray(stored[index or ...]).astype(like.dtype)
            return jax.make_array_from_callback(like.shape, like.sharding, part)

        return {name: place(name, like) for name, like in wanted.items()}


class Parts(NamedTuple):
    """An array put together: one tensor, from the offset on along its last dim; or one of each name, stacked."""

    names: tuple[str, ...]
    stacked: bool = False
    offset: int = 0


def assemble(path: pathlib.Path, wanted: Mapping[str, tuple[jax.ShapeDtypeStruct, Parts]]) -> dict[str, jax.Array]:
    """As `read`, of arrays that are put together; rows that the file has not are zeros."""
    with safe_open(path, framework="np") as file:

        def cut(name: str, index: list[slice], offset: int) -> np.ndarray:
            stored = file.get_slice(name)
            rows = stored.get_shape()[0]
            *first, last = index
            inside = [*first, slice(last.start + offset, last.stop + offset)]
            there = inside[0].start < rows
            inside[0] = slice(inside[0].start, min(inside[0].stop, rows)) if there else slice(0, 0)
            found = np.asarray(stored[tuple(inside)])
            missing = index[0].stop - index[0].start - len(found)
            return np.pad(found, [(0, missing)] + [(0, 0)] * (found.ndim - 1)) if missing else found

        def place(like: jax.ShapeDtypeStruct, parts: Parts) -> jax.Array:
            def part(index: tuple[slice, ...] | None) -> np.ndarray:
                whole = [slice(*own.indices(size)[:2]) for own, size in zip(index or (), like.shape)]
                if not parts.stacked:
                    return cut(parts.names[0], whole, parts.offset).astype(like.dtype)
                names = parts.names[whole[0]]
                return np.stack([cut(name, whole[1:], parts.offset) for name in names]).astype(like.dtype)

            return jax.make_array_from_callback(like.shape, like.sharding, part)

        return {name: place(*how) for name, how in wanted.items()}


def write(path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Under another name first, then renamed. Raises OSError or SafetensorError, and leaves nothing then."""
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        save_file({name: np.asarray(x, order="C") for name, x in arrays.items()}, new, dict(metadata))
        with new.open("rb") as file:
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
