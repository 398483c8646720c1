"""Find everything in data that cannot be read, at once."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdp.data.dataset import PROBES, UNKNOWN, Dataset
from jaxdp.data.documents import LINES, pieces
from jaxdp.data.image_files import counted, describe, find_classes, find_splits
from jaxdp.data.image_folder import ImageFolder, decode, open_image
from jaxdp.errors import UsageError, one_line

TEXTS = (".txt", *LINES)
SIZE = 224  # of the decoded images, if no config sets it


class Finding(NamedTuple):
    """A line about data. problem: it is about something that cannot be read."""

    text: str
    problem: bool = True


def check_path(path: Path) -> Iterator[Finding]:
    """Yield the findings about a text file, a folder of text files, or a folder of images as
    `ImageFolder` reads it.
    """
    if path.is_file() and path.suffix.lower() in TEXTS:
        yield from check_text(path)
    elif not path.is_dir():
        problem = "is no text or folder" if path.exists() else "does not exist"
        raise UsageError(
            f"INPUT: {str(path)!r} {problem}; give a folder of images, {', '.join(TEXTS)}, or a .yaml config"
        )
    else:
        children = sorted(path.iterdir())
        texts = [child for child in children if child.suffix.lower() in TEXTS]
        if not texts or any(map(Path.is_dir, children)):  # images are in folders of classes
            yield from check_folder(path)
            return
        for text in texts:
            yield from check_text(text)


def check_folder(top: Path) -> Iterator[Finding]:
    """Yield the findings about a folder of images."""
    passed = Counter[str]()
    try:
        folders = find_splits(top, None, passed) or {"train": top}
    except UsageError as error:
        yield Finding(str(error))
        folders = {"train": top}
    if passed:
        yield Finding(f"{top}: ignored: {counted(passed)}", False)
    for split, folder in folders.items():
        passed = Counter[str]()
        by_class, problem = find_classes(folder, passed)
        if problem and split == "train":
            yield Finding(problem)
        files = [file for files in by_class.values() for file in files]
        if not files:
            yield Finding(f"{folder}: no folder of images in it")
            continue
        yield Finding(
            f"{folder}: {describe([*by_class], [*map(len, by_class.values())], passed)}", False
        )
        yield from check_images(files, SIZE, str(folder))


def check_images(files: Sequence[Path], size: int, name: str) -> Iterator[Finding]:
    """Yield a finding for each image that cannot be decoded, and one about the modes of the others.
    name: the set's.
    """

    def examine(path: Path) -> tuple[str, str]:
        """Return (what is wrong with an image, its mode)."""
        try:
            decode(path, size)
        except UsageError as error:
            return str(error).removeprefix("data: "), ""
        with open_image(path) as image:
            return (
                "",
                f"{image.mode}{' animated (its first frame is read)' * getattr(image, 'is_animated', False)}",
            )

    modes = Counter[str]()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for problem, mode in pool.map(examine, files):
            if problem:
                yield Finding(problem)
            else:
                modes[mode] += 1
    yield Finding(
        f"{name}: {sum(modes.values()):,} of {len(files):,} images can be read: {counted(modes)}",
        False,
    )


def check_text(path: Path) -> Iterator[Finding]:
    """Yield the findings about a text file: all lines of one of documents that cannot be read, else
    the first error.
    """
    lines = list[str]()
    try:
        # U+0000 ends a document for the tokenizers `byte` and `char`.
        for _ in pieces(path, key="text", reserved="\0", problems=lines):
            pass
        problems = [f"{str(path)!r}{line}" for line in lines]
        if not path.stat().st_size:
            problems = [f"{str(path)!r} is empty"]
    except (UsageError, OSError) as error:
        problems = [one_line(error)]
    yield from map(Finding, problems)
    yield Finding(
        f"{path}: {'all of it can' if not problems else 'not all of it can'} be read", False
    )


def check_dataset(dataset: Dataset, name: str) -> Iterator[Finding]:
    """Yield a finding for each example that cannot be read. name: of the set."""
    if getattr(dataset, "inventory", ""):
        yield Finding(f"{name}: {dataset.inventory}", False)  # type: ignore[attr-defined]
    if isinstance(dataset, ImageFolder):
        yield from check_images(dataset.files, dataset.size, name)
        return
    if (size := len(dataset)) >= UNKNOWN:
        yield Finding(f"{name}: not checked: a stream of unknown length", False)
        return
    count = 0
    for first in range(0, size, PROBES):
        rows = np.arange(first, min(first + PROBES, size), dtype=np.int64)
        try:
            dataset.read(rows)
        except Exception:
            for index in rows:
                try:
                    dataset.read(np.array([index]))
                except Exception as error:
                    count += 1
                    yield Finding(
                        f"{name}: example {index}: {type(error).__name__}: {one_line(error)}"
                    )
    yield Finding(f"{name}: {size - count:,} of {size:,} examples can be read", False)
