"""The folders of checkpoints: checkpoints/STEP, and the names of failed, damaged or removed ones."""

import contextlib
import pathlib
import shutil
from collections.abc import Collection, Iterable
from typing import Any

from jaxdp.checkpoint import manifest

MARK = "orbax.checkpoint"  # Orbax writes this file into its folders
TEMPORARY = ".orbax-checkpoint-tmp"
_REMOVED = ".pruned"


def numbered(directory: pathlib.Path) -> list[int]:
    """Return the steps that have a folder, in order."""
    entries = directory.iterdir() if directory.is_dir() else iter(())
    return sorted(
        int(p.name)
        for p in entries
        if p.name.isdecimal() and str(int(p.name)) == p.name and p.is_dir()
    )


def complete(directory: pathlib.Path) -> list[int]:
    """Return the steps whose checkpoint has a manifest, in order."""
    return [
        step for step in numbered(directory) if (directory / str(step) / manifest.NAME).is_file()
    ]


def newest(
    directory: pathlib.Path, refused: Collection[int] = (), only: int | None = None
) -> tuple[int, dict[str, Any], str]:
    """Return (the last complete step that is not refused or 0, its manifest, the problem with that
    or '').

    only: the step to look for, instead of the last one.
    """
    step = max(
        (s for s in complete(directory) if s not in refused and only in (None, s)), default=0
    )
    try:
        return step, manifest.read(directory / str(step)) if step else {}, ""
    except manifest.Damaged as error:
        return step, {}, str(error)
    except OSError as error:
        return step, {}, manifest.unreadable(error)


def has(directory: pathlib.Path, step: int, offset: int | None) -> bool:
    """Return whether the state after update `step` is saved already.

    offset: the number of batches skipped before, without which an update has another state.
    """
    with contextlib.suppress(manifest.Damaged, OSError):
        return bool(manifest.read(directory / str(step))["meta"].get("offset") == offset)
    return False


def unfinished(directory: pathlib.Path) -> list[int]:
    """Return the steps whose save was interrupted."""
    steps = set(numbered(directory)) - set(complete(directory))
    return sorted(step for step in steps if (directory / str(step) / MARK).is_file())


def clean(directory: pathlib.Path, step: int | None = None) -> None:
    """Remove the remains of failed saves, or only those of `step`: the next save needs the space."""
    name = "*" if step is None else str(step)
    for path in [*directory.glob(f"{name}{TEMPORARY}*"), *directory.glob(f"{name}{_REMOVED}")]:
        shutil.rmtree(path, ignore_errors=True)
    if step is not None and not (directory / str(step) / manifest.NAME).exists():
        shutil.rmtree(directory / str(step), ignore_errors=True)


def temporary(directory: pathlib.Path, step: int, attempt: str) -> pathlib.Path:
    """Return the folder that Orbax saves into.

    attempt: another text for each save, since a process that was lost may still write into the
    folder of a save that a lost process has interrupted.
    """
    return directory / f"{step}{TEMPORARY}-{attempt}"


def publish(directory: pathlib.Path, step: int, attempt: str) -> None:
    """Give a folder that Orbax has saved the name of its step; a folder of that name is removed."""
    remove(directory, [step])
    temporary(directory, step, attempt).rename(directory / str(step))


def remove(directory: pathlib.Path, steps: Iterable[int]) -> None:
    """Remove checkpoints, renaming each first, so that a partly removed one is not taken for a
    checkpoint.
    """
    for step in steps:
        with contextlib.suppress(OSError):
            renamed = (directory / str(step)).rename(directory / f"{step}{_REMOVED}")
            shutil.rmtree(renamed, ignore_errors=True)


def set_aside(directory: pathlib.Path, step: int, word: str) -> pathlib.Path:
    """Rename checkpoint STEP to STEP.word, or STEP.word-2 and so on. Raises OSError."""
    names = (f"{step}.{word}{f'-{i}' if i > 1 else ''}" for i in range(1, 10**6))
    path = next(directory / name for name in names if not (directory / name).exists())
    (directory / str(step)).rename(path)
    return path
