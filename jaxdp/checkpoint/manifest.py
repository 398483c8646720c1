"""A manifest says that a checkpoint is whole: every file of it with its size and SHA-256, and what was saved with it.

It is written last, under another name, and renamed in: a directory without one is no checkpoint. It carries a digest of
itself, so that a flipped bit in it is seen too.
"""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxdp.errors import UsageError

NAME = "manifest.json"
FORMAT = 1
Files = dict[str, tuple[int, str]]  # relative path to (bytes, SHA-256)


class Damaged(ValueError):
    """A checkpoint that is not what was saved; the text says which file, and how it differs."""


def list_files(directory: pathlib.Path) -> list[str]:
    """The relative paths of all files under `directory`, sorted, without the manifest."""
    found = (p for p in directory.rglob("*") if p.is_file())
    return sorted(str(p.relative_to(directory)) for p in found if p.name.split(".tmp")[0] != NAME)


def digest(file: pathlib.Path, patience: float = 0.0) -> tuple[int, str]:
    """(bytes, SHA-256) of a file; patience: seconds to wait for it to show up, on a network file system that lags."""
    deadline = time.monotonic() + patience
    while True:
        try:
            with open(file, "rb", opener=_open) as f:
                return os.fstat(f.fileno()).st_size, hashlib.file_digest(f, "sha256").hexdigest()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def digests(directory: pathlib.Path, names: Sequence[str], patience: float = 10.0) -> Files:
    return {name: digest(directory / name, patience) for name in names}


def flush(directory: pathlib.Path, names: Collection[str]) -> None:
    """Files to the disk, then their directories: before a manifest says that they are there."""
    for path in [*(directory / name for name in names), *sorted({(directory / name).parent for name in names})]:
        _flush(path)


def write(directory: pathlib.Path, files: Mapping[str, Sequence[Any]], meta: Mapping[str, Any]) -> None:
    """Renames the manifest in, durably; `files` are flushed."""
    body = {"format": FORMAT, "files": {k: list(v) for k, v in sorted(files.items())}, "meta": dict(meta)}
    new = directory / f"{NAME}.tmp{os.getpid()}"
    try:
        with new.open("w") as f:
            f.write(json.dumps({"sha256": _own(body), **body}, indent=1) + "\n")
            f.flush()
            os.fsync(f.fileno())
        new.replace(directory / NAME)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    _flush(directory)
    _flush(directory.parent)


def read(directory: pathlib.Path) -> dict[str, Any]:
    """The manifest's `files` and `meta`.

    Raises Damaged where there is none, or not the one that was written; OSError where it cannot be read; UsageError
    where it is of a later version.
    """
    try:
        found = json.loads((directory / NAME).read_text())
        body = {k: v for k, v in found.items() if k != "sha256"}
        stated = found["sha256"]
    except FileNotFoundError:
        raise Damaged(f"it has no {NAME}: the save was not finished") from None
    except (ValueError, AttributeError, KeyError, TypeError, IsADirectoryError, RecursionError) as error:
        raise Damaged(f"its {NAME} cannot be read: {str(error) or type(error).__name__}") from None
    if stated != _own(body):
        raise Damaged(f"its {NAME} has changed since it was written")
    if body.get("format") != FORMAT:
        raise UsageError(
            f"run_dir: checkpoint {str(directory)!r} has format {body.get('format')!r}, and this jaxdp reads {FORMAT}; "
            "use the version that it was saved with"
        )
    if not isinstance(body.get("meta"), dict) or not isinstance(body.get("files"), dict):
        raise Damaged(f"its {NAME} has no files and meta")
    if not body["files"]:
        raise Damaged(f"its {NAME} lists no file")
    for name, entry in body["files"].items():
        if not isinstance(entry, list) or [*map(type, entry)] != [int, str]:
            raise Damaged(f"its {NAME} has no size and checksum of {name!r}")
        located(directory, name)
    return body


def located(directory: pathlib.Path, name: str) -> pathlib.Path:
    """Return the path of a file of a checkpoint. Raises Damaged for a name, or a link, that leads out of it."""
    path = directory / name
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # a link to itself, a name that no file can have
        if name.isprintable() and ".." not in path.parts and path.resolve().is_relative_to(directory.resolve()):
            return path
    why = "outside of the checkpoint" if name.isprintable() else "no name of a file"
    raise Damaged(f"its {NAME} names {name[:200]!r}, which is {why}")


def check(directory: pathlib.Path, files: Mapping[str, Sequence[Any]], patience: float = 0.0) -> None:
    """Raises Damaged with the first of `files` that is missing, or has another size or checksum.

    OSError where one cannot be read, which is no damage.
    """
    for name, (size, sha256) in files.items():
        try:
            found = digest(located(directory, name), patience)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise Damaged(f"{name}: {error.strerror or error}") from None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise Damaged(f"its {NAME} names {name[:80]!r}..., which is too long for a file") from None
        if found[0] != size:
            raise Damaged(f"{name} has {found[0]:,} bytes instead of {size:,}")
        if found[1] != sha256:
            raise Damaged(f"{name} has changed since it was written")


def _own(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _open(path: str, flags: int) -> int:
    """Open a file, or a pipe in its place, which would wait for a writer otherwise."""
    return os.open(path, flags | os.O_NONBLOCK)


def _flush(path: pathlib.Path) -> None:
    """To the disk, not only to the kernel."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
