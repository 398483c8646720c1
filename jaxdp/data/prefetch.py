"""Reading ahead: batches are read while the device computes, by the training loop itself if that is
short, else in a thread, whose errors are raised in the loop.

Threads do not inherit JAX's thread-local settings (`with jax.enable_x64(): ...`); set those that
`make` needs globally, with `jax.config.update`.
"""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxdp.data.dataset import Batch, Dataset, read_examples, replace_masked
from jaxdp.data.example_order import RESET, ExampleOrder

S = TypeVar("S")
T = TypeVar("T")
SHORT_S, FEW = 2e-3, 2  # after so many reads in a row that took longer, a thread takes over
GRACE_S = 10.0  # a read that hangs on a lost file system must not block the end of a run


def read_ahead(make: Callable[[S], T], steps: Iterable[S]) -> Generator[T, None, None]:
    """Yield `make(step)` for each step in order.

    The loop that iterates makes the items as long as that is short: the device has updates to
    compute meanwhile, and a thread would take the interpreter from the loop for each item. After two
    long ones in a row, `prefetch` makes them."""
    rest, long = iter(steps), 0
    for step in rest:
        began = time.perf_counter()
        item = make(step)
        long = long + 1 if time.perf_counter() - began > SHORT_S else 0
        yield item
        if long == FEW:
            yield from prefetch(make, rest)


def prefetch(make: Callable[[S], T], steps: Iterable[S]) -> Generator[T, None, None]:
    """Yield `make(step)` for each step in order, computing at most two items ahead in a thread.

    It raises the exception of `make` (the same object, with its traceback) after the items before
    it. Closing it ends the thread, and waits at most `GRACE_S` seconds for a running `make`.
    """
    # (item,) for each step, then an exception or None.
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    room, closed = threading.Semaphore(2), threading.Event()

    def work():
        try:
            for step in steps:
                room.acquire()
                if closed.is_set():
                    return
                ready.put((make(step),))
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=work, name="jaxdp-prefetch", daemon=True)
    thread.start()
    try:
        while (entry := ready.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            room.release()
            yield entry[0]
            del entry  # otherwise this frame would keep one more batch alive
    finally:
        closed.set()
        room.release()
        thread.join(GRACE_S)


def read_batches(
    dataset: Dataset, order: ExampleOrder, steps: Sequence[int], numbers: Sequence[int] | np.ndarray
) -> Batch:
    """Return several steps' local microbatches, {name: [step, local, E, ...]}, from one
    `dataset.read`; of a stream, from one for each step. Of a single step, without the first dim.

    "mask"[step, local, E] is float32, 1 for a real row and 0 for padding; a "mask" from the dataset
    (of tokens, say) is multiplied by it and keeps its own shape; an example that it excludes is
    replaced. "reset"[step, local, E] is bool, True where the model's carried state is reset: a
    sequential order resets at the start of an epoch and where the dataset's "reset" is nonzero; any
    other order has the entry only if the dataset has one, and also resets at step 0. Raises
    UsageError if `read` does not return a dict of arrays with one entry per index."""
    if hasattr(dataset, "require"):
        # The window of a stream would grow to an epoch in one read over the end of it.
        if len(steps) > 1:
            return stack([read_batches(dataset, order, [step], numbers) for step in steps])
        dataset.require(order.batch(steps[0]))
    indices, rows = map(np.array, zip(*(order.rows(step, numbers) for step in steps)))
    distinct = indices.reshape(-1)
    inverse: np.ndarray | slice = slice(None)
    if not rows.all():  # read the example that padding repeats only once
        distinct, inverse = np.unique(distinct, return_inverse=True)
    values = replace_masked(read_examples(dataset, distinct))
    batch = {
        key: value[inverse].reshape(*rows.shape, *value.shape[1:]) for key, value in values.items()
    }
    if order.sequential or (RESET in batch and batch[RESET].size == rows.size):
        begins = [not (order.place(step)[2] if order.sequential else step) for step in steps]
        resets = batch.get(RESET, np.zeros(rows.shape)).reshape(rows.shape) != 0
        batch[RESET] = resets | np.reshape(begins, (-1, 1, 1))
    batch["mask"] = mask_padding(batch.get("mask"), rows)
    return batch if len(steps) > 1 else {key: value[0] for key, value in batch.items()}


def read_noted(
    dataset: Dataset, order: ExampleOrder, numbers: Sequence[int] | np.ndarray, steps: range
) -> Batch:
    """Return `read_batches`; an error says which batch was read."""
    try:
        return read_batches(dataset, order, steps, numbers)
    except Exception as error:
        until = f" to {steps[-1]}" * (len(steps) > 1)
        error.add_note(f"as the batch of step {steps[0]}{until} was read, counted from 0")
        raise


def mask_padding(mask: Any, real: Any) -> Any:
    """Return the mask of examples, float32 or of its own floats: that of the data, if it has one, and
    0 where an example is not `real`[...]. Both are of NumPy or of JAX."""
    if mask is None:
        return real.astype(np.float32)
    dtype = mask.dtype if np.issubdtype(mask.dtype, np.floating) else np.float32
    real = real.reshape(*real.shape, *[1] * (mask.ndim - real.ndim))
    return mask.astype(dtype) * real.astype(dtype)


def stack(batches: Sequence[Batch]) -> Batch:
    """Return the batches of several steps as one, {name: [step, ...]}; a single one as it is."""
    first = batches[0]
    return {key: np.stack([x[key] for x in batches]) for key in first} if batches[1:] else first
