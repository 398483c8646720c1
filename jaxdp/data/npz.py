"""Arrays of a .npz file, or of a folder of .npy files; if not compressed, they stay on disk until they are read."""

import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.data.base import Arrays, check_split, fits_int32
from jaxdp.data.parts import Part
from jaxdp.errors import UsageError, one_line

FRACTION = 0.1


class Npz(Arrays):
    """Examples of a .npz file that `np.savez` wrote, or of a folder with a file NAME.npy for each array.

    arrays: {key of an example: array}, such as `{inputs: x_train, labels: y_train}`; by default all arrays, by their
    names without "_train". The test split is the arrays with "_test" instead, if there are any, else a `test_fraction`
    of the rows, drawn with a fixed seed. int64 becomes int32 if the values fit. `classes` is the largest label + 1, if
    labels are one integer per example. Raises UsageError for a missing file or array, and for unequal lengths.
    """

    def __init__(
        self,
        path: str,
        split: str = "train",
        arrays: Mapping[str, str] | None = None,
        test_fraction: float = FRACTION,
    ):
        check_split(split)
        if not 0 <= test_fraction < 1:
            raise UsageError(f"data.args.test_fraction: {test_fraction} is not at least 0 and below 1; e.g. 0.1")
        self.arguments = path, split, arrays, test_fraction
        stored = stored_arrays(path)
        names = dict(arrays or {n.removesuffix("_train"): n for n in stored if not n.endswith("_test")})
        tests = {key: f"{str(name).removesuffix('_train')}_test" for key, name in names.items()}
        has_tests = bool(stored.keys() & set(tests.values()))
        for key, name in (tests if has_tests and split == "test" else names).items():
            if name not in stored:
                known = ", ".join(sorted(stored)) or "none"
                raise UsageError(f"data.args.arrays.{key}: {path!r} has no array {name!r}; its arrays: {known}")
        both = [{key: stored[n] for key, n in group.items() if n in stored} for group in (names, tests)]
        self.rows: np.ndarray | None = None
        super().__init__(**both[has_tests and split == "test"])
        self.narrow = {key for key, x in self.arrays.items() if fits_int32(x)}
        if "inputs" in self.arrays:
            self.input_shape = self.arrays["inputs"].shape[1:]
        labels = [group["labels"] for group in both if "labels" in group]
        if labels and all(x.ndim == 1 and x.dtype.kind in "iu" and x.size and x.min() >= 0 for x in labels):
            self.classes = int(max(x.max() for x in labels)) + 1
        if not has_tests:
            order = np.random.default_rng(0).permutation(len(self))
            cut = round(test_fraction * len(order))
            self.rows = np.sort(order[:cut] if split == "test" else order[cut:])
            if not len(self.rows):
                raise UsageError(f"data.args.test_fraction: {test_fraction} of {len(order)} rows: no {split} split")

    @staticmethod
    def has_split(args: Mapping[str, Any]) -> bool:
        return args.get("test_fraction") != 0 or any(n.endswith("_test") for n in stored_arrays(args.get("path", "")))

    def __len__(self) -> int:
        return super().__len__() if self.rows is None else len(self.rows)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        batch = super().read(indices if self.rows is None else self.rows[indices])
        return {key: x.astype(np.int32) if key in self.narrow else x for key, x in batch.items()}

    def parts(self, rows: np.ndarray | None = None) -> dict[str, Part]:
        return super().parts(self.rows)

    def __reduce__(self) -> Any:  # workers open the files again
        return type(self), self.arguments


def stored_arrays(path: str) -> dict[str, np.ndarray]:
    """Return the arrays of a file or a folder by name. Raises UsageError if it cannot be read."""
    where = Path(path).expanduser()
    try:
        if where.is_dir():
            return {file.stem: np.load(file, mmap_mode="r") for file in sorted(where.glob("*.npy"))}
        with np.load(where) as content, zipfile.ZipFile(where) as archive:
            plain = {i.filename: i.header_offset for i in archive.infolist() if i.compress_type == zipfile.ZIP_STORED}
            file = lambda name: plain.get(f"{name}.npy")
            return {n: content[n] if file(n) is None else mapped(where, file(n)) for n in content.files}
    except (OSError, EOFError, ValueError, TypeError, struct.error, zlib.error, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UsageError(
            f"data.args.path: cannot read {path!r} ({reason}); give a .npz file of numbers or a folder of .npy files"
        ) from None


def mapped(path: Path, offset: Any) -> np.ndarray:
    """Return the array of an uncompressed member of a zip file, mapped into memory. offset: of the member's header."""
    with path.open("rb") as file:
        file.seek(offset + 26)
        file.seek(offset + 30 + sum(struct.unpack("<HH", file.read(4))))  # skip its name and extra field
        version = np.lib.format.read_magic(file)
        read_header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[version[0]]
        shape, fortran, dtype = read_header(file)
        if dtype.hasobject:
            raise ValueError("it contains Python objects")
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")
