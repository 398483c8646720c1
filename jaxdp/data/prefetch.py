"""Prefetching: a thread reads batches while the device computes, and re-raises read errors in the
training loop.

Threads do not inherit JAX's thread-local settings (`with jax.enable_x64(): ...`); set those that
`make` needs globally, with `jax.config.update`.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from jaxdp.data.dataset import Dataset, read_examples, replace_masked
from jaxdp.data.example_order import RESET, ExampleOrder

S = TypeVar("S")
T = TypeVar("T")
GRACE_S = 10.0  # a read that hangs on a lost file system must not block the end of a run


@contextmanager
def prefetch(make: Callable[[S], T], steps: Iterable[S], depth: int = 2) -> Iterator[Iterator[T]]:
    """Iterate over `make(step)` for each step in order, computing at most `depth` items ahead in a
    thread.

        with prefetch(make, range(start, stop)) as batches:
            for batch in batches: ...

    The iterator raises the exception of `make` (the same object, with its traceback) after the
    items before it. Leaving the context ends the thread; it waits at most `GRACE_S` seconds for a
    running `make`."""
    ready: queue.SimpleQueue[Any] = (
        queue.SimpleQueue()
    )  # (item,) for each step, then an exception or None
    room, closed = threading.Semaphore(depth), threading.Event()

    def read_ahead() -> None:
        try:
            for step in steps:
                room.acquire()
                if closed.is_set():
                    return
                ready.put((make(step),))
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    def consume() -> Iterator[T]:
        while not closed.is_set() and (entry := ready.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            room.release()
            yield entry[0]
            del entry  # otherwise this frame would keep one more batch than `depth` alive

    thread = threading.Thread(target=read_ahead, name="jaxdp-prefetch", daemon=True)
    thread.start()
    try:
        yield consume()
    finally:
        closed.set()
        room.release()
        thread.join(GRACE_S)


def read_batch(
    dataset: Dataset, order: ExampleOrder, step: int, numbers: Sequence[int] | np.ndarray
) -> dict[str, np.ndarray]:
    """Return one step's local microbatches, {name: [local, E, ...]}, with the mask; see
    `read_batches`.
    """
    return {key: value[0] for key, value in read_batches(dataset, order, [step], numbers).items()}


def read_batches(
    dataset: Dataset, order: ExampleOrder, steps: Sequence[int], numbers: Sequence[int] | np.ndarray
) -> dict[str, np.ndarray]:
    """Return several steps' local microbatches, {name: [step, local, E, ...]}, from one
    `dataset.read`; of a stream, from one for each step.

    "mask"[step, local, E] is float32, 1 for a real row and 0 for padding; a "mask" from the dataset
    (of tokens, say) is multiplied by it and keeps its own shape; an example that it excludes is
    replaced. "reset"[step, local, E] is bool, True where the model's carried state is reset: a
    sequential order resets at the start of an epoch and where the dataset's "reset" is nonzero; any
    other order has the entry only if the dataset has one, and also resets at step 0. Raises
    UsageError if `read` does not return a dict of arrays with one entry per index."""
    if hasattr(
        dataset, "require"
    ):  # a stream, whose window would grow to an epoch in one read over the end of it
        if len(steps) > 1:
            parts = [read_batches(dataset, order, [step], numbers) for step in steps]
            return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        dataset.require(order.batch(steps[0]))
    indices, rows = (np.stack(part) for part in zip(*(order.rows(step, numbers) for step in steps)))
    if rows.all():
        values = replace_masked(read_examples(dataset, indices.reshape(-1)))
    else:  # read the example that padding repeats only once
        distinct, inverse = np.unique(indices.reshape(-1), return_inverse=True)
        distinct_values = replace_masked(read_examples(dataset, distinct))
        values = {key: value[inverse] for key, value in distinct_values.items()}
    batch = {key: value.reshape(*rows.shape, *value.shape[1:]) for key, value in values.items()}
    mask = rows.astype(np.float32)
    data_mask = batch.get("mask")
    if data_mask is not None:
        dtype = data_mask.dtype if np.issubdtype(data_mask.dtype, np.floating) else np.float32
        mask = data_mask.astype(dtype) * rows.reshape(
            *rows.shape, *[1] * (data_mask.ndim - rows.ndim)
        )
    data_reset = batch.get(RESET)
    if order.sequential or (data_reset is not None and data_reset.size == rows.size):
        begins = order.begins if order.sequential else lambda step: step == 0
        reset = np.stack([np.full(rows.shape[1:], begins(step)) for step in steps])
        batch[RESET] = (
            reset if data_reset is None else reset | (data_reset.reshape(rows.shape) != 0)
        )
    return {**batch, "mask": mask}
