"""Images whose classes are listed: in a table, or by the names in an archive."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxdp.data.dataset import Part, array_part, file_part
from jaxdp.data.image_files import Images, counted, path_key
from jaxdp.data.image_folder import READ, ImageFolder
from jaxdp.data.split_names import choose_split, named_splits, split_names
from jaxdp.errors import UsageError

KEY = "data.args.root"
FIX = "set data.args.splits: {train: NAME, test: NAME}, or {} if there are none"


class Row(NamedTuple):
    """An image, the name of its class, and that of its split."""

    image: Any
    label: str
    split: str


class Listed(ImageFolder):
    """Images that a subclass lists.

    list_images(root, splits, passed) -> list[Row]: those of all splits; the arguments are those of `find`.
    sources: the files that have them, if they are not files themselves. numbers: whether classes are
    sorted as numbers, if all of them are.
    """

    list_images: Callable[..., list[Row]]
    sources: list[Path] = []
    numbers = True

    def find(
        self, root: str, split: str, splits: Mapping[str, str] | None, passed: Counter[str]
    ) -> tuple[Images, Images, str]:
        rows = self.list_images(root, splits, passed)
        numeric = self.numbers and all(row.label.isdecimal() for row in rows)

        def order(row):
            return int(row.label) if numeric else 0, row.label, path_key(row.image)

        names = split_names({row.split for row in rows})
        if splits is None:
            chosen: Any = {x: choose_split(names, x, KEY, FIX) for x in ("train", "test")}
        else:
            chosen = named_splits(splits, names, root)
        roles = (
            {name: role for role, name in chosen.items()}
            if chosen
            else dict.fromkeys(names, "train")
        )
        images: dict[str, Images] = {}
        for row in sorted(rows, key=order):
            if row.split in roles:
                by_class = images.setdefault(roles[row.split], {})
                by_class.setdefault(row.label, []).append(row.image)
            else:
                passed[f"image of {row.split!r}"] += 1
        if not {split, "train"} & images.keys():
            raise UsageError(
                f"{KEY}: {root!r} has no image for {split}, but {counted(passed) or 'nothing'}; {FIX}"
            )
        training = images.get("train") or images["test"]
        return training, images.get(split, training), split if "test" in images else ""

    def parts(self) -> dict[str, Part]:
        files = self.sources or self.files
        read = len(files) <= READ
        parts = {f"{i} {path.name}": file_part(path, read) for i, path in enumerate(files)}
        return {**parts, "labels": array_part(self.labels)}
