"""Images whose classes are listed: in a CSV with the path and the class of each, or by the names in an
archive."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxdp.data.dataset import Part, array_part, file_part
from jaxdp.data.image_files import Images, counted, path_key, walk
from jaxdp.data.image_folder import READ, ImageFolder
from jaxdp.data.split_names import (
    choose_split,
    listed,
    named_splits,
    normalized,
    split_names,
)
from jaxdp.errors import UsageError, check_one_of
from jaxdp.tables.rows import KEY, read_frame, require

FIX = "set data.args.splits: {train: NAME, test: NAME}, or {} if there are none"


class Row(NamedTuple):
    """An image, the name of its class, and that of its split."""

    image: Any
    label: str
    split: str


class Listed(ImageFolder):
    """Images that a subclass lists.

    list_images(root, splits, passed) -> list[Row]: those of all splits; the arguments are those of `find`.
    numbers: whether classes are sorted as numbers, if all of them are.
    """

    list_images: Any
    numbers = True

    def find(
        self, root: str, split: str, splits: Mapping[str, str] | None, passed: Counter[str]
    ) -> tuple[Images, Images, str]:
        rows = self.list_images(root, splits, passed)
        numeric = self.numbers and all(row.label.isdecimal() for row in rows)

        def order(row):
            return int(row.label) if numeric else 0, row.label, path_key(row.image)

        names = split_names(dict.fromkeys(row.split for row in rows))
        if splits and rows:
            chosen: Any = named_splits(splits, names, root)
        else:
            chosen = {x: choose_split(names, x, self.key, FIX) for x in ("train", "test")}
        roles = {name: role for role, name in chosen.items()}
        images: dict[str, Images] = {}
        for row in sorted(rows, key=order):
            if row.split in roles:
                by_class = images.setdefault(roles[row.split], {})
                by_class.setdefault(row.label, []).append(row.image)
            else:
                passed[f"image of {row.split!r}"] += 1
        if not {split, "train"} & images.keys():
            raise UsageError(
                f"{self.key}: {root!r} has no image for {split}, but {counted(passed) or 'nothing'}; {FIX}"
            )
        training = images.get("train") or images["test"]
        return training, images.get(split, training), split if "test" in images else ""

    def parts(self) -> dict[str, Part]:
        read = len(self.files) <= READ
        return {f"{i} {path.name}": file_part(path, read) for i, path in enumerate(self.files)} | {
            "labels": array_part(self.labels)
        }


class ImageTable(Listed):
    """Images of a table: "inputs" uint8 [size, size, 3], "labels" int32, the index in `class_names`.

    table: a CSV or Parquet file, or a DataFrame; or {train: TABLE, test: TABLE}. columns: {path, label,
    split: the name of a column}, by default path and label. Paths are relative to `folder`, by default
    that of the table, and `ending`, such as .jpg, is added to them. Classes are sorted, as numbers if
    all are. The values of the split's column are known by their names (train, val, ...), or named by
    splits: {train: VALUE, test: VALUE}; without it, about a `test_fraction`, selected by a hash of the
    path, is the test split. args: the other arguments of `ImageFolder`.

    `inventory` counts the images of the folder that no table has and, with on_error: skip, the rows
    whose image is missing. Raises UsageError for these, a column that is missing, a row without a label,
    and an image of two rows.
    """

    def __init__(
        self,
        table: Any,
        columns: Mapping[str, str] | None = None,
        folder: str | None = None,
        ending: str = "",
        split: str = "train",
        **args: Any,
    ):
        self.columns = {"path": "path", "label": "label", **(columns or {})}
        for key in self.columns:
            check_one_of(f"{KEY}.columns", key, ("path", "label", "split"))
        self.tables = table if isinstance(table, Mapping) else {"train": table}
        first = next(iter(self.tables.values()), None)
        root = folder or (os.path.dirname(first) if isinstance(first, str | Path) else "")
        self.ending = ending
        super().__init__(os.path.expanduser(root) or ".", split, **args)

    def list_images(self, root: str, splits: Any, passed: Counter[str]) -> list[Row]:
        if not os.path.isdir(root):
            raise UsageError(f"{KEY}.folder: no folder {root!r}; paths are relative to it")
        rows: dict[str, Row] = {}
        stored = {normalized(os.path.normpath(x)): x for x in walk(Path(root), Counter())}
        for split, table in self.tables.items():
            # 007 is no number, and None may be a class.
            frame = read_frame(table, dtype=str, keep_default_na=False).fillna("").astype(str)
            require(frame, "columns", self.columns.values())
            text = {key: frame[name] for key, name in self.columns.items()}
            named = text.get("split", [split] * len(frame))
            for name, label, part in zip(text["path"], text["label"], named):
                path = normalized(os.path.normpath(os.path.join(root, name + self.ending)))
                if path in rows or not label:
                    problem = "two rows; remove one" if path in rows else "no label; give it one"
                    raise UsageError(f"{KEY}.table: {path!r} has {problem}")
                rows[path] = Row(stored.get(path, Path(path)), normalized(label), part)
        missing = {path for path in rows.keys() - stored if not rows[path].image.is_file()}
        if missing and self.on_error != "skip":
            raise UsageError(
                f"{KEY}.table: {len(missing):,} of {len(rows):,} images are missing: {listed(sorted(missing))}; add "
                f"them, set {KEY}.folder or {KEY}.ending, or leave them out by {KEY}.on_error: skip"
            )
        passed.update(["missing image"] * len(missing))
        passed.update(["image that no table has"] * len(stored.keys() - rows))
        return [row for path, row in rows.items() if path not in missing]
