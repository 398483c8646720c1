"""Reading of `.safetensors` files slice by slice, and writing them atomically."""

import contextlib
import itertools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes  # noqa: F401  # registers bfloat16 with NumPy, as safetensors needs it
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxdp.run import rundir

__all__ = ["Array", "Header", "Part", "SafetensorError", "equal", "header", "read", "rows", "write"]

DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "C64": "complex64",
    }.items()
}


class Part(NamedTuple):
    """A part of an array: a tensor, or the one of three equal parts of it along its last dim that
    `third` numbers.

    transposed: the tensor is [out, in], the array [in, out]. file: the file that has the tensor.
    """

    tensor: str
    third: int | None = None
    transposed: bool = False
    file: pathlib.Path = pathlib.Path()


class Array(NamedTuple):
    """An array to read. dtype: a NumPy dtype, or the file's name of one that NumPy does not have.

    parts: one part, or the parts to stack along a new first dim. label: its name in messages.
    """

    shape: tuple[int, ...]
    dtype: Any
    parts: tuple[Part, ...]
    label: str
    stacked: bool = False


class Header(NamedTuple):
    arrays: dict[str, Array]
    metadata: dict[str, str]


def header(path: pathlib.Path) -> Header:
    """Read the file's header. Raises OSError or SafetensorError if it cannot be read."""
    with safe_open(path, framework="np") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        arrays = {
            k: Array(
                tuple(x.get_shape()),
                DTYPES.get(x.get_dtype(), x.get_dtype()),
                (Part(k, file=path),),
                k,
            )
            for k, x in tensors.items()
        }
        return Header(arrays, file.metadata() or {})


def read(
    arrays: Mapping[str, Array], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Read arrays with the shapes, dtypes and shardings of `wanted`; each process reads the slices
    of its devices.

    Rows that a tensor does not have are zeros.
    """
    with contextlib.ExitStack() as stack:
        files = {part.file for name in wanted for part in arrays[name].parts}
        opened = {file: stack.enter_context(safe_open(file, framework="np")) for file in files}

        def read_part(part, index):
            if part.transposed:
                return read_part(part._replace(transposed=False), index[::-1]).T
            stored = opened[part.file].get_slice(part.tensor)
            if not index:
                return np.asarray(stored[...])
            shape = stored.get_shape()
            if part.third is not None:
                first = part.third * (shape[-1] // 3)
                index = (*index[:-1], slice(index[-1].start + first, index[-1].stop + first))
            rows = slice(index[0].start, min(index[0].stop, shape[0]))
            rows = rows if rows.start < rows.stop else slice(0, 0)
            values = np.asarray(stored[(rows, *index[1:])])
            missing = index[0].stop - index[0].start - len(values)
            return (
                np.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1)) if missing else values
            )

        def load(array, like):
            def read_slice(index):
                slices = tuple(
                    slice(*dim.indices(size)[:2]) for dim, size in zip(index or (), like.shape)
                )
                if not array.stacked:
                    return read_part(array.parts[0], slices).astype(like.dtype)
                return np.stack(
                    [
                        read_part(part, slices[1:]).astype(like.dtype)
                        for part in array.parts[slices[0]]
                    ]
                )

            return jax.make_array_from_callback(like.shape, like.sharding, read_slice)

        return {name: load(arrays[name], like) for name, like in wanted.items()}


def rows(part: Part, number: int = 4096) -> Iterator[np.ndarray]:
    """Yield the values of a tensor, some rows at a time."""
    with safe_open(part.file, framework="np") as file:
        stored = file.get_slice(part.tensor)
        if not (shape := stored.get_shape()):
            yield np.asarray(stored[...])
            return
        for first in range(0, shape[0], number):
            yield np.asarray(stored[first : min(first + number, shape[0])])


def equal(one: Part, other: Part) -> bool:
    """Return whether two tensors have the same shape and values."""
    return all(np.array_equal(x, y) for x, y in itertools.zip_longest(rows(one), rows(other)))


def write(
    path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write a file atomically, by a rename. Raises OSError or SafetensorError, and leaves no file
    then.
    """
    with rundir.replaced(path, durable=True) as new:
        save_file(
            {name: np.asarray(x, order="C") for name, x in arrays.items()}, new, dict(metadata)
        )
