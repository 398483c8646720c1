"""Processes that read ahead: worker w of N reads every N-th batch, so that batches stay a pure function of the step.

Plain processes and pipes. grain's own (`mp_prefetch`, 0.2.18) was tried: its workers outlive a parent that is killed,
SIGTERM to the process group makes them print and leaves shared memory behind, each imports jax, and absl's flags have
to be parsed in the parent.
"""

import atexit
import contextlib
import fcntl
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from jaxdp.data.base import Dataset
from jaxdp.data.cursor import Order
from jaxdp.data.prefetch import prefetch, read_batch, read_batches
from jaxdp.errors import RunFailed, UsageError, one_line
from jaxdp.supervise.signals import NUMBERS

Batch = dict[str, np.ndarray]
Steps = int | range  # one, or several in a row


@contextmanager
def prefetch_in_workers(
    dataset: Dataset,
    cursor: Order,
    slots: Sequence[int] | np.ndarray,
    start: int,
    stop: int,
    workers: int,
    depth: int = 2,
    then: Callable[[Steps, Batch], Any] = lambda steps, batch: batch,
    groups: Iterable[Steps] | None = None,
) -> Iterator[Iterator[Any]]:
    """As `prefetch` of `read_batch(dataset, cursor, step, slots)`, read by so many processes; 0 reads in a thread.

    Each worker is a new interpreter (spawn) that is sent a pickled copy of the dataset: one that opens its files anew
    when it is unpickled costs little. It holds one batch that is ready; `depth` more are received ahead. What a worker
    raises is raised by the iterator, after the batches before it, with a note of the worker's own traceback; one that
    is killed is a RunFailed. Workers hear no signal that asks a run to end, and are killed when the context is left;
    when this process dies in any way, they end by themselves. They never use an accelerator.

    groups: the steps from `start` to `stop`, in order, each by itself or several as a range; the batches of a range
    are one item, as of `read_batches`. then(steps, batch): what is done with an item in this process, ahead too.

    Raises UsageError where the dataset cannot be pickled.
    """
    items = range(start, stop) if groups is None else groups
    if workers < 1:
        with prefetch(lambda steps: then(steps, _read(dataset, cursor, steps, slots)), items, depth) as batches:
            yield batches
        return
    with (
        _pool(_pickled(dataset), cursor, slots, start, stop, workers) as (receive, end),
        prefetch(lambda steps: then(steps, _together(receive, steps)), items, max(1, depth)) as batches,
    ):
        try:
            yield batches
        finally:
            end()  # before prefetch waits for its thread, which waits for a worker


def _read(dataset: Dataset, cursor: Order, steps: Steps, slots: Any) -> Batch:
    read: Callable[..., Batch] = read_batches if isinstance(steps, range) else read_batch
    try:
        return read(dataset, cursor, steps, slots)
    except Exception as error:
        first, several = (steps.start, f" to {steps[-1]}") if isinstance(steps, range) else (steps, "")
        error.add_note(f"as the batch of step {first}{several} was read, counted from 0")
        raise


def _together(receive: Callable[[int], Batch], steps: Steps) -> Batch:
    if isinstance(steps, int):
        return receive(steps)
    batches = [receive(step) for step in steps]
    return {key: np.stack([batch[key] for batch in batches]) for key in batches[0]}


@contextmanager
def _pool(
    dataset: bytes, cursor: Order, slots: Any, start: int, stop: int, workers: int
) -> Iterator[tuple[Callable[[int], Batch], Callable[[], None]]]:
    """(receive the batch of a step, end all workers)."""
    context = multiprocessing.get_context("spawn")
    count = min(workers, max(0, stop - start))
    processes: list[Any] = []
    pipes: list[Connection] = []

    def receive(step: int) -> Batch:
        worker = (step - start) % count
        try:
            return _receive(pipes[worker])
        except (EOFError, OSError):
            processes[worker].join(1)
            code = processes[worker].exitcode
            hint = (
                'see what it printed; a script must begin what it does below `if __name__ == "__main__":`'
                if code == 1
                else f"is there enough memory for {count}?"
            )
            raise RunFailed(
                f"data.workers: worker {worker} of {count} ended with code {code} while it read step {step}; {hint}"
            ) from None

    def end() -> None:
        for process in processes:
            process.kill()

    atexit.register(end)  # before multiprocessing asks them to end, which they do not hear, and waits
    try:
        with _deaf():
            for worker in range(count):
                pipe, far = context.Pipe(duplex=False)
                _widen(pipe)
                args = (far, dataset, cursor, np.asarray(slots), range(start + worker, stop, count))
                process = context.Process(target=_work, args=args, name=f"jaxdp-worker-{worker}", daemon=True)
                process.start()
                far.close()  # so that the pipe ends with the worker
                processes.append(process)
                pipes.append(pipe)
        yield receive, end
    finally:
        end()
        atexit.unregister(end)
        for process in processes:
            process.join()
        for pipe in pipes:
            pipe.close()


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes started here never hear the signals that ask a run to end: a blocked signal stays so in a child.

    Meanwhile they reach this process by its other threads, or a moment later.
    """
    resource_tracker.ensure_running()  # multiprocessing starts it beside the first process, and unblocks signals then
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection, pickled: bytes, cursor: Order, slots: np.ndarray, steps: range) -> None:
    """What a worker does: reads and sends until it is killed, or its parent has gone."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # by the main module; what was imported has read its environment
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    step = None
    try:
        dataset = pickle.loads(pickled)
        for step in steps:
            _send(pipe, read_batch(dataset, cursor, step, slots))
    except BrokenPipeError:
        pass
    except BaseException as error:
        error.add_note(f"in {multiprocessing.current_process().name}, at step {step}:\n{traceback.format_exc()}")
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(_dumps_error(error))
    threading.Event().wait()  # all is sent, but perhaps not yet received: the parent ends it


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _send(pipe: Connection, batch: Batch) -> None:
    """A header, then each array's bytes as they lie in memory."""
    arrays = {key: np.ascontiguousarray(value) for key, value in batch.items()}
    pipe.send_bytes(pickle.dumps({key: (value.shape, value.dtype) for key, value in arrays.items()}))
    for value in arrays.values():
        left = _memory(value)
        while left:
            left = left[os.write(pipe.fileno(), left) :]


def _receive(pipe: Connection) -> Batch:
    header = pickle.loads(pipe.recv_bytes())
    if isinstance(header, BaseException):
        raise header
    batch = {key: np.empty(shape, dtype) for key, (shape, dtype) in header.items()}
    for value in batch.values():
        left = _memory(value)
        while left:
            if not (size := os.readv(pipe.fileno(), [left])):
                raise EOFError
            left = left[size:]
    return batch


def _memory(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")


def _widen(pipe: Connection) -> None:
    """Fewer turns a batch: 1 MiB at a time, where the system lets a pipe hold as much, instead of 64 KiB."""
    with contextlib.suppress(AttributeError, OSError):
        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, 1 << 20)


def _dumps_error(error: BaseException) -> bytes:
    try:
        content = pickle.dumps(error)
        pickle.loads(content)
    except Exception:  # an exception of its own making need not survive that
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.__notes__ = error.__notes__
        return pickle.dumps(plain)
    return content


def _pickled(dataset: Dataset) -> bytes:
    try:
        return pickle.dumps(dataset, protocol=5)
    except Exception as error:
        raise UsageError(
            f"data.workers: {type(dataset).__name__} cannot be sent to another process ({one_line(error)}); define it "
            "in a module, without open files or lambdas, or set data.workers to 0"
        ) from None
