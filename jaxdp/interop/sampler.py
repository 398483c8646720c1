"""An index sampler that selects this rank's examples for an existing data loader."""

import operator
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp.data.example_order import EpochOrder, permute
from jaxdp.errors import UsageError
from jaxdp.interop.partition import check_epoch, check_integers
from jaxdp.process.context import joined


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
    arrays = isinstance(source, tuple) and all(
        hasattr(x, "shape") for x in source
    )  # such as (images, labels)
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
