"""Rows of a table: a CSV or Parquet file, or a DataFrame, read by pandas."""

import pathlib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.data.dataset import Arrays, check_share, check_split, rows_of_split
from jaxdp.data.image_files import counted
from jaxdp.data.split_names import abbreviated
from jaxdp.errors import UsageError, import_optional, one_line

KEY = "data.args"


class Table(Arrays):
    """Rows of a table as examples: "inputs" float32 [input], standardized, and "labels", of one column.

    table: a CSV or Parquet file, or a DataFrame; or {train: TABLE, test: TABLE}. label: the column to
    predict. Texts and whole numbers are classes: labels are int32 [], the index in `class_names`, which
    are sorted. Fractions are labels of a regression, float32 [1]. regression: any numbers are, and they
    are standardized by the training rows: a prediction times `scale`, plus `center`, has the unit of
    the column. columns: the other columns to use, by default all. Numbers are one input; a text is one
    for each value that the training rows have (one-hot, sorted; of another value, all are 0). fill: in
    the place of a missing number; None: it is refused. test_fraction: of one table, the share of the
    rows, drawn with a fixed seed, that are the test split.

    Numbers are standardized by the mean and the standard deviation of the training rows, in float64.
    `predict` takes the inputs of `encode`, as they are. A column that is a text in training is read as
    one from any other file: 007 is not 7. Raises UsageError for a column that is missing,
    for values that are missing or not finite, with column and row, and for a class or a text of a test
    table that train lacks.
    """

    center, scale = 0.0, 1.0  # of the labels of a regression

    def __init__(
        self,
        table: Any,
        label: str,
        columns: Sequence[str] | None = None,
        fill: float | None = None,
        test_fraction: float = 0.1,
        split: str = "train",
        regression: bool = False,
    ):
        check_split(split)
        check_share(test_fraction)
        both = isinstance(table, Mapping)
        if both and table.keys() != {"train", "test"}:
            raise UsageError(
                f"{KEY}.table: {[*table]} are not two splits; give {{train: TABLE, test: TABLE}}"
            )
        frame = read_frame(table["train"] if both else table)
        self.fill = fill
        self.columns = [x for x in frame if x != label] if columns is None else [*columns]
        require(frame, "columns", self.columns)
        if label in self.columns or not self.columns:
            raise UsageError(f"{KEY}.columns: {self.columns}; name inputs, without {label!r}")
        train = rows_of_split(len(frame), 0 if both else test_fraction, "train")
        # The values of each text column; the mean and the deviation of each column of numbers.
        self.values = dict[str, list[str]]()
        self.moments = dict[str, tuple[float, float]]()
        for name in self.columns:
            if is_number(frame[name]):
                self.moments[name] = moments(numbers(frame[name], fill)[train])
            else:
                self.values[name] = sorted({*frame[name].iloc[train].dropna().astype(str)})
        # The column that each input is of.
        self.names = [name for name in self.columns for _ in self.values.get(name, [name])]
        column, kinds = label_column(frame, label, regression), ""
        if regression:
            self.center, self.scale = moments(numbers(column, None)[train])
        elif column.dtype.kind != "f":
            self.class_names = [f"{name}" for name in np.unique(column)]
            self.classes = len(self.class_names)
            kinds = f": {counted(Counter(column.map('of {}'.format)))}"
        inputs = self.encode(frame, "")
        # What an input means: `check_meaning` compares it with that of an evaluation set.
        self.encoding = self.columns, self.values, self.moments, self.center, self.scale
        self.rows = train if both else rows_of_split(len(frame), test_fraction, split)
        if both and split == "test":
            inputs = self.encode(table["test"], f"{KEY}.table.test")
            self.rows = np.arange(len(inputs))
            column = label_column(read_frame(table["test"]), label, regression)
        labels = (
            np.int32(positions(column, self.class_names, f"{KEY}.table.test"))
            if hasattr(self, "class_names")
            else np.float32((numbers(column, None)[:, None] - self.center) / self.scale)
        )
        super().__init__(inputs=inputs, labels=labels)
        self.input_shape = inputs.shape[1:]
        self.inventory = abbreviated(
            [
                f"{len(self.columns)} columns, {len(self.names)} inputs; label {label}{kinds}",
                *(f"{len(values):,} values of {name}" for name, values in self.values.items()),
            ]
        )

    @staticmethod
    def has_split(args: Mapping[str, Any]) -> bool:
        return args.get("test_fraction") != 0 or isinstance(args.get("table"), Mapping)

    def encode(self, table: Any, key: str = "encode") -> np.ndarray:
        """Return the inputs [row, input] of a table with these columns, float32, standardized: for
        `predict`. Raises UsageError that names the key, if there is one, for a text that the training
        rows lack."""
        # 007 stays so, whatever is in the other rows of that file.
        frame = read_frame(table, key, dtype=dict.fromkeys(self.values, str))
        require(frame, "columns", self.columns)
        parts = []
        for name in self.columns:
            if name in self.values:
                values = self.values[name]
                parts.append(positions(frame[name], values, key)[:, None] == np.arange(len(values)))
            else:
                mean, deviation = self.moments[name]
                parts.append((numbers(frame[name], self.fill)[:, None] - mean) / deviation)
        return np.concatenate(parts, 1, dtype=np.float32)


def label_column(frame: Any, label: str, regression: bool) -> Any:
    """Return texts, whole numbers as integers, or fractions; for a regression the column itself.
    Raises UsageError for a missing label, or without the column.
    """
    require(frame, "label", [label])
    column = frame[label]
    missing = column.isna() | column.isin([np.inf, -np.inf])
    if missing.any():
        raise UsageError(
            f"{KEY}.label: {column.name!r} has no value in row {missing.argmax()}; remove the row"
        )
    if regression:
        return column
    if column.dtype.kind == "f" and (column % 1 == 0).all() and column.abs().max() <= 2**62:
        return column.astype(np.int64)
    return column if is_number(column) else column.astype(str)


def positions(column: Any, texts: Sequence[str], key: str) -> np.ndarray:
    """Return the position of each value among the sorted texts, NaN for another. Raises UsageError that
    names the key, if there is one, for another value that is not missing."""
    places = column.astype(str).map({text: place for place, text in enumerate(texts)})
    others = column[places.isna() & column.notna()]
    if key and len(others):
        raise UsageError(
            f"{key}: {column.name!r} has {str(others.iloc[0])!r}, which train lacks; add a row with it to train, or "
            "remove it"
        )
    return places.to_numpy()


def is_number(column: Any) -> bool:
    """Return whether a column has numbers, not texts. Raises UsageError for dates, which are neither."""
    kind = column.dtype.kind
    others = kind == "O" and {*column.dropna().map(type)} - {str, bool, int, float}
    if kind in "mMc" or others:
        raise UsageError(
            f"{KEY}.columns: {column.name!r} is {column.dtype}; make numbers of it, or leave the column out"
        )
    return kind in "iufb"


def read_frame(table: Any, key: str = f"{KEY}.table", **options: Any) -> Any:
    """Return the DataFrame of a file; one itself. options: of `pandas.read_csv`. Raises UsageError
    that names `key` for a file that cannot be read.
    """
    pandas = import_optional("pandas", "data: Table", "tables")
    frame = table
    if not isinstance(table, pandas.DataFrame):
        path = pathlib.Path(str(table)).expanduser()
        try:
            if path.suffix == ".parquet":
                frame = pandas.read_parquet(path)
            else:  # in one piece: else a number in a column of texts has several spellings
                header = ",".join(pandas.read_csv(path, nrows=0))
                # The first one, if a name has another, too.
                separator = max(",;\t", key=header.count)
                # As they are written: pandas would number the second one of a name.
                names = pandas.read_csv(
                    path, sep=separator, nrows=1, header=None, dtype=str, keep_default_na=False
                ).iloc[0]
                # A row of more fields than the header is an error, not a column that has no name.
                with warnings.catch_warnings(action="error", category=pandas.errors.ParserWarning):
                    frame = pandas.read_csv(
                        path,
                        sep=separator,
                        header=0,
                        names=names,
                        index_col=False,
                        low_memory=False,
                        **options,
                    )
        except Exception as error:
            raise UsageError(f"{key}: {str(table)!r} cannot be read: {one_line(error)}") from None
        if not len(frame):
            raise UsageError(f"{key}: {str(table)!r} has no rows")
    for name in frame.columns[frame.columns.duplicated()]:
        raise UsageError(f"{key}: two columns are called {name!r}; rename one")
    return frame


def moments(values: np.ndarray) -> tuple[float, float]:
    """Return the mean and the standard deviation, or 1 if all are equal."""
    return values.mean(), values.std() or 1.0


def require(frame: Any, key: str, names: Iterable[str]) -> None:
    """Raise UsageError that names the argument `key` if the table lacks one of these columns."""
    for name in names:
        if name not in frame:
            known = abbreviated([*map(str, frame)])
            raise UsageError(f"{KEY}.{key}: the table has no column {name!r}, only {known}")


def numbers(column: Any, fill: float | None) -> np.ndarray:
    """Return a column of numbers. Raises UsageError if one is missing or not finite, or a text."""
    if not is_number(column):
        raise UsageError(
            f"{KEY}.columns: {column.name!r} has texts, such as {str(column.iloc[0])!r}, but numbers in training"
        )
    if fill is not None:
        column = column.fillna(fill)
    values = column.to_numpy(float)
    fits = abs(values) <= np.finfo(np.float32).max
    if not fits.all():
        row = np.argmin(fits)
        raise UsageError(
            f"{KEY}.columns: {column.name!r} is {values[row]} in row {row}; set {KEY}.fill, or leave the column out"
        )
    return values
