"""The `.safetensors` files of a source: one file, or all parts of a published folder; nothing of it
may be missing.
"""

import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from jaxdp.checkpoint import safetensors
from jaxdp.errors import UsageError, one_line

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


def open_all(source: pathlib.Path) -> safetensors.Header:
    """Return the tensors of all files of a source, and the metadata of a single file.

    Raises UsageError for a file that is missing or unreadable, and for files that contradict each
    other."""
    files = files_of(source)
    tensors: dict[str, safetensors.Array] = {}
    metadata: dict[str, str] = {}
    for file in files:
        try:
            header = safetensors.header(file)
        except (OSError, safetensors.SafetensorError) as error:
            why = reason(file, error)
            raise UsageError(
                f"init_from: {str(file)!r} cannot be read as safetensors ({why}); give another"
            ) from None
        if repeated := sorted(header.arrays.keys() & tensors.keys()):
            other = tensors[repeated[0]].parts[0].file.name
            raise UsageError(
                f"init_from: {str(source)!r} has {repeated[0]!r} in {other} and in {file.name}; keep one"
            )
        tensors |= header.arrays
        metadata = header.metadata if len(files) == 1 else {}
    if len(files) > 1:
        for index in source.glob(f"*{INDEX}"):
            check_index(index, tensors)
    return safetensors.Header(tensors, metadata)


def check_index(index: pathlib.Path, tensors: dict[str, safetensors.Array]) -> None:
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
