"""Partitioning of batches over the ranks row by row, so that together they see the batches of one
process.

`DistributedSampler` selects this rank's indices for an existing data loader.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp.data.dataset import UNKNOWN, Arrays, Dataset, Examples, as_dataset, fingerprint
from jaxdp.data.example_order import EpochOrder, ExampleOrder, order_of, permute
from jaxdp.errors import UsageError
from jaxdp.process import protocol
from jaxdp.process.context import joined

Rows = dict[str, np.ndarray]


@dataclasses.dataclass(eq=False)
class Partition:
    """This rank's rows of every batch; each iteration is an epoch. Built by `partition_dataset`.

    form: see `_form`. numbers: of this rank's parts of a batch, among those of all ranks.
    per_device: a batch is split over the rank's devices. share: the fractions of a batch where this
    rank's part begins and ends; None: it gets equal parts. epoch: of the next iteration.
    """

    dataset: Dataset
    form: Callable[[Rows], Any]
    order: ExampleOrder
    numbers: np.ndarray
    per_device: bool
    share: np.ndarray | None
    epoch: int = 0

    def __len__(self) -> int:
        """Return the number of batches in an epoch, the same on every rank."""
        return self.order.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        first = epoch * len(self)
        return map(self._batch, range(first, first + len(self)))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; later iterations continue with the following epochs."""
        self.epoch = check_epoch(epoch)

    def _batch(self, step: int) -> Any:
        if self.share is not None:
            batch = self.order.batch(step)
            first, last = np.round(self.share * len(batch)).astype(int)
            return self._read(batch[first:last], batch)
        indices, mask = self.order.rows(step, self.numbers)
        if not self.per_device:
            return self._read(indices[mask], indices[0])
        rows = self.dataset.read(indices.reshape(-1))
        by_device = {key: x.reshape(*indices.shape, *x.shape[1:]) for key, x in rows.items()}
        return self.form(by_device), mask

    def _read(self, local: np.ndarray, batch: np.ndarray) -> Any:
        # never read zero rows from a dataset
        rows = self.dataset.read(local if len(local) else batch[:1])
        return self.form({key: x[: len(local)] for key, x in rows.items()})


def partition_dataset(
    dataset: Any,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    *,
    devices: int | None = None,
    sizes: Sequence[float] | None = None,
) -> Partition:
    """Return an iterable over this rank's rows of each batch of `batch_size` examples over all
    ranks, epoch by epoch.

    dataset: a pair (inputs, labels) of arrays, a dict of arrays, one array, a sized sequence of
    examples, or a `jaxdp.data.dataset.Dataset`. A batch is stacked NumPy arrays[row, ...] in the
    structure of an example: a pair, a dict or one array. Row r of the batch goes to rank r % size:
    all ranks together see the batches that one process sees with the same seed, each example once
    per epoch. If size does not divide the rows, ranks differ by one row, and may have none in an
    epoch's last batch (arrays of 0 rows): weight each rank by its rows, `weight=len(labels)`.

    Each iteration is the next epoch, with a new order; `set_epoch` selects another. So iterate
    equally often on every rank. devices: split the batch over this number of devices on every rank,
    for `pmap`: the iterable then yields (batch[device, row, ...], mask[device, row]), always of the
    same shape; rows where the mask is False are padding.

    sizes: the share of each rank, such as [0.7, 0.2, 0.1]: rank r gets that part of each batch's
    rows, next to those of rank r - 1, instead of every size-th row. This is the PyTorch tutorial's
    DataPartitioner, batch by batch.

    All ranks call it together. Raises UsageError if their arguments differ (with rank and values),
    or 64 examples of arrays in memory, or the shapes and dtypes of other examples; or if a number
    is not positive. The partitioning of Horovod's and PyTorch's samplers, without repeated
    examples."""
    local = 1 if devices is None else devices
    check_integers({"batch_size": batch_size, "seed": seed, "devices": local})
    if local < 1:
        raise UsageError(f"devices: {devices} is not positive; set it to jax.local_device_count()")
    if devices is not None and sizes is not None:
        raise UsageError("sizes: the devices of a rank have equal shares; give sizes or devices")
    context, share = joined(), None
    source = as_dataset(dataset)
    if hasattr(source, "widen"):
        source.widen()
    form = _form(dataset, source)
    if len(source) >= UNKNOWN:
        raise UsageError(
            "dataset: a stream needs a size to be partitioned by epoch; give Stream(..., size=N)"
        )
    order = order_of(source, batch_size, context.size * local, seed, shuffle)
    if sizes is not None:
        share = check_sizes(sizes, context.size, batch_size)[context.rank :][:2]
    facts = {
        "examples": len(source),
        "an example": {
            name: f"{x.dtype}{list(x.shape[1:])}"
            for name, x in sorted(source.read(np.zeros(1, np.int64)).items())
        },
        "batch_size": batch_size,
        "seed": seed,
        "shuffle": shuffle,
        "devices": devices,
        "sizes": None if sizes is None else [*map(float, sizes)],
    }
    if isinstance(source, Arrays):  # another data set may augment its examples when they are read
        facts["the arrays' fingerprint"] = fingerprint(source)
    context.check_same(
        "partition_dataset", {k: str(v) for k, v in facts.items()}, protocol.default_timeout()
    )
    numbers = context.rank * local + np.arange(local)
    return Partition(source, form, order, numbers, devices is not None, share)


def check_epoch(epoch: int) -> int:
    if not isinstance(epoch, int | np.integer) or epoch < 0:
        raise UsageError(f"epoch: {epoch!r} is not a whole number; the first one is 0")
    return epoch


def check_integers(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, int | np.integer):
            raise UsageError(f"{name}: {value!r} is not an integer; give one")


def check_sizes(sizes: Sequence[float], ranks: int, batch_size: int) -> np.ndarray:
    """Return the fractions of a batch where the ranks' parts begin, then 1. Raises UsageError that
    names the rank.
    """
    try:
        sizes = [*map(float, sizes)]
    except (TypeError, ValueError):
        raise UsageError(
            f"sizes: {sizes!r} is not a list of numbers; give the share of each rank"
        ) from None
    if len(sizes) != ranks:
        raise UsageError(
            f"sizes: {sizes} has {len(sizes)} entries for {ranks} ranks; give one for each rank"
        )
    for rank, size in enumerate(sizes):
        if not 0 < size <= 1:
            raise UsageError(
                f"sizes[{rank}]: {size:g} is not a part of a batch; give a number above 0, at most 1"
            )
    if abs(sum(sizes) - 1) > 1e-6:
        raise UsageError(f"sizes: {sizes} add up to {sum(sizes):g}; they must add up to 1")
    bounds = np.array([0, *np.cumsum(sizes)[:-1], 1])
    for rank, rows in enumerate(np.diff(np.round(bounds * batch_size))):
        if not rows:
            raise UsageError(
                f"sizes[{rank}]: {sizes[rank]} of {batch_size} examples is no row; make the batch larger"
            )
    return bounds


def _form(source: Any, dataset: Any) -> Callable[[Rows], Any]:
    """Return a function that gives stacked rows the structure of `source`'s examples."""
    example = source[0] if isinstance(dataset, Examples) and dataset is not source else source
    if dataset is source or isinstance(example, Mapping):
        return lambda rows: rows
    if isinstance(example, tuple) or (example is source and isinstance(source, list)):
        return lambda rows: (rows["inputs"], rows["labels"])
    return lambda rows: rows["inputs"]


class DistributedSampler:
    """This rank's indices of a dataset, the same number on every rank, like PyTorch's
    DistributedSampler.

    dataset_or_size: an object with a length, or the length. The rank gets every size-th index, from
    position `rank` on, of an order shuffled by seed and epoch. If size does not divide the length,
    the first indices of the order are repeated at its end; with drop_last, the last ones are
    dropped instead. Call `set_epoch` before each epoch, or the order stays the same. rank, size: by
    default those of `jaxdp.init()`.

    `batches` repeats and drops nothing. Raises UsageError without an example or such a rank, or for
    another number than an integer.
    """

    def __init__(
        self,
        dataset_or_size: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        size: int | None = None,
    ):
        context = joined()
        self.rank = context.rank if rank is None else rank
        self.size = context.size if size is None else size
        check_integers({"rank": self.rank, "size": self.size, "seed": seed})
        if not 0 <= self.rank < self.size:
            raise UsageError(
                f"rank: {self.rank} is not in [0, {self.size}), the ranks of size {self.size}; give both"
            )
        self.examples = length(dataset_or_size)
        if self.examples < 1:
            raise UsageError(f"dataset_or_size: {self.examples} examples; give at least one")
        self.shuffle, self.seed, self.drop_last, self.epoch = shuffle, seed, drop_last, 0

    def __len__(self) -> int:
        """Return the number of this rank's indices in an epoch, the same on every rank."""
        return self.examples // self.size if self.drop_last else -(-self.examples // self.size)

    def __iter__(self) -> Iterator[int]:
        position = (self.rank + self.size * np.arange(len(self))) % self.examples
        order = (
            permute(position, self.examples, self.seed, self.epoch) if self.shuffle else position
        )
        return iter(order.tolist())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that decides the order of the following iterations."""
        self.epoch = check_epoch(epoch)

    def batches(self, batch_size: int) -> "BatchSampler":
        """Return this rank's rows of each batch of `batch_size` examples over all ranks, as a
        `batch_sampler`.

        The batches and their number are those of `partition_dataset` with the same seed and epoch,
        the same on every rank. With drop_last, an incomplete last batch is dropped.
        """
        check_integers({"batch_size": batch_size})
        return BatchSampler(
            self, EpochOrder(self.examples, batch_size, self.size, self.seed, self.shuffle)
        )


def length(source: Any) -> int:
    """Return the number of examples of a data set, or the number itself. Raises UsageError for what
    has none.
    """
    # Such as (images, labels).
    few = isinstance(source, tuple | list) and len(source) < 9
    arrays = few and all(hasattr(x, "shape") for x in source)
    try:
        if arrays or isinstance(source, str | bytes | Mapping):
            raise TypeError
        return len(source) if isinstance(source, Sized) else operator.index(source)
    except TypeError:
        kind = type(source).__name__
        raise UsageError(
            f"dataset_or_size: the examples of a {kind} cannot be counted; give their number"
        ) from None


@dataclass(frozen=True)
class BatchSampler:
    """An iterable of index lists, one for each step of the sampler's epoch; the last one may be
    empty.
    """

    sampler: DistributedSampler
    order: EpochOrder

    def __len__(self) -> int:
        if self.sampler.drop_last:
            return self.order.size // self.order.batch_size
        return self.order.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        first = self.sampler.epoch * self.order.steps_per_epoch
        for step in range(first, first + len(self)):
            indices, mask = self.order.rows(step, [self.sampler.rank])
            yield indices[mask].tolist()
