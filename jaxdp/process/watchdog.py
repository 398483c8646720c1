"""The watchdog of a run: if the run makes no progress, every process writes its stacks and
position, and the run ends.

Progress is an update finished by the device, or a point passed by the run. While a process
compiles, saves or restores, the timeout is suspended on all processes.
"""

import collections
import contextlib
import dataclasses
import faulthandler
import json
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from jaxdp.errors import DistributedError, GenerationEnded, record_fault
from jaxdp.process import hosts, membership
from jaxdp.process.channel import Message, parse
from jaxdp.process.context import Context, leave
from jaxdp.run import rundir

LOOK = 0.25  # seconds between two checks
ANSWERS = 4.0  # seconds within which the other processes must report their positions


@dataclasses.dataclass
class Watchdog:
    """The watchdog of one process. timeout: seconds without progress, for each update of a call;
    None for no limit.

    directory: that of stacks/rank_N.txt. factor: see `straggler`.
    """

    context: Context
    directory: pathlib.Path
    timeout: float | None
    factor: float = 2.0

    def __post_init__(self) -> None:
        self.where = "begins"
        self.passed = 0
        self.updates = 1  # number of updates in a call
        self.own_ms = 0.0  # running mean of this process's own work between two updates
        self._progress = time.monotonic()
        self._suspended = 0  # nesting depth of `suspend_timeout`
        self._sent: collections.deque[Any] = collections.deque()
        self._member = membership.current()
        if self._member is not None:
            self._member.on(
                "stuck",
                lambda *call: threading.Thread(target=self._answer, args=call, daemon=True).start(),
            )
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        self._thread.join(2.0)
        self._sent.clear()

    def at(self, where: str) -> None:
        """Record the position of this process, which counts as progress."""
        self.where = where
        self.passed += 1
        self._progress = time.monotonic()

    def sent(self, loss: Any) -> None:
        """Record the loss [] or [update] of a dispatched call; when the device has it, that counts
        as progress.
        """
        self.updates = max(1, loss.size)
        self._sent.append(loss)

    @contextlib.contextmanager
    def suspend_timeout(self, where: str) -> Iterator[None]:
        """Suspend the step timeout inside this context."""
        self.at(where)
        self._suspended += 1
        self._note()
        try:
            yield
        finally:
            self._suspended -= 1
            self._note()
            self.at(where)

    def each_check(self) -> None:
        """Do what else is to be done at every check."""

    def straggler(self, step_ms: float) -> dict[str, float]:
        """Return {straggler: rank, straggler_ms} if a process's own work takes `factor` times the
        others' median.

        Empty if that work is less than a tenth of the update's time, or until every process has
        reported its own."""
        if self._member is None or not self.context.is_root:  # root writes the metrics
            return {}
        with contextlib.suppress(DistributedError):
            work = {rank: beat.get("own_ms", 0.0) for rank, beat in self._member.beats().items()}
            slowest = max(work, key=lambda rank: work[rank], default=None)
            if slowest is not None and len(work) > 1 and all(work.values()):
                others = statistics.median(ms for rank, ms in work.items() if rank != slowest)
                if work[slowest] > self.factor * others and work[slowest] > 0.1 * step_ms:
                    return {"straggler": slowest, "straggler_ms": work[slowest]}
        return {}

    def _note(self) -> None:
        if self._member is not None:
            self._member.note = {
                "suspended": bool(self._suspended),
                "own_ms": round(self.own_ms, 6),
            }

    def _work(self) -> None:
        checked_at = time.monotonic()
        while not self._ending.wait(LOOK):
            now = time.monotonic()
            if now - checked_at > 8 * LOOK:  # the whole job was suspended: do not count that time
                self._progress = now
            checked_at = now
            self._note()
            while self._sent and self._sent[0].is_ready():
                self._sent.popleft()
                self._progress = time.monotonic()
            self.each_check()
            idle = time.monotonic() - self._progress
            if (
                self.timeout is not None
                and idle > self.timeout * self._updates()
                and not self._suspended
            ):
                with contextlib.suppress(DistributedError):
                    self._stuck(idle)

    def _updates(self) -> int:
        """Return the number of updates in the call that is running (or was dispatched last)."""
        sizes = [loss.size for loss in [*self._sent][:1]]
        return max(1, self.updates, *sizes)

    def _stuck(self, idle: float) -> None:
        """End the run after `idle` seconds without progress, unless a process that still responds
        is suspended.
        """
        member = self._member
        if member is not None and member.ended is None:
            suspended = member.beats(suspended=True).keys()
            if suspended and suspended - set(member.silent()["silent"]):
                return
        each = f" for each of {self._updates()} updates" if self._updates() > 1 else ""
        text = f"no progress for {idle:.0f} s (watchdog.step_timeout: {self.timeout:g}{each})"
        if (
            member is None or member.ended is not None
        ):  # the others of an ended generation do not wait in this call
            self._write_stacks()
            record_fault(f"{text}: {self._position()['where']}")
            sys.stderr.write(
                f"jaxdp: {text}: {self._position()['where']}; stacks in {self.directory / 'stacks'}\n"
            )
            leave(1)
        member.announce("stuck", text)
        time.sleep(3 * ANSWERS)  # `_answer` ends this process

    def _answer(self, author: int, text: str) -> None:
        """Exchange the positions of all processes after `author` has announced a hang.

        A process that is behind reports it, or the author: that one ends, and the others if their
        group is fixed."""
        context = self.context
        assert self._member is not None
        self._write_stacks()
        texts: dict[int, str] = {}
        with contextlib.suppress(DistributedError):
            ranks = range(context.size)
            position = json.dumps(self._position())
            try:
                texts = dict(enumerate(self._member.exchange("stuck", position, ranks, ANSWERS)))
            except GenerationEnded:
                return
            except DistributedError as error:
                texts = error.texts
        shape = {"passed": range(1 << 53), "where": str}
        answers = {rank: answer for rank, t in texts.items() if (answer := parse(t, shape))}
        late = behind(answers) if len(answers) == context.size else []
        if context.rank in (late if 0 < len(late) < context.size else [author]):
            text = f"{text}: {verdict(answers, context)}; stacks in {self.directory / 'stacks'}"
            if self._member.report_fault(text):
                self._member.end_process(text, 1, context.rank)

    def _position(self) -> Message:
        return {"passed": self.passed, "where": f"{self.where} ({innermost(self.where)})"}

    def _write_stacks(self) -> None:
        with contextlib.suppress(OSError):
            (self.directory / "stacks").mkdir(exist_ok=True)
            path = self.directory / "stacks" / f"rank_{self.context.rank}.txt"
            with open(path, "w", encoding="utf-8", opener=rundir.no_link) as file:
                file.write(
                    f"rank {self.context.rank} on {self.context.hosts[self.context.rank]}: {self.where}\n\n"
                )
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)


def behind(answers: dict[int, Message]) -> list[int]:
    """Return the ranks that have passed the fewest points."""
    least = min(a["passed"] for a in answers.values())
    return [rank for rank, a in sorted(answers.items()) if a["passed"] == least]


def verdict(answers: dict[int, Message], context: Context) -> str:
    """Name the ranks that do not answer, else those that are behind."""
    name = context.title
    late = behind(answers) if answers else []
    missing = [rank for rank in range(context.size) if rank not in answers]
    if missing:
        names = hosts.listed(map(name, missing))
        return f"{names} {'does' if len(missing) == 1 else 'do'} not answer, no stacks: stopped, dead or cut off"
    if len(late) == len(answers):
        return f"all are at the same point, such as {name(0)}: {answers[0]['where']}"
    others = next(rank for rank in sorted(answers) if rank not in late)
    return (
        f"{hosts.listed(map(name, late))} is behind: {answers[late[0]]['where']}; "
        f"{name(others)}: {answers[others]['where']}"
    )


def innermost(where: str) -> str:
    """Return the current line of the main thread, or of the prefetch thread if the main thread
    waits for data.
    """
    threads = {thread.name: thread.ident for thread in threading.enumerate()}
    ident = threads.get("jaxdp-prefetch") if "data" in where else None
    frame = sys._current_frames().get(ident or threading.main_thread().ident or 0)
    if frame is None:
        return "?"
    code = frame.f_code
    return f"{pathlib.Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
