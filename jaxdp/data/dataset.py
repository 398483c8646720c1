"""The data set protocol: a length, and a read of any rows in any order as stacked arrays."""

import contextlib
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxdp.data.example_order import RESET
from jaxdp.data.split_names import check_one_split
from jaxdp.errors import RunFailed, UsageError, check_one_of

# examples in a fingerprint: enough to distinguish two data sets, few enough for slow storage
PROBES = 64
PIECE = 1 << 24  # bytes of an array or a file that are read at once
UNKNOWN = 1 << 62  # the length of a stream whose end is unknown
EMPTY = "data: the data set is empty; give it at least one example"
Batch = dict[str, np.ndarray]
"""Examples by the names of their entries, arrays[example, ...]."""

_NEEDS_X64 = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


class Dataset(Protocol):
    """A random-access source of examples. Called from one thread at a time, not always the main
    thread.

    Optional attributes:

    - `transform(batch, key, train) -> batch`: runs on the device on one microbatch, a dict of
      arrays[example, ...]. Normalizes in both modes; augments if `train` is true, with randomness
      from the microbatch's `key`, which in evaluation is the same in each batch. Must be traceable by JAX.
    - `classes: int`, the number of labels; `class_names: list[str]`, the name of each label, in
      order; `input_shape: tuple[int, ...]`, the shape of one example's inputs.
    - `example_order(batch_size, microbatches, seed) -> ExampleOrder`: the order of training
      examples, instead of a shuffled one.
    - `require(indices)`: is called before a batch is read, on every process, with the examples of
      all processes.
    - `parts() -> {name: Part}`: the arrays and files that the examples are made of; see
      `jaxdp.data.contents`.
    - `inventory: str`: what was read, and what was passed over, for the summary of a run.
    """

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Batch:
        """Return the examples at indices[k] int64 (may repeat) as {name: [k, ...]}; standard names
        are "inputs" and "labels". The same index must always return the same example."""
        ...


class Part(NamedTuple):
    """An array or a file that examples are made of: the number of its bytes, infinite if they must
    not be read, and a function that reads them.
    """

    size: float
    pieces: Callable[[], Iterator[bytes]]


def array_part(array: np.ndarray, rows: np.ndarray | None = None) -> Part:
    """Return the part of an array, or of some of its rows, as little-endian bytes."""
    count, each = len(array) if rows is None else len(rows), max(1, array[:1].nbytes)
    step = max(1, PIECE // each)

    def pieces() -> Iterator[bytes]:
        for i in range(0, count, step):
            chunk = array[i : i + step] if rows is None else array[rows[i : i + step]]
            yield chunk.astype(chunk.dtype.newbyteorder("<")).tobytes()

    return Part(count * each, pieces)


def file_part(path: Path, read: bool = True) -> Part:
    """Return the part of a file; read: False to compare only its name."""

    def pieces() -> Iterator[bytes]:
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                yield piece

    return Part(path.stat().st_size if read else math.inf, pieces)


class MappedFiles:
    """Files that are mapped into memory: to read one beyond its end kills the process (SIGBUS).

    The sizes of many files are not compared: that would take longer than to read a batch.
    """

    MOST = 64

    def __init__(self, paths: Iterable[Any]):
        self.opened = {str(path): os.stat(path) for path in paths if path is not None}

    def check(self) -> None:
        """Raise RunFailed if a file is smaller than at its opening."""
        for path, old in self.opened.items() if len(self.opened) <= self.MOST else ():
            with contextlib.suppress(OSError):  # removed: the map still has the file
                now = os.stat(path)
                if os.path.samestat(now, old) and now.st_size < old.st_size:
                    raise RunFailed(
                        f"data: {path!r} had {old.st_size:,} bytes and now has {now.st_size:,}; write it again, and "
                        "leave it alone during a run"
                    )


class Arrays:
    """Examples in memory: `Arrays(inputs=x, labels=y)`. Raises UsageError unless the arrays have
    one length, not 0.

    A subclass may set `rows`, the rows of the arrays that are examples (None: all), and `dtypes`, of
    the arrays that `read` converts.
    """

    rows: np.ndarray | None = None
    dtypes: Mapping[str, Any] = {}

    def __init__(self, **arrays: Any):
        self.arrays = {key: _array(repr(key), value) for key, value in arrays.items()}
        shapes = {key: value.shape for key, value in self.arrays.items()}
        if not shapes or not all(shapes.values()):
            raise UsageError(f"data: arrays with one entry an example are needed, not {shapes}")
        if len({shape[0] for shape in shapes.values()}) > 1:
            raise UsageError(
                f"data: arrays differ in their number of examples: {shapes}; give each the same length"
            )
        if not len(self):
            raise UsageError(EMPTY)
        self.files = MappedFiles(getattr(value, "filename", None) for value in arrays.values())
        if not isinstance(arrays.get("mask"), np.memmap):
            check_mask(self.arrays, np.arange(len(self)), "data: an array")

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())) if self.rows is None else self.rows)

    def read(self, indices: np.ndarray) -> Batch:
        self.files.check()
        rows = indices if self.rows is None else self.rows[indices]
        batch = {key: value[rows] for key, value in self.arrays.items()}
        return batch | {key: batch[key].astype(dtype) for key, dtype in self.dtypes.items()}

    def parts(self) -> dict[str, Part]:
        """Return the examples' rows of the arrays; see `jaxdp.data.contents`."""
        return {
            f"{k} {x.dtype.name} {x.shape[1:]}": array_part(x, self.rows)
            for k, x in sorted(self.arrays.items())
        }


class Examples:
    """A data set that stacks the examples of a sized sequence: a list of dicts, a map-style data
    set, a mapped array.

    source[i] is a dict, a pair (inputs, labels), or one array. int64 becomes int32 if the values
    fit, see `widen`. Every example must have the keys, shapes and dtypes of the first; UsageError
    names the first that differs. Copies `source.classes` if it is an int; ignores
    `source.transform`, which has another meaning in other libraries."""

    def __init__(self, source: Any):
        self.source, self.wide = source, set[str]()
        if isinstance(getattr(source, "classes", None), int):
            self.classes = source.classes
        self.first = self._example(0)

    def __len__(self) -> int:
        return len(self.source)

    def widen(self) -> None:
        """Return int64 unchanged where it does not fit into int32 in some of the first or evenly
        spread examples.
        """
        for index in probes(self).tolist():
            example = self._example(index)
            self.wide |= {key for key, value in example.items() if value.dtype == np.int64}
        self.first = self._example(0)

    def read(self, indices: np.ndarray) -> Batch:
        batch = {
            key: np.empty((len(indices), *value.shape), value.dtype)
            for key, value in self.first.items()
        }
        for row, index in enumerate(indices.tolist()):
            example = self._example(index)
            if example.keys() != batch.keys():
                raise UsageError(
                    f"data: example {index} has keys {sorted(example)}, example 0 has {sorted(batch)}"
                )
            for key, value in example.items():
                first = self.first[key]
                if value.shape != first.shape or value.dtype != first.dtype:
                    raise UsageError(
                        f"data: example {index} has {key!r} of shape {value.shape} {value.dtype}, example 0 has "
                        f"{first.shape} {first.dtype}; make them alike (crop, pad or cast)"
                    )
                batch[key][row] = value
        return batch

    def _example(self, index: int) -> dict[str, np.ndarray]:
        try:
            item = self.source[index]
        except Exception as error:
            error.add_note(f"as example {index} was read")
            raise
        if isinstance(item, tuple):
            if len(item) != 2:
                raise UsageError(
                    f"data: example {index} is a tuple of {len(item)}; give (inputs, labels) or a dict"
                )
            item = {"inputs": item[0], "labels": item[1]}
        elif not isinstance(item, Mapping):
            item = {"inputs": item}
        return {
            k: _array(f"{k!r} of example {index}", v, k not in self.wide) for k, v in item.items()
        }


def by_member(
    starts: np.ndarray, indices: np.ndarray
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (member, which of indices[k] are its, bool [k]; their numbers within it) for each member
    of a joined set that has any of them.

    starts: the first index of each member, then the number of all. Raises IndexError."""
    if len(indices) and (indices.min() < 0 or indices.max() >= starts[-1]):
        raise IndexError(f"indices are not all in [0, {starts[-1]:,})")
    members = np.searchsorted(starts, indices, side="right") - 1
    for member in np.unique(members).tolist():
        chosen = members == member
        yield member, chosen, indices[chosen] - starts[member]


def check_split(split: str) -> None:
    check_one_of("data.args.split", split, ("train", "test"))


def check_share(fraction: float) -> None:
    """Raise UsageError unless it is the share of a test split, which may be 0."""
    if not 0 <= fraction < 1:
        raise UsageError(
            f"data.args.test_fraction: {fraction} is not at least 0 and below 1; e.g. 0.1"
        )


def rows_of_split(size: int, fraction: float, split: str) -> np.ndarray:
    """Return the rows of a split, in order: the test split is a `fraction` of them, drawn with a
    fixed seed. Raises UsageError if there is none."""
    order = np.random.default_rng(0).permutation(size)
    cut = round(fraction * size)
    rows = np.sort(order[:cut] if split == "test" else order[cut:])
    if not len(rows):
        raise UsageError(f"data.args.test_fraction: {fraction} of {size} rows: no {split} split")
    return rows


def find_file(
    root: str, folders: Iterable[str], names: Iterable[str], title: str, origin: str
) -> Path:
    """Return the first file of one of the names in one of the folders of `root`. Raises UsageError.

    title, origin: what the file is, and what to fetch, in the error.
    """
    for folder in folders:
        for name in names:
            path = Path(root).expanduser() / folder / name
            if path.is_file():
                return path
    raise UsageError(f"data.args.root: no {title} in {root!r}; fetch {origin} and put them there")


def as_dataset(source: Any) -> Dataset:
    """Return `source` as a `Dataset`: itself if it has `read`, else wrapped as `Arrays` or
    `Examples`.

    A dict of arrays, a pair (inputs, labels) of arrays, or one array (inputs) becomes `Arrays`; the
    first dim is the example. Any other sized sequence becomes `Examples`. Raises UsageError for
    anything else, for an empty source, for an ambiguous list of two arrays (a pair, or two examples),
    and for a tuple of one array, or of 3 to 8."""
    try:
        size = len(source)
    except (TypeError, ValueError):  # no length, or a negative one
        raise UsageError(
            f"data: {type(source).__name__} has no length; give a source with __len__ and __getitem__ or read "
            "(for a stream: data.target: Stream, with this as data.args.source)"
        ) from None
    if not size:
        raise UsageError(EMPTY)
    if hasattr(source, "read"):
        return source
    if isinstance(source, Mapping):
        if wrong := [key for key in source if not isinstance(key, str)]:
            raise UsageError(
                f"data: the key {wrong[0]!r} is not a name; give each array one, such as 'inputs'"
            )
        check_one_split(source)
        return Arrays(**source)
    shapes, is_tuple = [], isinstance(source, tuple)
    if isinstance(source, tuple | list) and size < 9:
        shapes = [getattr(part, "shape", ()) for part in source]
    if size == len(shapes) == 2 and (all(shapes) or (is_tuple and all(map(_is_array, source)))):
        pair = Arrays(inputs=source[0], labels=source[1])
        inputs, labels = pair.arrays.values()
        alike = inputs.shape == labels.shape and inputs.dtype == labels.dtype
        if alike and not is_tuple:
            raise UsageError(
                f"data: a list of two arrays {inputs.dtype}{list(inputs.shape)} may be a pair or two examples; give a "
                "tuple (inputs, labels), or np.stack(...) of two examples"
            )
        return pair
    if hasattr(source, "__dlpack__"):  # in memory; arrays backed by a file become `Examples`
        return Arrays(inputs=source)
    differ = len({*shapes}) > 1
    if shapes and all(shapes) and (is_tuple or differ):
        raise UsageError(
            f"data: a {type(source).__name__} of {size} arrays{' of different shapes' * differ}; give a "
            "pair (inputs, labels), a dict of arrays, such as {'inputs': x, 'labels': y}, or a list of examples"
        )
    if hasattr(source, "__getitem__"):
        return Examples(source)
    raise UsageError(
        f"data: {type(source).__name__} has neither read nor __getitem__; give it one of them"
    )


def read_examples(dataset: Dataset, indices: np.ndarray, key: str = "data") -> Batch:
    """Return `dataset.read(indices)`. Raises UsageError unless it is a dict of arrays with one
    entry per index, and a mask in it is 0 or more."""
    values, name = dataset.read(indices), type(dataset).__name__
    if (
        not isinstance(values, Mapping)
        or not values
        or not all(isinstance(entry, str) for entry in values)
    ):
        keys = f" with the keys {list(values)}" if isinstance(values, Mapping) else ""
        raise UsageError(
            f"data: {name}.read gave a {type(values).__name__}{keys}; return a dict of arrays by name"
        )
    for entry, value in values.items():
        if getattr(value, "shape", ())[:1] != indices.shape:
            kind = (
                f"of shape {value.shape}"
                if hasattr(value, "shape")
                else f"as {type(value).__name__}"
            )
            raise UsageError(
                f"data: {name}.read gave {entry!r} {kind} for {len(indices)} indices; return arrays, with one entry "
                "an index along the first dim"
            )
    arrays = {entry: np.asarray(value) for entry, value in values.items()}
    check_mask(arrays, indices, f"{key}: {type(getattr(dataset, 'source', dataset)).__name__}")
    return arrays


def check_mask(arrays: Mapping[str, np.ndarray], indices: np.ndarray, source: str) -> None:
    """Raise UsageError if the mask of an example is negative or not finite: a sum would subtract
    the example.
    """
    mask = arrays.get("mask")
    if mask is None or mask.dtype.kind in "bu" or not mask.size:
        return
    if mask.min() >= 0 and mask.max() < np.inf:
        return
    row, *place = np.argwhere(~((mask >= 0) & (mask < np.inf)))[0]
    raise UsageError(
        f"{source} has 'mask' {mask[(row, *place)]} in example {indices[row]}; set it to 0 where nothing counts, and "
        "to 1 or another positive weight elsewhere"
    )


def check_labels(read: Callable[[np.ndarray], Any], size: int, source: str) -> None:
    """Raise UsageError if all labels are -1, as those of a test split whose labels are not
    published.

    read(indices): the labels of some of the `size` examples, or None; is called for one, and for
    more until a label is another."""
    bounds = itertools.chain([0], range(1, size, PROBES), [size])
    for first, end in itertools.pairwise(bounds):
        labels = np.asarray(read(np.arange(first, end)))
        if not labels.size or not (labels == -1).all():
            return
    raise UsageError(
        f"{source} has no labels: all are -1; use another split, or other data (eval.data)"
    )


def replace_masked(arrays: Batch) -> Batch:
    """Return arrays [row, ...] with the first real example in the place of each whose mask is 0:
    its contents may be anything, and a microbatch of nothing else is still computed, with weight 0.
    """
    if (mask := arrays.get("mask")) is None:
        return arrays
    real = (mask != 0).reshape(len(mask), -1).any(1)
    if real.all() or not real.any():
        return arrays
    rows = np.where(real, np.arange(len(real)), real.argmax())
    return {name: x if name in ("mask", RESET) else x[rows] for name, x in arrays.items()}


def check_dtypes(dataset: Dataset, x64: bool) -> None:
    """Raise UsageError if the first example has values that are not numbers, or 64-bit values that
    JAX would truncate to 32 bits (`x64` is false); with `x64`, let the data set return int64 where
    it is needed."""
    if x64 and hasattr(dataset, "widen"):
        dataset.widen()
    first = read_examples(dataset, np.zeros(1, np.int64))
    dtypes = {key: _check_numbers(repr(key), value).dtype.name for key, value in first.items()}
    wide = {key: name for key, name in dtypes.items() if name in _NEEDS_X64}
    if wide and not x64:
        listed = " and ".join(f"{key!r} is {name}" for key, name in wide.items())
        narrow = [_NEEDS_X64[name] for name in wide.values()]
        classes = " (labels that are classes to int32)" * (wide.get("labels") == "float64")
        raise UsageError(
            f"data: {listed}, which JAX would cut to 32 bits; cast to {' and '.join(narrow)}{classes}, as by "
            f".astype(np.{narrow[0]}), or set precision.params: float64, which enables 64-bit"
        )


def first_example(dataset: Dataset) -> dict[str, np.ndarray]:
    """Return the first example [1, ...]."""
    return dataset.read(np.zeros(1, np.int64))


def probes(dataset: Dataset) -> np.ndarray:
    """Return the indices of at most 64 evenly spread examples; of a stream, those of its first
    examples.
    """
    size = getattr(dataset, "read_ahead", len(dataset))
    count = min(PROBES, size)
    return np.arange(count, dtype=np.int64) * size // count


def class_names(dataset: Dataset) -> list[str]:
    """Return the dataset's `class_names`, or nothing."""
    names = getattr(dataset, "class_names", None)
    return [str(name) for name in names] if isinstance(names, list | tuple) else []


def tokenizer_spec(dataset: Dataset) -> dict[str, Any] | None:
    """Return the spec of the dataset's tokenizer as JSON, or None; without building one that is
    made on demand.
    """
    spec = getattr(dataset, "tokenizer_spec", None)
    if spec is None and getattr(dataset, "tokenizer", None) is not None:
        spec = dataset.tokenizer.spec()  # type: ignore[attr-defined]
    return spec


def fingerprint(dataset: Dataset, whole: bool = False) -> str:
    """Return 16 hex digits of a SHA-256 over the class name, the length, and the keys, dtypes,
    shapes and little-endian bytes of at most 64 evenly spread examples. Equal for two runs that
    read the same data.

    whole: read all examples of arrays in memory.
    """
    digest = hashlib.sha256(
        f"{type(getattr(dataset, 'source', dataset)).__name__} {len(dataset)}".encode()
    )
    examples = dict(dataset.read(probes(dataset)))
    if whole and isinstance(dataset, Arrays):
        examples |= {
            key: value for key, value in dataset.arrays.items() if not isinstance(value, np.memmap)
        }
    update(digest, examples)
    return digest.hexdigest()[:16]


def update(digest: Any, examples: Mapping[str, Any]) -> None:
    """Add the names, dtypes, shapes and little-endian bytes of stacked examples to a digest."""
    for key, value in sorted(examples.items()):
        value = np.asarray(value)
        digest.update(f"\n{key} {value.dtype.name} {value.shape}\n".encode())
        digest.update(value.astype(value.dtype.newbyteorder("<")).tobytes())


def _is_array(part: Any) -> bool:
    """Return True for an array with a first dim, and for a non-empty list of numbers or lists."""
    return bool(getattr(part, "shape", ())) or (
        isinstance(part, list) and bool(part) and isinstance(part[0], int | float | list)
    )


def _array(name: str, value: Any, narrow: bool = True) -> np.ndarray:
    """Return `value` as an array of numbers; int64 becomes int32 if all values fit and `narrow`.
    Raises UsageError.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        raise UsageError(f"data: {name} is ragged; pad it to one shape before it is read") from None
    if np.ma.is_masked(value):
        raise UsageError(
            f"data: {name} has masked entries; fill them, as by .filled(0), and give a loss their mask"
        )
    in_file = isinstance(value, np.memmap)  # may be larger than the memory
    array = _check_numbers(
        name, array if in_file else array.astype(array.dtype.newbyteorder("="), copy=False)
    )
    return array.astype(np.int32) if narrow and not in_file and fits_int32(array) else array


def _check_numbers(name: str, array: np.ndarray) -> np.ndarray:
    """Return the array. Raises UsageError if it has another dtype than a number's."""
    if array.dtype.kind not in "biufc" and not array.dtype.name.startswith(
        ("bfloat16", "float", "int", "uint")
    ):
        raise UsageError(f"data: {name} is {array.dtype}, not numbers; encode it before it is read")
    if not array.dtype.isnative or array.dtype.name in ("float128", "complex256"):
        raise UsageError(
            f"data: {name} is {array.dtype.str}, which JAX lacks; cast it, as by .astype(np.float32)"
        )
    return array


def fits_int32(array: np.ndarray) -> bool:
    """Return whether an array is int64, and its values are those of int32."""
    return array.dtype == np.int64 and bool((array == array.astype(np.int32)).all())
