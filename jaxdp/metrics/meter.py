"""The meter turns device metrics into records in a thread of its own, so that the loop never waits for the device."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxdp.errors import RunFailed
from jaxdp.metrics.sums import make_record
from jaxdp.metrics.writer import Record, Writer

T = TypeVar("T")
LAST_WORDS = 2.0  # seconds
AHEAD = 2  # intervals that the loop may be ahead of the device before it waits


class Clock(NamedTuple):
    """What the loop has counted so far: seconds that it waited for data; updates that were the first of their program,
    and seconds that these calls took, with compilation."""

    waited: float = 0.0
    first: int = 0
    compiled: float = 0.0


class Meter:
    """Writes a train record every `every` updates and at update `last`.

    examples: per update on average, for the throughput. more(milliseconds of an update), derive(means): what else a
    record says. An update's time is from one record's completion on the device to the next, without the first call of
    each program, which compiles, and without what runs between `pause` and the wait for the next update's data;
    `input_wait` is the share of it, at most, that the device had nothing to do because the loop waited for data.
    """

    def __init__(
        self,
        writer: Writer,
        every: int,
        last: int,
        examples: float,
        more: Callable[[float], Record] = lambda milliseconds: {},
        derive: Callable[[Record], Mapping[str, float]] = lambda means: {},
    ):
        self.writer, self.every, self.last, self.examples = writer, every, last, examples
        self.more, self.derive = more, derive
        self.since: tuple[int, float] | None = None  # (update, when it was done) where the clock last started
        self.sent: Any = None  # a result of the last call
        self.step = 0  # the last update of it
        self.paused = False
        self.lengths: set[int] = set()  # updates of a call, of which each number is a program of its own
        self.called = 0.0  # when the first call of a program began
        self.clock = Clock()
        self.told = Clock()  # what of it the last record told
        self.fault: BaseException | None = None
        self.queue: queue.Queue[tuple[range, Any, Clock] | None] = queue.Queue(AHEAD)
        threading.Thread(target=self._work, name="meter", daemon=True).start()

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *args: Any) -> None:
        if any(args):  # what is ready is written, also where the run ends by an error
            deadline = time.monotonic() + LAST_WORDS
            while self.queue.unfinished_tasks and time.monotonic() < deadline:
                time.sleep(0.01)
        with contextlib.suppress(queue.Full):  # a device that hangs must not keep the run from ending
            self.queue.put(None, timeout=1.0)

    def reading(self, items: Iterable[tuple[range, T]]) -> Iterator[tuple[range, T]]:
        """(the updates of a call, their data); the time that each is waited for is taken down, unless the device is
        busy to the end of it."""
        left = iter(items)
        while True:
            began = time.perf_counter()
            if self.paused:
                self.paused, self.since, self.told = False, (self.step, began), self.clock
            try:
                item = next(left)
            except StopIteration:
                return
            if self.sent is None or self.sent.is_ready():
                self.clock = self.clock._replace(waited=self.clock.waited + time.perf_counter() - began)
            if len(item[0]) not in self.lengths:
                jax.block_until_ready(self.sent)  # or what is left of the calls before would count as compilation
                self.flush()
                self.called = time.perf_counter()
                if self.since is not None:  # all before is done, and most of it told
                    self.since, self.told = (self.step, self.called), self.clock
            yield item

    def update(self, steps: range, metrics: dict[str, jax.Array]) -> None:
        """Updates `steps` were sent to the device in one call; metrics: [] of one update, [step] of several."""
        if len(steps) not in self.lengths:
            jax.block_until_ready(metrics)  # compilation and first run: the clock stands still meanwhile
            self.lengths.add(len(steps))
            took = time.perf_counter() - self.called
            self.clock = self.clock._replace(first=self.clock.first + len(steps), compiled=self.clock.compiled + took)
        if self.since is None:
            self.since, self.told = (steps[-1], time.perf_counter()), self.clock
        self.sent, self.step = next(iter(metrics.values()), None), steps[-1]
        if steps[-1] % self.every < len(steps) or steps[-1] == self.last:
            self.queue.put((steps, metrics, self.clock))
        self._raise()

    def flush(self) -> None:
        """Waits until everything is written."""
        self.queue.join()
        self._raise()

    def pause(self) -> None:
        """Flushes, and starts the clock anew where the next update's data is asked for."""
        self.flush()
        self.paused = True

    def _raise(self) -> None:
        if self.fault is not None:
            raise self.fault

    def _work(self) -> None:
        while (item := self.queue.get()) is not None:
            try:
                if self.fault is None:
                    self._records(item[0], jax.device_get(item[1]), item[2])
            except BaseException as fault:
                self.fault = fault
            finally:
                self.queue.task_done()

    def _records(self, steps: range, metrics: dict[str, Any], clock: Clock) -> None:
        """Those of the updates of one call that are due; they share the time of the call."""
        now = time.perf_counter()
        assert self.since is not None
        timing: Record = {}
        elapsed = now - self.since[1] - (clock.compiled - self.told.compiled)
        made = steps[-1] - self.since[0] - (clock.first - self.told.first)
        if made:
            seconds = elapsed / made
            timing = {"step_time_ms": 1e3 * seconds, "examples_per_s": self.examples / seconds}
            waited = (clock.waited - self.told.waited) / elapsed
            timing |= {"input_wait": min(1.0, waited), **self.more(1e3 * seconds)}
            self.since, self.told = (steps[-1], now), clock
        for place, step in enumerate(steps):
            if step % self.every == 0 or step == self.last:
                self._record(step, {k: np.reshape(v, -1)[place] for k, v in metrics.items()}, timing)

    def _record(self, step: int, metrics: dict[str, Any], timing: Record) -> None:
        means = {k: float(v) for k, v in sorted(metrics.items())}
        record: Record = {"step": step, "split": "train", **make_record(means, self.derive), **timing}
        if record.pop("disagreeing_state", 0):
            raise RunFailed(
                f"update {step}: integers of the model state differ between microbatches; a counter must not depend on "
                "the examples (keep such state as a float, or under 'carry')",
                rank=0,
            )
        record.pop("weight", None)
        record.pop("halted", None)
        self.writer.write(record)
