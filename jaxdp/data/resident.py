"""Resident data sets: replicate a small data set on the devices, send only indices, and gather
batches there.
"""

import functools
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing
from typing import Any

import jax
import numpy as np

from jaxdp.data.dataset import Arrays, Dataset, first_example, read_examples
from jaxdp.data.example_order import RESET, ExampleOrder
from jaxdp.data.prefetch import mask_padding, read_ahead, read_batches
from jaxdp.errors import UsageError

# the largest fraction of a device's free memory, or of the host's, that the data set may take
SHARE = 0.5
INDEX = "index"


class Resident:
    """A data set replicated on each device of this process. strategy: a `jaxdp.parallel.Strategy`.

    Raises UsageError if it would take more than half of a device's free memory.
    """

    def __init__(self, dataset: Dataset, strategy: Any):
        size = len(dataset)
        taken = size * sum(np.asarray(x).nbytes for x in first_example(dataset).values())
        local = [d for d in strategy.devices if d.process_index == jax.process_index()]
        stats = local[0].memory_stats() or {}
        if "bytes_limit" in stats:
            most = SHARE * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))
        else:  # CPU devices: each has a copy in the host's memory
            most = SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / len(local)
        if taken > most:
            raise UsageError(
                f"data.on_device: {size:,} examples take {taken / 1e9:.1f} GB on each device, more than half of "
                f"its free memory ({most / SHARE / 1e9:.1f} GB); set it to false"
            )
        arrays = read_examples(dataset, np.arange(size))
        self.arrays = strategy.replicate(arrays)
        self.strategy = strategy
        indices: dict[str, Any] = {INDEX: np.arange(size, dtype=np.int32)}
        if RESET in arrays and arrays[RESET].size == size:
            indices[RESET] = arrays[RESET].reshape(size)
        if "mask" in arrays:  # of whole examples: those that it excludes are replaced
            indices["mask"] = (arrays["mask"] != 0).reshape(size, -1).any(1)
        self.indices = Arrays(**indices)
        self.gather = functools.cache(
            lambda to: jax.jit(gather, out_shardings=to) if to else jax.jit(gather)
        )

    def batches(self, order: ExampleOrder, groups: Iterable[range]) -> AbstractContextManager[Any]:
        """Iterate over (steps, their batch, or batches[step, ...] if they are several), gathered
        ahead of use.
        """

        def make(steps: range) -> tuple[range, dict[str, jax.Array]]:
            selection = read_batches(self.indices, order, steps, self.strategy.local_microbatches)
            at = self.strategy.shard_batch(selection, len(steps) > 1)
            return steps, self.gather(getattr(at[INDEX], "sharding", None))(self.arrays, at)

        return closing(read_ahead(make, groups))


def gather(arrays: dict[str, jax.Array], at: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the batch that `read_batches` would return: arrays[example, ...] at at["index"],
    masked by at["mask"].
    """
    batch = {key: x.at[at[INDEX]].get(mode="promise_in_bounds") for key, x in arrays.items()}
    if RESET in at:
        batch[RESET] = at[RESET]
    return {**batch, "mask": mask_padding(batch.get("mask"), at["mask"])}
