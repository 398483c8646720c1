"""A small data set lives on the devices: a batch is sent there as places, and its examples are gathered there."""

import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data.base import Dataset
from jaxdp.data.cursor import RESET, Order
from jaxdp.data.prefetch import begins, places, prefetch
from jaxdp.data.workers import Steps
from jaxdp.errors import UsageError

SHARE = 0.5  # of a device's memory, and of what is free of the host's, at most
PIECE = 1 << 16  # examples that are read at once
INDEX, ROWS = "index", "rows"


class Places(Protocol):
    """What is used of a strategy."""

    devices: list[jax.Device]
    local_slots: np.ndarray

    def shard_batch(self, batch: dict[str, np.ndarray], several: bool = False) -> dict[str, jax.Array]: ...
    def replicate(self, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]: ...


class Resident:
    """The examples of a data set, whole on each device of this process.

    Raises UsageError where they would take more than half of its memory.
    """

    def __init__(self, dataset: Dataset, strategy: Places):
        check_size(dataset, strategy.devices)
        pieces = [dataset.read(np.arange(i, min(i + PIECE, len(dataset)))) for i in range(0, len(dataset), PIECE)]
        self.arrays = strategy.replicate({key: np.concatenate([p[key] for p in pieces]) for key in pieces[0]})
        self.strategy = strategy
        self.gather = functools.cache(lambda place: jax.jit(gather, out_shardings=place) if place else jax.jit(gather))

    @contextmanager
    def batches(self, cursor: Order, groups: Iterable[Steps]) -> Iterator[Iterator[Any]]:
        """As `prefetch_in_workers`: (steps, their batch, or batches[step, ...] of a range), gathered ahead."""

        def make(steps: Steps) -> tuple[Steps, dict[str, jax.Array]]:
            several = isinstance(steps, range)
            every = steps if isinstance(steps, range) else [steps]
            indices, rows = places(cursor, every, self.strategy.local_slots)
            own = self.arrays.get(RESET)
            begin = begins(cursor, every, rows.shape, own is not None and own.size == len(own))
            sent = {INDEX: indices.astype(np.int32), ROWS: rows} | ({} if begin is None else {RESET: begin})
            at = self.strategy.shard_batch(sent if several else {k: x[0] for k, x in sent.items()}, several)
            return steps, self.gather(getattr(at[INDEX], "sharding", None))(self.arrays, at)

        with prefetch(make, groups) as batches:
            yield batches


def gather(arrays: dict[str, jax.Array], at: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The batch that `read_batches` would give: arrays[example, ...] at index[...], with rows[...] for a mask."""
    batch = {key: x.at[at[INDEX]].get(mode="promise_in_bounds") for key, x in arrays.items()}
    mask, own = at[ROWS].astype(jnp.float32), batch.get("mask")
    if own is not None:
        kind = own.dtype if jnp.issubdtype(own.dtype, jnp.floating) else jnp.float32
        mask = own.astype(kind) * mask.reshape(*mask.shape, *[1] * (own.ndim - mask.ndim)).astype(kind)
    if RESET in at:
        batch[RESET] = at[RESET] | (batch[RESET].reshape(at[RESET].shape) != 0) if RESET in batch else at[RESET]
    return {**batch, "mask": mask}


def check_size(dataset: Dataset, devices: list[jax.Device]) -> None:
    """UsageError where the examples take too much of a device's memory."""
    first = dataset.read(np.zeros(1, np.int64))
    size = len(dataset) * sum(np.asarray(x).nbytes for x in first.values())
    own = [d for d in devices if d.process_index == jax.process_index()]
    stats = own[0].memory_stats() or {}
    if "bytes_limit" in stats:
        most = SHARE * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    else:  # devices of the host: each has a copy
        most = SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / len(own)
    if size > most:
        raise UsageError(
            f"data.on_device: {len(dataset):,} examples take {size / 1e9:.1f} GB on each device, more than half of "
            f"what is free ({most / SHARE / 1e9:.1f} GB); set it to false"
        )
