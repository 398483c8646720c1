"""The meter: convert device metrics to records in a separate thread, so that the loop does not wait
for the device; the throughput of a log interval, and the goodput of the full run.
"""

import contextlib
import dataclasses
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jaxdp.metrics.jsonl import read
from jaxdp.metrics.writer import Record, Writer
from jaxdp.train.observer import Observer
from jaxdp.train.state import make_record

LAST_WORDS = 2.0  # seconds that a failing run waits for its pending records
AHEAD = 2  # log intervals that the loop may run ahead of the device


class Mark(NamedTuple):
    """The start of a log interval: an update, when the device had finished it, and totals of the
    loop up to then.

    waited: seconds for data. excluded: the seconds of pauses."""

    step: int
    time: float
    waited: float
    excluded: float


@dataclasses.dataclass
class Meter(Observer):
    """Write a train record every `every` updates and at update `last`.

    per_example: entries of a record for one example per second; multiplied by the examples per second.
    more(milliseconds per update) and derive(means) return additional entries. The time per update
    is measured from one record's completion on the device to the next. It excludes what precedes
    the end of the first call of each program, which compiles, and the time between a pause and the
    wait for the next update's data. `input_wait` is an upper bound of the fraction of it in which
    the device idled, waiting for data."""

    writer: Writer
    every: int
    last: int
    per_example: Mapping[str, float]
    more: Callable[[float], Record] = lambda milliseconds: {}
    derive: Callable[[Record], Mapping[str, float]] = lambda means: {}

    def start(self, run: Any, progress: Any) -> None:
        self.order, self.offset = run.data.train.order, progress.offset
        self.since: Any = None  # a `Mark`, the start of the current interval
        self.sent: Any = None  # a result of the last call
        self.step = 0  # the last update of that call
        self.paused: float | None = None  # the start of a pause
        self.waits = 0.0  # the start of a wait for data
        self.shapes: set[tuple[int, ...]] = set()  # of masks; each has a program of its own
        self.waited = 0.0
        self.excluded = 0.0
        self.fault: BaseException | None = None
        self.destination = self.writer
        self.queue: queue.Queue[tuple[range, Any, Mark] | None] = queue.Queue(AHEAD)
        threading.Thread(target=self._work, name="meter", daemon=True).start()

    def mark(self, time: float) -> Mark:
        """Return the totals after the last call, whose results are ready at `time`."""
        return Mark(self.step, time, self.waited, self.excluded)

    def end(self, step: int) -> None:
        """Write the records that are ready. There are none after a run that has ended well, whose
        last pause has written them."""
        deadline = time.monotonic() + LAST_WORDS
        while self.queue.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        # A device that hangs must not block the end of the run. Its metrics may come later, when
        # another process of an elastic job has written them.
        self.destination = Writer()
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(None)

    def reading(self, step: int) -> None:
        """Begin a wait for data, which ends a pause."""
        self.waits = time.perf_counter()
        if self.paused is not None:
            self.excluded += self.waits - self.paused
            self.paused = None

    def before(self, updates: range, batch: Any) -> None:
        """Add the wait for data to the totals, unless the device was busy until the data arrived."""
        if self.sent is None or self.sent.is_ready():
            self.waited += time.perf_counter() - self.waits
        self.shape = batch["mask"].shape
        if self.shape not in self.shapes:
            # The records of earlier calls are complete before a new interval starts.
            jax.block_until_ready(self.sent)
            self.flush()

    def after(self, steps: range, state: Any, metrics: Mapping[str, jax.Array]) -> None:
        """Take the metrics of one device call for updates `steps`: [] for one update, [step] for
        several.
        """
        self.sent = metrics["loss"]
        self.step = steps[-1]
        if self.shape not in self.shapes:
            # Compilation and first run: excluded from the time per update.
            jax.block_until_ready(metrics)
            self.shapes.add(self.shape)
            self.since = self.mark(time.perf_counter())
        if self.step % self.every < len(steps) or self.step == self.last:
            self.queue.put((steps, metrics, self.mark(time.perf_counter())))
        if self.fault is not None:
            raise self.fault

    def flush(self) -> None:
        """Wait until everything is written."""
        self.queue.join()
        if self.fault is not None:
            raise self.fault

    def pause(self, step: int, last: bool) -> None:
        """Wait for the device and flush; stop the clock until the next update's data is requested."""
        jax.block_until_ready(self.sent)
        self.flush()
        if self.paused is None:
            self.paused = time.perf_counter()

    def _work(self) -> None:
        while (item := self.queue.get()) is not None:
            try:
                if self.fault is None:
                    steps, metrics, mark = item
                    metrics = jax.device_get(metrics)
                    self._records(steps, metrics, mark._replace(time=time.perf_counter()))
            except BaseException as fault:
                self.fault = fault
            finally:
                self.queue.task_done()

    def _records(self, steps: range, metrics: dict[str, Any], mark: Mark) -> None:
        """Write the records that are due among the updates of one call; they share the call's
        timing, up to `mark`.
        """
        since = self.since
        timing: Record = {}
        elapsed = mark.time - since.time - (mark.excluded - since.excluded)
        updates = mark.step - since.step
        if updates:
            seconds = elapsed / updates
            rate = self.order.average(mark.step - 1 + self.offset) / seconds
            waited = (mark.waited - since.waited) / elapsed
            timing = {
                "step_time_ms": 1e3 * seconds,
                "examples_per_s": rate,
                "input_wait": min(1.0, waited),
                **{name: x * rate for name, x in self.per_example.items()},
                **self.more(1e3 * seconds),
            }
            self.since = mark
        for i, step in enumerate(steps):
            if step % self.every and step != self.last:
                continue
            means = {k: v[i] if len(steps) > 1 else v for k, v in sorted(metrics.items())}
            record = {"step": step, "split": "train", **make_record(means, self.derive), **timing}
            for name in ("weight", "halted", "disagreeing_state"):
                record.pop(name, None)
            self.destination.write(record)


def throughput(tokens: int | None, flops: float | None, peak: float | None) -> dict[str, float]:
    """Return the throughput entries of a record for one example per second.

    tokens: per example, or None. flops: the model's forward and backward FLOPs per example
    (`jaxdp.run.model_summary.model_flops`), or None. peak: total FLOP/s of all devices, or None.

        tokens_per_s        tokens x examples per second
        model_flops_per_s   flops x examples per second
        mfu                 model_flops_per_s / peak (arXiv 2204.02311, appendix B)

    An entry is omitted if one of its inputs is None.
    """
    share = flops / peak if flops is not None and peak is not None else None
    of_example = {"tokens_per_s": tokens, "model_flops_per_s": flops, "mfu": share}
    return {name: x for name, x in of_example.items() if x is not None}


def goodput(metrics: pathlib.Path, began: float) -> Record:
    """Return {"goodput"}: the fraction of the time since a run's first start spent on updates that
    were kept.

    metrics: the path of metrics.jsonl, which has no lost updates. began: the first start, in
    seconds since the epoch. Startup, compilation, evaluation, saving, downtime and lost updates
    reduce it, as in MegaScale (arXiv 2402.15627) and Google's ML Goodput. Empty if no update was
    timed."""
    productive, step = 0.0, 0
    for record in read(metrics):
        if record.get("split") == "train":
            productive += 1e-3 * float(record.get("step_time_ms", 0.0)) * (record["step"] - step)
            step = record["step"]
    elapsed = time.time() - began
    return {"goodput": min(1.0, productive / elapsed)} if productive and elapsed > 0 else {}
