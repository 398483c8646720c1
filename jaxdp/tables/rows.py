"""Rows of a table: a CSV or Parquet file, or a DataFrame, read by pandas."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.data.dataset import Arrays, check_split
from jaxdp.data.split_names import abbreviated
from jaxdp.errors import UsageError, import_optional, one_line

KEY = "data.args"


class Table(Arrays):
    """Rows of a table as examples: "inputs" float32 [input], and "labels", of one column.

    table: a CSV or Parquet file, or a DataFrame. label: the column to predict. Texts and whole numbers
    are classes: labels are int32 [], the index in `class_names`, which are sorted. Fractions are labels
    of a regression, float32 [1]. columns: the other columns to use, by default all. Numbers are one input;
    a text is one for each value that the training rows have (one-hot, sorted; of another value, all are
    0). fill: in the place of a missing number; None: it is refused. test_fraction: the share of the
    rows, drawn with a fixed seed, that are the test split.

    `transform` standardizes numbers by the mean and the standard deviation of the training rows, so
    `predict` takes the inputs of `encode`, as they are. Raises UsageError for a column that is missing,
    and for values that are missing or not finite, with column and row.
    """

    def __init__(
        self,
        table: Any,
        label: str,
        columns: Sequence[str] | None = None,
        fill: float | None = None,
        test_fraction: float = 0.1,
        split: str = "train",
    ):
        check_split(split)
        if not 0 <= test_fraction < 1:
            raise UsageError(f"{KEY}.test_fraction: {test_fraction} is not at least 0 and below 1")
        frame = read_frame(table)
        names = [name for name in frame.columns if name != label] if columns is None else columns
        self.columns, self.fill = [*names], fill
        require(frame, {"label": [label], "columns": self.columns})
        if label in self.columns or not self.columns:
            raise UsageError(f"{KEY}.columns: {self.columns}; name inputs, without {label!r}")
        order = np.random.default_rng(0).permutation(len(frame))
        cut = round(test_fraction * len(order))
        train = np.sort(order[cut:])
        # The values of each text column, {} for numbers.
        self.values: dict[str, list[str]] = {
            name: sorted({*frame[name].iloc[train].dropna().astype(str)})
            for name in self.columns
            if not is_number(frame[name])
        }
        inputs, labels = self.encode(frame), self._labels(frame[label], label)
        numeric = np.array([not self.values.get(name) for name in self.names])
        self.mean = np.where(numeric, inputs[train].mean(0), 0).astype(np.float32)
        deviation = np.where(numeric, inputs[train].std(0), 1)
        self.deviation = np.where(deviation > 0, deviation, 1).astype(np.float32)
        super().__init__(inputs=inputs, labels=labels)
        self.rows = train if split == "train" else np.sort(order[:cut])
        if not len(self.rows):
            raise UsageError(
                f"{KEY}.test_fraction: {test_fraction} of {len(order)} rows: no {split} split"
            )
        self.input_shape = inputs.shape[1:]
        self.inventory = f"{len(self.columns)} columns, {inputs.shape[1]} inputs; label {label}"

    @staticmethod
    def has_split(args: Mapping[str, Any]) -> bool:
        return args.get("test_fraction") != 0

    @property
    def names(self) -> list[str]:
        """Return the column that each input is of."""
        return [name for name in self.columns for _ in self.values.get(name, [name])]

    def encode(self, table: Any) -> np.ndarray:
        """Return the inputs [row, input] of a table with these columns: for `predict`."""
        frame = read_frame(table)
        require(frame, {"columns": self.columns})
        parts = []
        for name in self.columns:
            if name in self.values:
                texts = frame[name].astype(str).to_numpy()
                parts += [texts == value for value in self.values[name]]
            else:
                parts.append(numbers(frame[name], name, self.fill))
        return np.stack(parts, 1).astype(np.float32)

    def transform(self, batch: Mapping[str, Any], key: Any, train: bool) -> dict[str, Any]:
        """Standardize the numbers."""
        return {**batch, "inputs": (batch["inputs"] - self.mean) / self.deviation}

    def _labels(self, column: Any, name: str) -> np.ndarray:
        if column.isna().any():
            raise UsageError(
                f"{KEY}.label: {name!r} has no value in row {int(column.isna().argmax())}; remove the row"
            )
        if is_number(column) and column.dtype.kind == "f" and (column % 1 != 0).any():
            return numbers(column, name, None).astype(np.float32)[:, None]
        if column.dtype.kind == "f":
            column = column.astype(np.int64)
        texts = column if is_number(column) else column.astype(str)
        values, labels = np.unique(texts, return_inverse=True)
        self.classes, self.class_names = len(values), [f"{value}" for value in values]
        return labels.astype(np.int32)


def is_number(column: Any) -> bool:
    return getattr(column.dtype, "kind", "O") in "iufb"


def read_frame(table: Any, key: str = f"{KEY}.table", **options: Any) -> Any:
    """Return the DataFrame of a file; one itself. options: of `pandas.read_csv`. Raises UsageError
    that names `key` for a file that cannot be read.
    """
    pandas = import_optional("pandas", "data: Table", "tables")
    if isinstance(table, pandas.DataFrame):
        return table
    path = pathlib.Path(str(table)).expanduser()
    is_csv = path.suffix != ".parquet"
    try:
        frame = pandas.read_csv(path, **options) if is_csv else pandas.read_parquet(path)
    except Exception as error:
        raise UsageError(f"{key}: {str(table)!r} cannot be read: {one_line(error)}") from None
    if not len(frame):
        raise UsageError(f"{key}: {str(table)!r} has no rows")
    return frame


def require(frame: Any, wanted: Mapping[str, Sequence[str]]) -> None:
    """Raise UsageError if the table lacks one of these columns."""
    for key, names in wanted.items():
        for name in names:
            if name not in frame.columns:
                known = abbreviated([f"{column}" for column in frame.columns])
                raise UsageError(f"{KEY}.{key}: the table has no column {name!r}, only {known}")


def numbers(column: Any, name: str, fill: float | None) -> np.ndarray:
    """Return a column of numbers. Raises UsageError if one is missing or not finite, or a text."""
    if not is_number(column):
        raise UsageError(
            f"{KEY}.columns: {name!r} has texts, such as {str(column.iloc[0])!r}, but numbers in training"
        )
    values = column.to_numpy(np.float64)
    if fill is not None:
        values = np.where(np.isnan(values), fill, values)
    if not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values)))
        raise UsageError(
            f"{KEY}.columns: {name!r} is {values[row]} in row {row}; set {KEY}.fill, or leave the column out"
        )
    return values
