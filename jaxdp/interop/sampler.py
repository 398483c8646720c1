"""An index sampler tells a loader of somebody else's which examples are this rank's."""

from collections.abc import Iterator, Sized
from dataclasses import dataclass

import numpy as np

from jaxdp.data.cursor import Cursor, permute
from jaxdp.distributed.context import joined
from jaxdp.errors import UsageError


class DistributedSampler:
    """This rank's indices of a data set, equally many on every rank, in the manner of PyTorch's DistributedSampler.

    dataset_or_size: anything with a length, or the length. Every size-th index from the rank-th on, of a shuffled order
    that the seed and the epoch give. Where size does not divide the length, the first ones of the order come once more
    at its end; with drop_last, the last ones are left out instead. Call `set_epoch` before each epoch: the order stays
    the same otherwise. rank, size: those of `jaxdp.init()` where left out.

    `batches` has nothing twice and leaves nothing out. Raises UsageError where there is no example or no such rank.
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
        if not 0 <= self.rank < self.size:
            raise UsageError(f"rank: {self.rank} is not in [0, {self.size}), the ranks of size {self.size}; give both")
        try:
            self.examples = len(dataset_or_size) if isinstance(dataset_or_size, Sized) else int(dataset_or_size)
        except TypeError:
            raise UsageError(
                f"dataset_or_size: {type(dataset_or_size).__name__} has no length; give a number"
            ) from None
        if self.examples < 1:
            raise UsageError(f"dataset_or_size: {self.examples} examples; give at least one")
        self.shuffle, self.seed, self.drop_last, self.epoch = shuffle, seed, drop_last, 0

    def __len__(self) -> int:
        """Indices of this rank in an epoch, the same number on every rank."""
        return self.examples // self.size if self.drop_last else -(-self.examples // self.size)

    def __iter__(self) -> Iterator[int]:
        position = (self.rank + self.size * np.arange(len(self))) % self.examples
        order = permute(position, self.examples, self.seed, self.epoch) if self.shuffle else position
        return iter(order.tolist())

    def set_epoch(self, epoch: int) -> None:
        """What is iterated over from now on is this epoch's order."""
        if epoch < 0:
            raise UsageError(f"epoch: {epoch} is negative; the first one is 0")
        self.epoch = epoch

    def batches(self, batch_size: int) -> "BatchSampler":
        """This rank's rows of each batch of `batch_size` examples over all ranks, for a loader's `batch_sampler`.

        The batches are those of `partition_dataset` with the same seed and epoch, and so is their number, the same on
        every rank. With drop_last the last batch is left out where it is not whole.
        """
        return BatchSampler(self, Cursor(self.examples, batch_size, self.size, self.seed, self.shuffle))


@dataclass(frozen=True)
class BatchSampler:
    """A list of indices for each step of the sampler's epoch: perhaps an empty one in the last batch."""

    sampler: DistributedSampler
    cursor: Cursor

    def __len__(self) -> int:
        if self.sampler.drop_last:
            return self.cursor.size // self.cursor.batch_size
        return self.cursor.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        first = self.sampler.epoch * self.cursor.steps_per_epoch
        for step in range(first, first + len(self)):
            indices, mask = self.cursor.rows(step, [self.sampler.rank])
            yield indices[mask].tolist()
