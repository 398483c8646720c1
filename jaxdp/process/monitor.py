"""The monitor of a run: stop all processes at one point, end a hanging run, and name stragglers.

A run passes a sequence of points, one before each operation that all processes do together (an
update, a batch of an evaluation). A process that is asked to stop announces it. Every process
receives the announcement in a thread, waits before its next point, and sends the number of points
it has passed. All stop at the largest of these numbers, so no process waits in a collective for one
that has stopped before it."""

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from jaxdp.errors import DistributedError
from jaxdp.process import membership, signals
from jaxdp.process.channel import Message, integer, parse
from jaxdp.process.context import Context
from jaxdp.process.watchdog import Watchdog
from jaxdp.run import rundir
from jaxdp.train.observer import Observer
from jaxdp.train.run import Finish
from jaxdp.train.state import Batch, TrainState


class Stopped(Exception):
    """All processes have stopped at the same point. kind: 'preempt' or 'regroup'.

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
        """Run f(*args) in all processes and return its result. Raises Stopped, or Finish, if all
        stop before it.
        """
        return f(*args)

    def suspend_timeout(self, where: str) -> contextlib.AbstractContextManager[None]:
        """Suspend the step timeout inside this context."""
        return contextlib.nullcontext()

    def request(self, kind: str, why: str = "") -> None:
        """Ask all processes to 'save', to end with a saved state ('preempt'), to end training
        ('finish'), or to 'probe': to measure how long their devices compute."""

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
            if request["kind"] == "finish":
                raise Finish
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
            ms = 1e3 * (time.perf_counter() - self._waits) / len(updates)
            self.own_ms = 0.9 * self.own_ms + 0.1 * ms if self.own_ms else ms

    def after(self, updates: range, state: TrainState, metrics: Mapping[str, jax.Array]) -> None:
        self._dispatched = True
        signals.has_started()
        self.sent(metrics["loss"])

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


SIGTERM_DEADLINE = (
    2.0  # seconds; short, since some launchers send SIGTERM to all when one process has died
)
DEADLINE = 20.0
KINDS = ("save", "probe", "preempt", "finish", "regroup")


class Agreement:
    """The points that this process has passed, and the agreed stop. `request` may be called from
    any thread.
    """

    def __init__(self, context: Context):
        self.context = context
        self.passed = 0
        self._changed = threading.Condition()
        self._requests: list[Message] = []  # made by this process
        self._round = 0
        self._waiting = False  # before the next point, until `_stop` is known
        self._stop: tuple[int, Message] | None = None  # (the point, the request)
        self._member = membership.current()
        self._listen()
        if self._member is not None and context.is_root:
            self._member.on("join", self._admit)

    def _listen(self) -> None:
        if self._member is not None:
            turn = self._round
            self._member.on(f"stop {turn}", lambda rank, text: self._receive(turn, text))

    def request(self, kind: str, why: str = "") -> None:
        """Ask all processes to stop; `point` returns {kind, why, rank} on all of them, once.

        Nothing happens if the coordinator has gone or this generation has ended: `point` raises
        that."""
        request = {"kind": kind, "why": why, "rank": self.context.rank}
        with self._changed:
            if any(r["kind"] == kind for r in self._requests):
                return
            self._requests.append(request)
            if self._member is None:
                self._stop = self._stop or (self.passed, request)
        with contextlib.suppress(DistributedError):
            self._announce()

    def point(self) -> Message | None:
        """Return the request that all processes stop for at this point, or None. Call it before
        each point.

        Raises GenerationEnded if the group of processes has changed.
        """
        with self._changed:
            while True:
                if self._member is not None:
                    self._member.check_generation()
                if not self._waiting or self._stop is not None:
                    break
                self._changed.wait(0.2)
            if self._stop is None or self.passed < self._stop[0]:
                self.passed += 1
                return None
            request = self._stop[1]
            self._stop = None
            self._waiting = False
            self._requests = [r for r in self._requests if r["kind"] != request["kind"]]
            self._round += 1
            if self._member is None and self._requests:
                self._stop = (self.passed, self._requests[0])
        self._listen()
        self._announce()
        return request

    def _admit(self, rank: int, name: str) -> None:
        """Ask all processes to regroup, since another one waits to join. Runs in the reader thread."""
        threading.Thread(
            target=self.request, args=("regroup", f"{name} joins"), daemon=True
        ).start()

    def _announce(self) -> None:
        with self._changed:
            request = self._requests[0] if self._requests and not self._waiting else None
            turn = self._round
        if self._member is not None and request is not None:
            self._member.announce(f"stop {turn}", json.dumps(request))

    def _receive(self, turn: int, text: str) -> None:
        """Make this process wait before its next point. Runs in the reader thread, and must not
        block it.
        """
        request = parse(text, {"kind": KINDS, "why": str, "rank": range(self.context.size)})
        with self._changed:
            if request is None or self._waiting or turn != self._round:
                return
            self._waiting = True
            passed = self.passed
        threading.Thread(
            target=self._decide, args=(turn, passed, request), name="agreement", daemon=True
        ).start()

    def _decide(self, turn: int, passed: int, request: Message) -> None:
        """Exchange the numbers of passed points; every process gets the same and makes the same
        decision.
        """
        assert self._member is not None
        limit = SIGTERM_DEADLINE if request["why"] == "SIGTERM" else DEADLINE
        ranks = range(self.context.size)
        try:
            texts = self._member.exchange(
                f"stop {turn}", str(passed), ranks, limit, await_responsive=True
            )
        except DistributedError as error:
            missing = [rank for rank in ranks if rank not in error.texts] if error.texts else []
            if missing:
                self._member.report_missing(
                    f"{self._member.name(request['rank'])} got {request['why'] or request['kind']}, but "
                    f"{self._member.name(*missing)} did not answer within {limit:g} s: it is dying, so this "
                    "is not a preemption; the last save is valid"
                )
            with self._changed:  # the exchange has failed on all ranks
                self._waiting = False
                self._round = self._round + 1
            self._listen()
            with contextlib.suppress(DistributedError):
                self._announce()
            return
        numbers = [integer(text) or 0 for text in texts]
        with self._changed:
            self._stop = (max(numbers), request)
            self._changed.notify_all()
