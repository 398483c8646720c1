"""Arrays of a .npz file, or of a folder of .npy files; if not compressed, they stay on disk until
they are read.
"""

import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.data.dataset import (
    EMPTY,
    Arrays,
    check_labels,
    check_share,
    check_split,
    fits_int32,
    rows_of_split,
)
from jaxdp.data.split_names import EVALUATED, check_clear, listed, of_split, split_names
from jaxdp.errors import UsageError, one_line

FRACTION = 0.1
MAP = "name those to train on in data.args.arrays, as in {inputs: x_train, labels: y_train}; to evaluate, set eval.data"


class Npz(Arrays):
    """Examples of a .npz file that `np.savez` wrote, or of a folder with a file NAME.npy for each
    array.

    arrays: {key of an example: array}, such as `{inputs: x_train, labels: y_train}`; by default all
    arrays, by their names without the split, as in x_train or trainX. The test split is the arrays
    of the same names for testing, or for validation, if there are any (see
    `jaxdp.data.split_names`), else a `test_fraction` of the rows, drawn with a fixed seed. int64
    becomes int32 if the values fit. `classes` is the largest label + 1, if labels are one integer
    per example. Raises UsageError for a missing file or array, and for unequal lengths."""

    def __init__(
        self,
        path: str,
        split: str = "train",
        arrays: Mapping[str, str] | None = None,
        test_fraction: float = FRACTION,
    ):
        check_split(split)
        check_share(test_fraction)
        self.arguments = path, split, arrays, test_fraction
        stored = stored_arrays(path)
        train, test = arrays_by_split(path, stored, arrays)
        chosen = test if test and split == "test" else train
        if not chosen and stored:
            raise UsageError(
                f"data.args.arrays: {path!r} has only {listed(stored)}, nothing to train on; {MAP}"
            )
        for key, name in chosen.items():
            if name not in stored:
                known = ", ".join(sorted(stored)) or "none"
                raise UsageError(
                    f"data.args.arrays.{key}: {path!r} has no array {name!r}; its arrays: {known}"
                )
            if 0 in stored[name].shape[:1]:
                raise UsageError(
                    f"{EMPTY}; {name!r} of {path!r}, for its {split} split, has no rows"
                )
        super().__init__(**{key: stored[name] for key, name in chosen.items()})
        if "labels" in self.arrays:
            source = f"data: {chosen['labels']!r} of {path!r}, for its {split} split,"
            check_labels(self.arrays["labels"].__getitem__, len(self), source)
        self.dtypes = {key: np.int32 for key, x in self.arrays.items() if fits_int32(x)}
        if "inputs" in self.arrays:
            self.input_shape = self.arrays["inputs"].shape[1:]
        labels = [
            stored[group["labels"]] for group in (train, test) if group.get("labels") in stored
        ]
        if labels and all(
            x.ndim == 1 and x.dtype.kind in "iu" and x.size and x.min() >= 0 for x in labels
        ):
            self.classes = int(max(x.max() for x in labels)) + 1
        if not test:
            self.rows = rows_of_split(len(self), test_fraction, split)
        share = f"{test_fraction:g} of the rows" if test_fraction else "none"
        tests = ", ".join(test.values()) or share
        unused = sorted(stored.keys() - {*train.values(), *test.values()})
        self.inventory = f"train: {', '.join(map(str, train.values()))}; test: {tests}"
        self.inventory += f"; not read: {', '.join(unused)}" * bool(unused)

    @staticmethod
    def has_split(args: Mapping[str, Any]) -> bool:
        if args.get("test_fraction") != 0:
            return True
        path = args.get("path", "")
        _, test = arrays_by_split(path, stored_arrays(path), args.get("arrays"))
        return bool(test)

    def __reduce__(self) -> Any:  # workers open the files again
        return type(self), self.arguments


def arrays_by_split(
    path: str, stored: Iterable[str], arrays: Mapping[str, str] | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Return ({key of an example: array} for training, the same for testing, {} if no array is).

    arrays: the argument of `Npz`. Raises UsageError if names look like those of splits, and it is
    not clear which."""
    names = split_names(stored)
    fix = f"the arrays of {path!r} are {listed(names)}; {MAP}"
    train = dict(arrays or {})
    if not arrays:
        check_clear(names, "data.args.arrays", fix)
        for name, entry in names.items():
            if entry.split in ("train", ""):
                other = train.setdefault(entry.rest or "inputs", name)
                if other != name:
                    raise UsageError(
                        f"data.args.arrays: {other!r} and {name!r} are the same array for training; {fix}"
                    )
    entries = {key: split_names([*names, str(name)])[str(name)] for key, name in train.items()}
    same = {entry.same for entry in entries.values() if entry.split in ("train", "")}
    for split in EVALUATED:
        others: dict[str, str] = {}
        for name, entry in names.items():
            if entry.split == split:
                other = others.setdefault(entry.same, name)
                if other != name and not arrays:
                    raise UsageError(
                        f"data.args.arrays: {other!r} and {name!r} are the same array of a split; {fix}"
                    )
        if not train and others:
            return {}, {names[name].rest or "inputs": name for name in others.values()}
        if others.keys() & same:
            word = {"valid": "val"}.get(split, split)
            return train, {
                key: others.get(entry.same, f"{entry.rest}_{word}")
                for key, entry in entries.items()
            }
    if not arrays and of_split(names, "test"):
        raise UsageError(
            f"data.args.arrays: no array to train on is the same but for its split; {fix}"
        )
    return train, {}


def stored_arrays(path: str) -> dict[str, np.ndarray]:
    """Return the arrays of a file or a folder by name. Raises UsageError if it cannot be read."""
    where = Path(path).expanduser()
    try:
        if where.is_dir():
            return {file.stem: np.load(file, mmap_mode="r") for file in sorted(where.glob("*.npy"))}
        if where.is_file() and not zipfile.is_zipfile(where):
            raise ValueError("it is not a .npz file, or its end is missing")
        arrays = {}
        with zipfile.ZipFile(where) as archive:
            for entry in archive.infolist():
                if not entry.filename.endswith(".npy"):
                    continue
                name = entry.filename.removesuffix(".npy")
                if entry.compress_type == zipfile.ZIP_STORED:
                    arrays[name] = mapped(where, entry.header_offset)
                else:
                    with archive.open(entry) as file:
                        arrays[name] = np.lib.format.read_array(file)
        return arrays
    except MemoryError:
        raise
    except Exception as error:  # a damaged file raises many types of errors
        objects = "allow_pickle" in str(error) or "Python objects" in str(error)
        reason = getattr(error, "strerror", None) or (
            "Python objects in it" if objects else one_line(error)
        )
        raise UsageError(
            f"data.args.path: cannot read {path!r} ({reason}); give a .npz file of numbers or a folder of .npy files"
        ) from None


def mapped(path: Path, offset: Any) -> np.ndarray:
    """Return the array of an uncompressed member of a zip file, mapped into memory. offset: of the
    member's header.
    """
    with path.open("rb") as file:
        file.seek(offset + 26)
        # Skip its name and extra field.
        file.seek(offset + 30 + sum(struct.unpack("<HH", file.read(4))))
        version = np.lib.format.read_magic(file)
        read_header = {
            1: np.lib.format.read_array_header_1_0,
            2: np.lib.format.read_array_header_2_0,
        }[version[0]]
        shape, fortran, dtype = read_header(file)
        if dtype.hasobject:
            raise ValueError("it contains Python objects")
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")
