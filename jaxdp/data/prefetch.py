"""One thread reads ahead of the step: reading hides behind computing, and a reader's fault is the consumer's.

Threads do not inherit JAX's thread-local settings (`with jax.enable_x64(): ...`); what `make` needs of these must be
set globally, with `jax.config.update`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from jaxdp.data.base import Dataset
from jaxdp.data.cursor import RESET, Order
from jaxdp.errors import UsageError

S = TypeVar("S")
T = TypeVar("T")
GRACE_S = 10.0  # a read that hangs on a lost file system must not keep a run from ending


@contextmanager
def prefetch(make: Callable[[S], T], steps: Iterable[S], depth: int = 2) -> Iterator[Iterator[T]]:
    """Iterates over `make(step)` of each of the steps, in order, with at most `depth` made or being made ahead.

        with prefetch(make, range(start, stop)) as batches:
            for batch in batches: ...

    depth: 0 makes each item when it is asked for, without a thread. What `make` raises is raised by the iterator, the
    same object with its traceback, after the items before it. Leaving the context ends the thread; it waits for a
    `make` that is under way, at most `GRACE_S` seconds.
    """
    if depth < 1:
        yield (make(step) for step in steps)
        return
    changed = threading.Condition()
    ready: deque[T] = deque()
    fault: list[BaseException] = []
    left = ended = False

    def read_ahead() -> None:
        nonlocal ended
        try:
            for step in steps:
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
    """The step's rows in `slots`: each value [slot, E, ...], and the mask; see `read_batches`."""
    return {key: value[0] for key, value in read_batches(dataset, cursor, [step], slots).items()}


def read_batches(
    dataset: Dataset, cursor: Order, steps: Sequence[int], slots: Sequence[int] | np.ndarray
) -> dict[str, np.ndarray]:
    """The steps' rows in `slots`, in one `dataset.read`: each value [step, slot, E, ...], and "mask"[step, slot, E].

    The mask is float32, 1 for a real row and 0 for padding (see `Order.rows`). Where the dataset gives a "mask" of its
    own (of tokens, say), it is multiplied by ours, in its own shape. Of a sequential order there is also
    "reset"[step, slot, E] bool: where what the model carries begins anew, at an epoch's begin and where the dataset
    says so. Of any other order there is one where the dataset gives one: step 0 begins anew. Raises UsageError where
    `read` gives something other than a dict of arrays with one entry an index.
    """
    indices, rows = places(cursor, steps, slots)
    if rows.all():
        values = _read(dataset, indices.reshape(-1))
    else:  # padding repeats one example, which may be costly to read: read it once
        distinct, again = np.unique(indices.reshape(-1), return_inverse=True)
        values = {key: value[again] for key, value in _read(dataset, distinct).items()}
    batch = {key: value.reshape(*rows.shape, *value.shape[1:]) for key, value in values.items()}
    mask = rows.astype(np.float32)
    own = batch.get("mask")
    if own is not None:
        kind = own.dtype if np.issubdtype(own.dtype, np.floating) else np.float32
        mask = own.astype(kind) * rows.reshape(*rows.shape, *[1] * (own.ndim - rows.ndim))
    own = batch.get(RESET)
    if (begin := begins(cursor, steps, rows.shape, own is not None and own.size == rows.size)) is not None:
        batch[RESET] = begin | (batch[RESET].reshape(rows.shape) != 0) if RESET in batch else begin
    return {**batch, "mask": mask}


def places(cursor: Order, steps: Sequence[int], slots: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`Order.rows` of some steps: (indices[step, slot, E], rows[step, slot, E])."""
    indices, rows = (np.stack(part) for part in zip(*(cursor.rows(step, slots) for step in steps)))
    return indices, rows


def begins(cursor: Order, steps: Sequence[int], shape: tuple[int, ...], own: bool) -> np.ndarray | None:
    """Where what the model carries begins anew because of the order, bool of a shape [step, slot, E]; None where it is
    not carried on. own: the dataset says so too, of each example."""
    if not cursor.sequential and not own:
        return None
    anew = cursor.begins if cursor.sequential else lambda step: step == 0
    return np.stack([np.full(shape[1:], anew(step)) for step in steps])


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
