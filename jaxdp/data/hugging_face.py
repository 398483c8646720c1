"""Data sets saved to disk by Hugging Face's `datasets`, read by column."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxdp.data.base import Examples, check_split, fits_int32
from jaxdp.errors import UsageError, import_optional, one_line

SPLITS = {"train": ("train",), "test": ("test", "validation", "valid", "val")}
KEYS = ("inputs", "labels")


class HuggingFace(Examples):
    """A data set that reads the rows of a folder written by `save_to_disk`.

    path: the folder of one data set, or of several by split (validation serves as test). A folder of one data set has
    no test split: set eval.data to another. columns: {key of an example: column}, e.g. `{inputs: image, labels:
    label}`; by default the columns named inputs and labels. int64 becomes int32 if the values fit. `classes` is that of
    the labels' column if it is a ClassLabel. Needs the package `datasets`. Raises UsageError with the name of a missing
    column, or of a row without numbers of the first row's shape.
    """

    def __init__(self, path: str, split: str = "train", columns: Mapping[str, str] | None = None):
        check_split(split)
        datasets = import_optional("datasets", "data.target: HuggingFace", "datasets")
        try:
            loaded = datasets.load_from_disk(str(Path(path).expanduser()))
        except (FileNotFoundError, ValueError, OSError) as error:
            raise UsageError(
                f"data.args.path: cannot load {path!r} ({one_line(error)}); give a folder that save_to_disk wrote"
            ) from None
        if isinstance(loaded, datasets.DatasetDict):
            name = next((name for name in SPLITS[split] if name in loaded), None)
            if name is None:
                raise UsageError(f"data.args.path: {path!r} has no split {split!r}, only {', '.join(loaded)}")
            loaded = loaded[name]
        self.columns = dict(columns or {key: key for key in KEYS if key in loaded.column_names})
        for key, column in self.columns.items() or [("inputs", "inputs")]:
            if column not in loaded.column_names:
                raise UsageError(
                    f"data.args.columns.{key}: no column {column!r}; it is one of {', '.join(loaded.column_names)}"
                )
        feature = loaded.features[self.columns["labels"]] if "labels" in self.columns else None
        super().__init__(loaded.select_columns([*dict.fromkeys(self.columns.values())]).with_format("numpy"))
        if isinstance(feature, datasets.ClassLabel):
            self.classes, self.class_names = feature.num_classes, feature.names
        if "inputs" in self.spec:
            self.input_shape = self.spec["inputs"][0]

    @staticmethod
    def has_split(args: dict) -> bool:
        return any((Path(args["path"]).expanduser() / name).is_dir() for name in SPLITS["test"])

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rows = self._rows(indices.tolist()) if len(indices) else {}
        alike = rows and all((value.shape[1:], value.dtype) == self.spec[key] for key, value in rows.items())
        return rows if alike else super().read(indices)  # one by one, to name the row that differs

    def _example(self, index: int) -> dict[str, np.ndarray]:
        return {key: value[0] for key, value in self._rows([index]).items()}

    def _rows(self, indices: list[int]) -> dict[str, np.ndarray]:
        rows = self.source[indices]
        columns = self.columns.items()
        return {key: _narrow(np.asarray(rows[column]), column, key in self.wide) for key, column in columns}


def _narrow(value: np.ndarray, column: str, wide: bool) -> np.ndarray:
    if value.dtype.kind not in "biufO" and value.dtype.name != "bfloat16":
        raise UsageError(f"data.args.columns: {column!r} has {value.dtype}, not numbers; encode it with `map` first")
    return value.astype(np.int32) if not wide and fits_int32(value) else value
