"""One thread reads ahead of the step: reading hides behind computing, and a reader's fault is the consumer's.

Threads do not inherit JAX's thread-local settings (`with jax.enable_x64(): ...`); what `make` needs of these must be
set globally, with `jax.config.update`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from jaxdp.data.base import Dataset
from jaxdp.data.cursor import RESET, Order
from jaxdp.errors import UsageError

T = TypeVar("T")
GRACE_S = 10.0  # a read that hangs on a lost file system must not keep a run from ending


@contextmanager
def prefetch(make: Callable[[int], T], start: int, stop: int, depth: int = 2) -> Iterator[Iterator[T]]:
    """Iterates over `make(start), ..., make(stop - 1)`, in order, with at most `depth` made or being made ahead.

        with prefetch(make, start, stop) as batches:
            for batch in batches: ...

    depth: 0 makes each item when it is asked for, without a thread. What `make` raises is raised by the iterator, the
    same object with its traceback, after the items before it. Leaving the context ends the thread; it waits for a
    `make` that is under way, at most `GRACE_S` seconds.
    """
    if depth < 1:
        yield (make(step) for step in range(start, stop))
        return
    changed = threading.Condition()
    ready: deque[T] = deque()
    fault: list[BaseException] = []
    left = ended = False

    def read_ahead() -> None:
        nonlocal ended
        try:
            for step in range(start, stop):
                with changed:
                    changed.wait_for(lambda: left or len(ready) < depth)
                    if left:
                        return
                item = make(step)
                with changed:
                    ready.append(item)
                    changed.notify_all()
                del item  # or this frame would keep one batch more than `depth` alive
        except BaseException as error:
            fault.append(error)
        finally:
            with changed:
                ended = True
                changed.notify_all()

    def consume() -> Iterator[T]:
        while True:
            with changed:
                changed.wait_for(lambda: left or ended or ready)
                if left or not ready:
                    break
                item = ready.popleft()
                changed.notify_all()
            yield item
            del item
        if fault and not left:
            raise fault[0]

    thread = threading.Thread(target=read_ahead, name="jaxdp-prefetch", daemon=True)
    thread.start()
    try:
        yield consume()
    finally:
        with changed:
            left = True
            changed.notify_all()
        thread.join(GRACE_S)


def read_batch(dataset: Dataset, cursor: Order, step: int, slots: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
    """The step's rows in `slots`, in one `dataset.read`: each value [slot, E, ...], and "mask"[slot, E] float32.

    The mask is 1 for a real row and 0 for padding (see `Order.rows`). Where the dataset gives a "mask" of its own (of
    tokens, say), it is multiplied by ours, in its own shape. Of a sequential order there is also "reset"[slot, E] bool:
    where what the model carries begins anew, at an epoch's begin and where the dataset says so. Raises UsageError where
    `read` gives something other than a dict of arrays with one entry an index.
    """
    indices, rows = cursor.rows(step, slots)
    if rows.all():
        values = _read(dataset, indices.reshape(-1))
    else:  # padding repeats one example, which may be costly to read: read it once
        distinct, places = np.unique(indices.reshape(-1), return_inverse=True)
        values = {key: value[places] for key, value in _read(dataset, distinct).items()}
    batch = {key: value.reshape(*rows.shape, *value.shape[1:]) for key, value in values.items()}
    mask = rows.astype(np.float32)
    own = batch.get("mask")
    if own is not None:
        kind = own.dtype if np.issubdtype(own.dtype, np.floating) else np.float32
        mask = own.astype(kind) * rows.reshape(*rows.shape, *[1] * (own.ndim - 2))
    if cursor.sequential:
        begin = np.full(rows.shape, cursor.begins(step))
        batch[RESET] = begin | (batch[RESET].reshape(rows.shape) != 0) if RESET in batch else begin
    return {**batch, "mask": mask}


def _read(dataset: Dataset, indices: np.ndarray) -> dict[str, np.ndarray]:
    values = dataset.read(indices)
    name = type(dataset).__name__
    if not isinstance(values, Mapping):
        raise UsageError(f"data: {name}.read gave a {type(values).__name__}; return a dict of arrays")
    arrays = {key: np.asarray(value) for key, value in values.items()}
    for key, value in arrays.items():
        if value.shape[:1] != indices.shape:
            raise UsageError(
                f"data: {name}.read gave {key!r} of shape {value.shape} for {len(indices)} indices; "
                "stack one entry an index along the first dim"
            )
    return arrays
