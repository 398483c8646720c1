"""Reading of `.safetensors` files slice by slice, and writing them atomically."""

import contextlib
import itertools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxdp.errors import UsageError, one_line
from jaxdp.run import rundir

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


SUFFIX = ".safetensors"
SINGLE = "model.safetensors"
INDEX = ".safetensors.index.json"
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
PYTORCH = (".bin", ".pt", ".pth", ".ckpt")
CONVERT = "save its tensors with safetensors.torch.save_file, and give that file"
BEGINNINGS = {  # of files that are something else
    b"version https://git-lfs": "it is a pointer of Git LFS, not the file itself: run git lfs pull",
    b"PK\x03\x04": f"it is a file of PyTorch: {CONVERT}",
}


def is_folder(path: pathlib.Path) -> bool:
    """Return True for a folder of published weights, complete or not."""
    return path.is_dir() and any(file.name.endswith((SUFFIX, INDEX)) for file in path.iterdir())


def files_of(source: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of a source: the file itself, or those of a folder. Raises UsageError if one
    is missing.
    """
    if not source.is_dir():
        numbered = PART.fullmatch(source.name)
        if numbered and int(numbered["count"]) > 1:
            raise UsageError(
                f"init_from: {str(source)!r} is part {int(numbered['number'])} of {int(numbered['count'])}; give the "
                f"folder with all of them: {str(source.parent)!r}"
            )
        return [source]
    if (source / SINGLE).exists():
        return [source / SINGLE]
    indexes = sorted(source.glob(f"*{INDEX}"))
    if len(indexes) == 1:
        return present(source, sorted(set(weight_map(indexes[0]).values())), indexes[0].name)
    files = sorted(source.glob(f"*{SUFFIX}"))
    parts = [PART.fullmatch(file.name) for file in files]
    first = parts[0] if parts else None
    if first and all(part and part["stem"] == first["stem"] for part in parts):
        names = [
            f"{first['stem']}-{i + 1:0{len(first['number'])}d}-of-{first['count']}{SUFFIX}"
            for i in range(int(first["count"]))
        ]
        return present(source, names, files[0].name)
    if len(files) != 1 or indexes:
        several = ", ".join(file.name for file in indexes or files)
        raise UsageError(
            f"init_from: {str(source)!r} has several sets of weights ({several}); give one of the files"
        )
    return files


def present(folder: pathlib.Path, names: Sequence[str], by: str) -> list[pathlib.Path]:
    """Return the paths of the files. by: the file that names them. Raises UsageError for the first
    that is missing.
    """
    for name in names:
        if not (folder / name).is_file():
            raise UsageError(
                f"init_from: {str(folder)!r} has no {name!r}, which {by} names; download all parts"
            )
    return [folder / name for name in names]


def weight_map(index: pathlib.Path) -> dict[str, str]:
    """Return {tensor: the name of its file} of an index. Raises UsageError if it is none."""
    names = read_json(index).get("weight_map")
    if (
        isinstance(names, dict)
        and names
        and all(isinstance(x, str) and x == pathlib.Path(x).name for x in names.values())
    ):
        return names
    raise UsageError(
        f"init_from: {str(index)!r} has no weight_map of tensors to the names of files; download it again"
    )


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises UsageError for anything else."""
    try:
        content = json.loads(file.read_bytes())
        problem = "" if isinstance(content, dict) else f"it is a {type(content).__name__}"
    except (OSError, ValueError, RecursionError) as error:
        problem = reason(file, error)
    if problem:
        raise UsageError(
            f"init_from: {str(file)!r} is not a JSON mapping ({problem}); download it again"
        )
    return content


def open_all(source: pathlib.Path) -> Header:
    """Return the tensors of all files of a source, and the metadata of a single file.

    Raises UsageError for a file that is missing or unreadable, and for files that contradict each
    other."""
    files = files_of(source)
    tensors: dict[str, Array] = {}
    metadata: dict[str, str] = {}
    for file in files:
        try:
            opened = header(file)
        except (OSError, SafetensorError) as error:
            why = reason(file, error)
            raise UsageError(
                f"init_from: {str(file)!r} cannot be read as safetensors ({why}); give another"
            ) from None
        if repeated := sorted(opened.arrays.keys() & tensors.keys()):
            other = tensors[repeated[0]].parts[0].file.name
            raise UsageError(
                f"init_from: {str(source)!r} has {repeated[0]!r} in {other} and in {file.name}; keep one"
            )
        tensors |= opened.arrays
        metadata = opened.metadata if len(files) == 1 else {}
    if len(files) > 1:
        for index in source.glob(f"*{INDEX}"):
            check_index(index, tensors)
    return Header(tensors, metadata)


def check_index(index: pathlib.Path, tensors: dict[str, Array]) -> None:
    """Raise UsageError for a tensor that is not in the file that the index names."""
    for name, file in weight_map(index).items():
        if name not in tensors or tensors[name].parts[0].file.name != file:
            raise UsageError(
                f"init_from: {str(index)!r} names {name!r} in {file}, which lacks it; download all parts"
            )


def reason(file: pathlib.Path, error: Exception) -> str:
    """Return why a file cannot be read: what it is instead, or the error."""
    try:
        with file.open("rb") as opened:
            beginning = opened.read(64)
    except OSError:
        return one_line(error)
    if not beginning:
        return "it is empty"
    return next(
        (text for start, text in BEGINNINGS.items() if beginning.startswith(start)), one_line(error)
    )
