"""Worker processes that prefetch: worker w of N reads every N-th batch, so batches stay a pure
function of the step.

Uses plain processes and pipes instead of grain's `mp_prefetch` (0.2.18): grain's workers outlive a
killed parent, print and leak shared memory on a SIGTERM to the process group, each import jax, and
need absl's flags parsed in the parent."""

import atexit
import contextlib
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

from jaxdp.data.dataset import Batch, Dataset
from jaxdp.data.example_order import ExampleOrder
from jaxdp.data.prefetch import read_ahead, read_batches, stack
from jaxdp.errors import RunFailed, UsageError, one_line
from jaxdp.process import imports
from jaxdp.process.signals import NUMBERS

Reader = tuple[Callable[[range], Batch], Callable[[], None]]
"""(A function that returns the batch of steps, a function that kills all workers.)"""


@contextmanager
def prefetch_in_workers(
    dataset: Dataset,
    order: ExampleOrder,
    numbers: Sequence[int] | np.ndarray,
    steps: range,
    workers: int,
    then: Callable[[range, Batch], Any] = lambda steps, batch: batch,
    groups: Iterable[range] | None = None,
) -> Iterator[Iterator[Any]]:
    """Read `read_batches(dataset, order, [step], numbers)` ahead in `workers` processes.

    Each worker is a new interpreter (spawn) with a pickled copy of the dataset; pickling is cheap
    if the dataset reopens its files when it is unpickled. A worker keeps one batch ready; more are
    received ahead (`read_ahead`). The iterator raises a worker's exception after the batches before
    it, with the worker's traceback as a note, and RunFailed for a killed worker. Workers ignore the
    signals that ask a run to end, are killed when the context is left, exit when this process dies,
    and never use an accelerator.

    groups: the `steps` in order, in ranges, by default of one each; a range of several becomes one
    item, as returned by `read_batches`. then(steps, batch): applied to each item in this process,
    also ahead of use.

    Raises UsageError if the dataset cannot be pickled.
    """
    with _pool(_pickled(dataset), order, numbers, steps, workers) as (read, end):
        batches = read_ahead(lambda steps: then(steps, read(steps)), groups or single_steps(steps))
        try:
            yield batches
        finally:
            end()  # kill the workers first: prefetch waits for its thread, which waits for a worker
            batches.close()


def single_steps(steps: range) -> Iterator[range]:
    return (range(step, step + 1) for step in steps)


@contextmanager
def _pool(
    dataset: bytes, order: ExampleOrder, numbers: Any, steps: range, workers: int
) -> Iterator[Reader]:
    """Start the workers; yield their reader."""
    context = multiprocessing.get_context("spawn")
    count = min(workers, len(steps))
    pool: list[tuple[Any, Connection]] = []

    def receive(step: int) -> Batch:
        worker = (step - steps.start) % count
        process, pipe = pool[worker]
        try:
            batch = pipe.recv()
        except (EOFError, OSError):
            process.join(1)
            hint = (
                'see its output; a script must start its work below `if __name__ == "__main__":`'
                if process.exitcode == 1
                else f"is there enough memory for {count}?"
            )
            raise RunFailed(
                f"data.workers: worker {worker} of {count} ended with code {process.exitcode} while it read step "
                f"{step}; {hint}"
            ) from None
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def end() -> None:
        for process, _ in pool:
            process.kill()

    # Runs before multiprocessing terminates the workers, a signal they ignore, and joins them.
    atexit.register(end)
    try:
        with _signals_blocked():
            for worker in range(count):
                pipe, far = context.Pipe(duplex=False)
                args = (far, dataset, order, np.asarray(numbers), steps[worker::count])
                process = context.Process(
                    target=_work, args=args, name=f"jaxdp-worker-{worker}", daemon=True
                )
                process.start()
                far.close()  # so that the pipe closes when the worker ends
                pool.append((process, pipe))
        yield lambda steps: stack([receive(step) for step in steps]), end
    finally:
        end()
        atexit.unregister(end)
        for process, pipe in pool:
            process.join()
            pipe.close()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals that ask a run to end in processes started inside: a child inherits the
    signal mask.

    This process still receives them, in its other threads or after the context.
    """
    safe = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = (
        "1"  # else a new process finds its first modules in the working directory
    )
    # otherwise the first process starts it, which unblocks signals
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        os.environ |= {} if safe is None else {"PYTHONSAFEPATH": safe}
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _work(
    pipe: Connection, pickled: bytes, order: ExampleOrder, numbers: np.ndarray, steps: range
) -> None:
    """Read and send batches until killed, or until the parent has ended; runs in a worker."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.pop("PYTHONSAFEPATH", None)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # imported by the main module, before JAX_PLATFORMS was set
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    step = None
    try:
        dataset = imports.for_user(pickle.loads, pickled)
        for step in steps:
            pipe.send(read_batches(dataset, order, [step], numbers))
    except BrokenPipeError:
        pass
    except BaseException as error:
        error.add_note(
            f"in {multiprocessing.current_process().name}, at step {step}:\n{traceback.format_exc()}"
        )
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(_dumps_error(error))
    # everything is sent but perhaps not yet received: wait for the parent to kill this worker
    threading.Event().wait()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _dumps_error(error: BaseException) -> bytes:
    try:
        content = pickle.dumps(error)
        pickle.loads(content)
    except Exception:  # a user-defined exception may not be picklable
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
