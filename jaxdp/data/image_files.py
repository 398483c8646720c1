"""The image files of a folder by split and class, and a count of what is passed over."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jaxdp.data.split_names import (
    abbreviated,
    choose_split,
    listed,
    named_splits,
    normalized,
    split_names,
)
from jaxdp.errors import UsageError

ENDINGS = {
    ".apng", ".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm",
    ".tga", ".tif", ".tiff", ".webp",
}  # fmt: skip
# What systems and archivers write beside the files of a user; names in lower case.
OF_SYSTEMS = {
    "__macosx",
    "@eadir",
    "$recycle.bin",
    "lost+found",
    "thumbs.db",
    "ehthumbs.db",
    "desktop.ini",
}
FIX = "set data.args.splits: {train: FOLDER, test: FOLDER}, or {} if the folders are classes"
LOOP = "link to a folder that is read already"

Images = dict[str, list[Path]]  # by class


def find_splits(
    top: Path, splits: Mapping[str, str | None] | None, passed: Counter[str]
) -> dict[str, Path]:
    """Return {split: its folder}; {} if the folders in `top` are classes.

    splits: the names of the folders, by default what they look like: a folder is a split by its
    name if it contains folders of images. Adds to `passed` the folders that are neither split.
    Raises UsageError."""
    beside = Counter[str]()
    children = {child.name: child for child in subfolders(top, beside)}
    if splits is None:
        chosen = guess_splits(top, children)
    else:
        chosen = named_splits(splits, children, str(top))
    if chosen:
        passed.update(beside)
        passed.update(f"folder {name!r}" for name in children.keys() - {*chosen.values()})
    return {split: children[name] for split, name in chosen.items()}


def guess_splits(top: Path, children: Mapping[str, Path]) -> dict[str, str]:
    """Return {split: the name of a folder}, {} if the folders are classes. Raises UsageError if
    this is not clear.
    """
    key = "data.args.root"
    names = {name: entry for name, entry in split_names(children).items() if entry.split}
    nested = {
        name: entry
        for name, entry in names.items()
        if any(map(contains_images, subfolders(children[name])))
    }
    flat = [name for name in names if name not in nested and contains_images(children[name])]
    if not nested:
        kinds = {names[name].split for name in flat}
        if len(kinds) > 1 or len(flat) == len(children) > 0:
            raise UsageError(
                f"{key}: {listed(flat)} in {str(top)!r} have images, but no folders of classes; {FIX}"
            )
        return {}
    fix = f"the folders in {str(top)!r} are {listed(children)}; {FIX}"
    candidates = {split: choose_split(nested, split, key, fix) for split in ("train", "test")}
    chosen = {split: name for split, name in candidates.items() if name is not None}
    others = [
        name
        for name, child in children.items()
        if name not in chosen.values() and contains_images(child)
    ]
    if len(chosen) < 2 and others:
        (name,) = chosen.values()
        raise UsageError(
            f"{key}: {name!r} looks like a split, but not {listed(others)} beside it; {fix}"
        )
    return chosen


def find_classes(folder: Path, passed: Counter[str]) -> tuple[Images, str]:
    """Return ({class: its images at any depth, in the order of their paths}, an error that names
    the classes without an image, whose absence would change labels, or ""). The names and the order
    do not depend on the Unicode form of names. Raises UsageError."""
    by_class: Images = {}
    empty = list[str]()
    for child in subfolders(folder, passed):
        name, reasons = normalized(child.name), Counter[str]()
        if name in by_class:
            raise UsageError(
                f"data.args.root: {str(folder)!r} has two folders {name!r}, whose names differ only in their Unicode "
                "form; merge them"
            )
        by_class[name] = sorted(walk(child, reasons), key=path_key)
        passed.update(reasons)
        if not by_class[name]:
            empty.append(f"{name!r} ({counted(reasons) or 'empty'})")
    problem = (
        f"data.args.root: no image in {abbreviated(empty)} of the classes in {str(folder)!r}; an image "
        f"ends in {', '.join(sorted(ENDINGS))}; add or rename some, or remove what is no class"
    )
    images = {name: paths for name, paths in by_class.items() if paths}
    return images, problem if empty else ""


def walk(folder: Path, passed: Counter[str]) -> Iterator[Path]:
    """Yield the images in a folder at any depth, also in linked folders, each folder once; count
    the other files.

    Links are followed after all real folders, so that a link inside the folder never replaces what
    it leads to."""
    visited, pending, links = ancestors(folder), [folder], list[Path]()
    while pending or links:
        current = pending.pop() if pending else links.pop(0)
        if identity(current) in visited:
            passed[LOOP] += 1
            continue
        visited.add(identity(current))
        for path, kind in entries(current):
            if kind == "folder":
                (links if path.is_symlink() else pending).append(path)
            elif kind == "image":
                yield path
            else:
                passed[kind] += 1
        links.sort(key=path_key)


def subfolders(folder: Path, passed: Counter[str] | None = None) -> list[Path]:
    """Return the folders in a folder in the order of their names, but no link back; count its other
    entries.
    """
    folders, above = [], ancestors(folder) | {identity(folder)}
    for path, kind in entries(folder):
        if kind == "folder" and identity(path) not in above:
            folders.append(path)
        elif passed is not None:
            names = {"folder": LOOP, "image": "image outside of the classes"}
            passed[names.get(kind, kind)] += 1
    return sorted(folders, key=path_key)


def contains_images(folder: Path) -> bool:
    """Return whether there is an image in a folder, at any depth."""
    return any(walk(folder, Counter()))


def kind_of(entry: os.DirEntry[str]) -> str:
    """Return "folder", "image", or in words what else an entry of a folder is. Hidden entries are
    never read.
    """
    kind = kind_of_name(entry.name)
    if kind == "hidden":
        return kind
    try:
        if entry.is_dir():
            return "folder"
        regular = entry.is_file()
    except OSError:  # a link to itself
        regular = False
    if not regular:
        return "broken link" if entry.is_symlink() else "neither a file nor a folder"
    return kind


def kind_of_name(name: str) -> str:
    """Return what a file is by its name: "hidden", "image", or its ending."""
    if name.startswith(".") or name.lower() in OF_SYSTEMS:
        return "hidden"
    ending = Path(name).suffix.lower()
    return "image" if ending in ENDINGS else ending or "without an ending"


def entries(folder: Path) -> list[tuple[Path, str]]:
    """Return the path of each entry of a folder, and its `kind_of`. Raises UsageError."""
    try:
        with os.scandir(folder) as scanned:
            return [(Path(entry.path), kind_of(entry)) for entry in scanned]
    except OSError as error:
        raise UsageError(
            f"data.args.root: cannot read the folder {str(folder)!r}: {error.strerror}"
        ) from None


def identity(folder: Path) -> tuple[int, int]:
    """Return the same numbers for all paths of a folder."""
    status = folder.stat()
    return status.st_dev, status.st_ino


def ancestors(folder: Path) -> set[tuple[int, int]]:
    """Return the identities of the folders that a folder is in, by its path and by that without
    links.
    """
    return {identity(path) for path in (*folder.absolute().parents, *folder.resolve().parents)}


def path_key(path: Path) -> tuple[str, ...]:
    """Return a key that sorts paths in an order that does not depend on the Unicode form of their
    names.
    """
    return tuple(map(normalized, path.parts))


def counted(passed: Counter[str]) -> str:
    """Return in words what was passed over, the most frequent first."""
    kinds = sorted(passed.items(), key=lambda item: (-item[1], item[0]))
    return abbreviated([f"{count:,} {what}" for what, count in kinds], "other kinds")


def describe(names: Sequence[str], counts: Sequence[int], passed: Counter[str]) -> str:
    """Return in a line how many images there are of which class, and what was passed over."""
    classes = abbreviated([f"{name} {count:,}" for name, count in zip(names, counts)])
    text = f"{sum(counts):,} images in {len(names):,} class{'es' * (len(names) > 1)}: {classes}"
    return text + f"; ignored: {counted(passed)}" * bool(passed)
