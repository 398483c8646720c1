"""The manifest that makes a checkpoint complete: the size and SHA-256 of every file, and the
metadata of the save.

It is written last, under a temporary name, and renamed: a directory without a manifest is not a
checkpoint. It contains a digest of itself, which detects a flipped bit in the manifest too.
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
from jaxdp.run import rundir

NAME = "manifest.json"
FORMAT = 1
Meta = Mapping[str, Any]  # JSON that is stored with a state
Files = dict[str, tuple[int, str]]  # relative path to (bytes, SHA-256)


class Damaged(ValueError):
    """A checkpoint that differs from the one that was saved; the message names the file and the
    difference.
    """


def list_files(directory: pathlib.Path) -> list[str]:
    """List the relative paths of all files under `directory`, sorted, without the manifest."""
    # The entries of the folder, without `stat`.
    names = (
        os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names
    )
    return sorted(
        os.path.relpath(name, directory)
        for name in names
        if not os.path.basename(name).startswith(NAME)
    )


def digest(file: pathlib.Path, wait: float = 0.0) -> tuple[int, str]:
    """Return (bytes, SHA-256) of a file; wait: seconds to wait for it to appear on a slow network
    file system.
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            with open(file, "rb", opener=_open) as f:
                return os.fstat(f.fileno()).st_size, hashlib.file_digest(f, "sha256").hexdigest()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def digests(directory: pathlib.Path, names: Sequence[str]) -> Files:
    return {name: digest(directory / name, wait=10.0) for name in names}


def flush(directory: pathlib.Path, names: Collection[str]) -> None:
    """Flush files and their directories to disk, before the manifest lists them: each process some
    of them.
    """
    for path in [
        *(directory / name for name in names),
        *sorted({(directory / name).parent for name in names}),
    ]:
        rundir.flush(path)


def write(directory: pathlib.Path, files: Mapping[str, Sequence[Any]], meta: Meta) -> None:
    """Write the manifest durably, by a rename; `files` must be flushed already."""
    body = {
        "format": FORMAT,
        "files": {k: list(v) for k, v in sorted(files.items())},
        "meta": dict(meta),
    }
    with rundir.replaced(directory / NAME, durable=True) as new:
        new.write_text(
            json.dumps({"sha256": _body_sha256(body), **body}, indent=1) + "\n", encoding="utf-8"
        )
    rundir.flush(directory)
    rundir.flush(directory.parent)


def read(directory: pathlib.Path) -> dict[str, Any]:
    """Read the manifest's `files` and `meta`.

    Raises Damaged if there is none, or it has changed; OSError if it cannot be read; UsageError if
    its format is of another version.
    """
    try:
        content = json.loads((directory / NAME).read_text(encoding="utf-8"))
        body = {k: v for k, v in content.items() if k != "sha256"}
        sha256 = content["sha256"]
    except FileNotFoundError:
        raise Damaged(f"it has no {NAME}: the save was not finished") from None
    except (
        ValueError,
        AttributeError,
        KeyError,
        TypeError,
        IsADirectoryError,
        RecursionError,
    ) as error:
        raise Damaged(f"its {NAME} cannot be read: {str(error) or type(error).__name__}") from None
    if sha256 != _body_sha256(body):
        raise Damaged(f"its {NAME} has changed since it was written")
    if body.get("format") != FORMAT:
        raise UsageError(
            f"run_dir: checkpoint {str(directory)!r} has format {body.get('format')!r}, and this jaxdp reads {FORMAT}; "
            "use the version that it was saved with"
        )
    files = body.get("files")
    meta = body.get("meta")

    def is_entry(x):
        return isinstance(x, list) and [*map(type, x)] == [int, str]

    if not (
        isinstance(meta, dict)
        and isinstance(files, dict)
        and files
        and all(map(is_entry, files.values()))
    ):
        raise Damaged(f"its {NAME} does not list the sizes and checksums of its files, and meta")
    return body


def located(directory: pathlib.Path, name: str) -> pathlib.Path:
    """Return the path of a checkpoint's file. Raises Damaged for a name, or a link, that leads
    outside of it.

    It asks the file system about each folder of the path, so only the process that reads a file
    calls it."""
    path = directory / name
    with contextlib.suppress(
        OSError, RuntimeError, ValueError
    ):  # a link to itself, an impossible file name
        if (
            name.isprintable()
            and ".." not in pathlib.PurePath(name).parts
            and path.resolve().is_relative_to(directory.resolve())
        ):
            return path
    why = "outside of the checkpoint" if name.isprintable() else "not a file name"
    raise Damaged(f"its {NAME} names {name[:200]!r}, which is {why}")


def check(directory: pathlib.Path, files: Mapping[str, Sequence[Any]], wait: float = 0.0) -> None:
    """Raise Damaged for the first of `files` that is missing, or has another size or checksum.

    Raises OSError if a file cannot be read, which is not damage.
    """
    for name, (size, sha256) in files.items():
        try:
            actual = digest(located(directory, name), wait)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise Damaged(f"{name}: {error.strerror or error}") from None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise Damaged(
                f"its {NAME} names {name[:80]!r}..., which is too long for a file"
            ) from None
        if actual[0] != size:
            raise Damaged(f"{name} has {actual[0]:,} bytes instead of {size:,}")
        if actual[1] != sha256:
            raise Damaged(f"{name} has changed since it was written")


def problem(directory: pathlib.Path, rank: int = 0, size: int = 1, wait: float = 0.0) -> str:
    """Return why the manifest, or a file of this process's part of the checkpoint, fails `check`,
    or ''.
    """
    try:
        digest(directory / NAME, wait)  # waits for it
        check(directory, dict([*read(directory)["files"].items()][rank::size]), wait)
    except OSError as error:
        return unreadable(error)
    except Damaged as error:
        return str(error)
    return ""


def unreadable(error: OSError) -> str:
    return f"cannot read {error.filename!r}: {error.strerror}"


def _body_sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _open(path: str, flags: int) -> int:
    """Open a file without blocking: a pipe in its place would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)
