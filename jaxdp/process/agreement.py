"""Stop all processes at the same point of the run, after any of them was asked to stop.

A run passes a sequence of points, one before each operation that all processes do together (an
update, a batch of an evaluation). A process that is asked to stop announces it. Every process
receives the announcement in a thread, waits before its next point, and sends the number of points
it has passed. All stop at the largest of these numbers, so no process waits in a collective for one
that has stopped before it."""

import contextlib
import json
import threading

from jaxdp.errors import DistributedError
from jaxdp.process import membership
from jaxdp.process.context import Context
from jaxdp.process.messages import Message, integer, parse

SIGTERM_DEADLINE = (
    2.0  # seconds; short, since some launchers send SIGTERM to all when one process has died
)
DEADLINE = 20.0
KINDS = ("save", "probe", "preempt", "halt", "regroup")


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

        Raises GenerationEnded if another process of an elastic job was lost.
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
            if missing and not self._member.elastic:  # else the coordinator ends the generation
                text = (
                    f"{self._member.name(request['rank'])} got {request['why'] or request['kind']}, but "
                    f"{self._member.name(*missing)} did not answer within {limit:g} s: it is dying, so this "
                    "is not a preemption; the last save is valid"
                )
                if self._member.report_fault(text):
                    self._member.end_process(text, 1, self._member.rank)
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
