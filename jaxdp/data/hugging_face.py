"""Data sets saved to disk by Hugging Face's `datasets`, read by column."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxdp.data.dataset import EMPTY, Batch, Examples, check_labels, check_split, fits_int32
from jaxdp.data.split_names import choose_split, listed, named_splits, split_names
from jaxdp.errors import UsageError, import_optional, one_line

KEYS = ("inputs", "labels")


class HuggingFace(Examples):
    """A data set that reads the rows of a folder written by `save_to_disk`.

    path: the folder of one data set, or of several by split, in any spelling (validation serves as
    test); splits: {train: NAME, test: NAME} names them instead. A folder of one data set has no
    test split: set eval.data to another. columns: {key of an example: column}, e.g. `{inputs:
    image, labels: label}`; by default the columns named inputs and labels. int64 becomes int32 if
    the values fit. `classes` is that of the labels' column if it is a ClassLabel. Needs the package
    `datasets`. Raises UsageError with the name of a missing column, or of a row without numbers of
    the first row's shape."""

    def __init__(
        self,
        path: str,
        split: str = "train",
        columns: Mapping[str, str] | None = None,
        splits: Mapping[str, str] | None = None,
    ):
        check_split(split)
        datasets = import_optional("datasets", "data.target: HuggingFace", "datasets")
        folder, title, names = Path(path).expanduser(), repr(path), saved_splits(path)
        if names:
            name = choose_set(path, names, split, splits)
            if name is None:
                raise UsageError(
                    f"data.args.path: {path!r} has no split {split!r}, only {', '.join(names)}"
                )
            others = [other for other in names if other != name]
            self.inventory = f"split {name}" + f"; others: {', '.join(others)}" * bool(others)
            folder, title = folder / name, f"the split {name!r} of {path!r}"
        try:
            loaded = datasets.load_from_disk(str(folder))
            size = len(loaded)
        except IndexError:  # there is no file of rows
            size = 0
        except (ValueError, OSError) as error:
            raise UsageError(
                f"data.args.path: cannot load {path!r} ({one_line(error)}); give a folder that save_to_disk wrote"
            ) from None
        if not size:
            raise UsageError(f"{EMPTY}; {title} has no rows")
        self.columns = dict(columns or {key: key for key in KEYS if key in loaded.column_names})
        for key, column in self.columns.items() or [("inputs", "inputs")]:
            if column not in loaded.column_names:
                raise UsageError(
                    f"data.args.columns.{key}: no column {column!r}; it is one of {', '.join(loaded.column_names)}"
                )
        if label := self.columns.get("labels"):
            labels = loaded.select_columns(label).with_format("numpy")
            check_labels(lambda rows: labels[rows.tolist()][label], size, f"data: {title}")
        super().__init__(
            loaded.select_columns([*dict.fromkeys(self.columns.values())]).with_format("numpy")
        )
        feature = loaded.features.get(label)
        if isinstance(feature, datasets.ClassLabel):
            self.classes, self.class_names = feature.num_classes, feature.names
        if "inputs" in self.first:
            self.input_shape = self.first["inputs"].shape

    @staticmethod
    def has_split(args: dict) -> bool:
        path, splits = args["path"], args.get("splits")
        return choose_set(path, saved_splits(path), "test", splits) is not None

    def read(self, indices: np.ndarray) -> Batch:
        rows = self._rows(indices.tolist()) if len(indices) else {}
        for key, value in rows.items():
            first = self.first[key]
            if value.shape[1:] != first.shape or value.dtype != first.dtype:
                rows = {}
                break
        return rows or super().read(indices)  # one by one, to name the row that differs

    def _example(self, index: int) -> dict[str, np.ndarray]:
        return {key: value[0] for key, value in self._rows([index]).items()}

    def _rows(self, indices: list[int]) -> Batch:
        rows, batch = self.source[indices], {}
        for key, column in self.columns.items():
            value = np.asarray(rows[column])
            if value.dtype.kind not in "biufO" and value.dtype.name != "bfloat16":
                raise UsageError(
                    f"data.args.columns: {column!r} has {value.dtype}, not numbers; encode it with `map` first"
                )
            is_narrow = key not in self.wide and fits_int32(value)
            batch[key] = value.astype(np.int32) if is_narrow else value
        return batch


def saved_splits(path: str) -> list[str]:
    """Return the names of the data sets in a folder; none if it is one data set, or cannot be read."""
    file = Path(path).expanduser() / "dataset_dict.json"
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))["splits"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def choose_set(
    path: str, names: Sequence[str], split: str, splits: Mapping[str, str] | None
) -> str | None:
    """Return the name of the data set of a split. splits: the argument of `HuggingFace`. Raises
    UsageError.
    """
    if splits is not None:
        return named_splits(splits, names, path).get(split)
    fix = f"the splits of {path!r} are {listed(names)}; choose with data.args.splits: {{train: NAME, test: NAME}}"
    return choose_split(split_names(names), split, "data.args.splits", fix)
