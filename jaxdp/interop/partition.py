"""A batch is dealt to the ranks row by row, so that together they see what one process would see."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxdp.data.base import Examples, as_dataset
from jaxdp.data.cursor import Cursor
from jaxdp.distributed.context import joined
from jaxdp.errors import UsageError

Rows = dict[str, np.ndarray]


class Partition:
    """This rank's rows of every batch, an epoch each time it is iterated over; made by `partition_dataset`."""

    def __init__(self, dataset: Any, batch_size: int, seed: int, shuffle: bool, devices: int | None):
        context, each = joined(), 1 if devices is None else devices
        self.dataset = as_dataset(dataset)
        self.form = _form(dataset, self.dataset)
        self.cursor = Cursor(len(self.dataset), batch_size, context.size * each, seed, shuffle)
        self.slots = context.rank * each + np.arange(each)
        self.dealt = devices is not None
        self.epoch = 0

    def __len__(self) -> int:
        """Batches in an epoch, the same number on every rank."""
        return self.cursor.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        first = epoch * len(self)
        return map(self._batch, range(first, first + len(self)))

    def set_epoch(self, epoch: int) -> None:
        """The next iteration goes over this epoch, and those after it over the following ones."""
        if epoch < 0:
            raise UsageError(f"epoch: {epoch} is negative; the first one is 0")
        self.epoch = epoch

    def _batch(self, step: int) -> Any:
        places, mask = self.cursor.rows(step, self.slots)
        if self.dealt:
            rows = self.dataset.read(places.reshape(-1))
            return self.form({key: x.reshape(*places.shape, *x.shape[1:]) for key, x in rows.items()}), mask
        own = places[mask]
        rows = self.dataset.read(own if len(own) else places[0, :1])  # no data set is asked for nothing
        return self.form({key: x[: len(own)] for key, x in rows.items()})


def partition_dataset(
    dataset: Any, batch_size: int, seed: int = 0, shuffle: bool = True, *, devices: int | None = None
) -> Partition:
    """This rank's rows of each batch of `batch_size` examples over all ranks, to be iterated over once an epoch.

    dataset: a pair (inputs, labels) of arrays, a dict of arrays, one array, a sized sequence of examples, or a
    `jaxdp.data.base.Dataset`. A batch is stacked NumPy arrays[row, ...] in the form of an example: a pair, a dict or
    one array. Row r of the batch goes to rank r % size: all ranks together see the batches that one process sees with
    the same seed, each example once an epoch. Where the rows do not come out even, ranks get one more or less, in an
    epoch's last batch perhaps none (arrays of 0 rows): let each count by its number of rows, `weight=len(labels)`.

    Each iteration is the next epoch, in an order of its own; `set_epoch` says which. So iterate equally often on every
    rank. devices: deals the batch to this number of devices on every rank, for `pmap`: what is iterated over is then
    (batch[device, place, ...], mask[device, place]), of one shape always; where the mask is False a place holds some
    example that does not count.

    All ranks call it together; UsageError where they disagree (it names rank and values), or where an argument is not
    positive. The partitioning of Horovod's and PyTorch's samplers, without their repeated examples.
    """
    if devices is not None and devices < 1:
        raise UsageError(f"devices: {devices} is not positive; set it to jax.local_device_count()")
    made = Partition(dataset, batch_size, seed, shuffle, devices)
    facts = {"examples": len(made.dataset), "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
    joined().check_same("partition_dataset", {k: str(v) for k, v in {**facts, "devices": devices}.items()})
    return made


def _form(source: Any, dataset: Any) -> Callable[[Rows], Any]:
    """What gives stacked rows the form in which `source`, read by `dataset`, has its examples."""
    example = source[0] if isinstance(dataset, Examples) else source
    if dataset is source or isinstance(example, Mapping):
        return lambda rows: rows
    if isinstance(example, tuple):
        return lambda rows: (rows["inputs"], rows["labels"])
    return lambda rows: rows["inputs"]
