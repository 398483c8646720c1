"""The monitor of a run: stop all processes at one point, end a hanging run, and name stragglers."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from jaxdp.process import membership, signals
from jaxdp.process.agreement import Agreement
from jaxdp.process.watchdog import Watchdog
from jaxdp.run import rundir
from jaxdp.train.observer import Observer
from jaxdp.train.state import Batch, TrainState


class Stopped(Exception):
    """All processes have stopped at the same point. kind: 'preempt', 'halt' or 'regroup'.

    why: the signal. rank: its receiver.
    """

    def __init__(self, kind: str, why: str = "", rank: int = 0):
        super().__init__(f"{why or kind} on rank {rank}")
        self.kind = kind
        self.why = why
        self.rank = rank


class Monitor(Observer):
    """The interface through which a run reports its progress. This base class does nothing."""

    def run_step(self, what: str, f: Callable[..., Any], *args: Any) -> Any:
        """Run f(*args) in all processes and return its result. Raises Stopped if all stop before
        it.
        """
        return f(*args)

    def suspend_timeout(self, where: str) -> contextlib.AbstractContextManager[None]:
        """Suspend the step timeout inside this context."""
        return contextlib.nullcontext()

    def request(self, kind: str, why: str = "") -> None:
        """Ask all processes to 'save', to end with a saved state ('preempt'), or to 'probe': to
        measure how long their devices compute."""

    def is_asked(self, kind: str) -> bool:
        """Return whether all processes must do so now, and reset the request."""
        return False

    def straggler(self, step_ms: float) -> dict[str, float]:
        """Return the metrics of a process that slows down the others. step_ms: time of an update."""
        return {}

    def stop(self) -> None:
        """Stop monitoring at the end of the run."""


@dataclasses.dataclass
class RunMonitor(Watchdog, Monitor):
    """The monitor of a training job. minutes: between two saves, besides those of the loop; None
    for no such saves.

    last_save: when the last of these was asked for, of `time.monotonic`.
    """

    minutes: float | None = None
    last_save: float = dataclasses.field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.agreement = Agreement(self.context)
        if self.context.is_root and (member := membership.current()) is not None:
            member.keep_log(str((self.directory / "events.jsonl").absolute()))
        self._called: set[int] = set()
        self._asked: set[str] = set()
        self._dispatched = False  # an update
        super().__post_init__()
        signals.subscribe(self._preempt)

    def run_step(self, what: str, f: Callable[..., Any], *args: Any) -> Any:
        while (request := self.agreement.point()) is not None:
            if request["kind"] not in ("save", "probe"):
                if request["kind"] != "regroup":
                    rundir.mark_ending()  # the next job may start while this one saves
                raise Stopped(**request)
            self._asked.add(request["kind"])
        self.at(what)
        if id(f) in self._called:
            result = f(*args)
        else:
            with self.suspend_timeout(f"{what} (compiles)"):
                result = f(*args)
            self._called.add(id(f))
        return result

    def reading(self, step: int) -> None:
        self.at(f"waits for the data of update {step + 1}")
        self._waits = time.perf_counter()

    def before(self, updates: range, batch: Batch) -> None:
        if self._dispatched:  # the first wait includes other work, such as imports
            self.worked((time.perf_counter() - self._waits) / len(updates))

    def after(self, updates: range, state: TrainState, metrics: Mapping[str, jax.Array]) -> None:
        self._dispatched = True
        signals.has_started()
        self.sent(metrics)

    def wants(self, step: int) -> Collection[str]:
        return ("save",) if self.is_asked("save") else ()

    def request(self, kind: str, why: str = "") -> None:
        self.agreement.request(kind, why)

    def is_asked(self, kind: str) -> bool:
        asked = kind in self._asked
        self._asked.discard(kind)
        if asked and kind == "save":
            self.last_save = time.monotonic()
        return asked

    def stop(self) -> None:
        signals.unsubscribe(self._preempt)
        super().stop()

    def _preempt(self, name: str) -> None:
        if name != signals.TRACE:
            self.agreement.request("preempt", name)

    def each_check(self) -> None:
        late = self.minutes is not None and time.monotonic() - self.last_save > 60.0 * self.minutes
        if late and self.context.is_root:
            self.last_save = time.monotonic()
            self.request("save")
