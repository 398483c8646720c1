"""All processes stop at one point of the run, whichever of them was asked to, and wherever they are.

A run is a row of points: each comes before something that all processes do together (an update, a batch of an
evaluation). One that is asked to stop makes a call; every process hears of it in a thread, halts before its next point,
and says how many it has passed. The largest of these numbers is where all stop: nobody who is inside a collective waits
for one that has stopped before it.
"""

import json
import threading
import time
from typing import Any

from jaxdp.distributed import coordination
from jaxdp.distributed.context import Context
from jaxdp.distributed.messages import integer, parse
from jaxdp.distributed.sentinel import CALLS, Sentinel, current
from jaxdp.errors import DistributedError

SIGTERM_DEADLINE = 2.0  # seconds: some launchers send SIGTERM to all when one process has died
DEADLINE = 20.0


class Agreement:
    """Of the processes of a context. request: in any thread; `point`: in the one that runs."""

    def __init__(self, context: Context):
        self.context = context
        self.passed = 0
        self._changed = threading.Condition()
        self._wanted: list[dict[str, Any]] = []
        self._round = 0
        self._held = False  # before the next point, until `_decided` is known
        self._decided: tuple[int, dict[str, Any]] | None = None
        self._sentinel: Sentinel | None = current()
        if self._sentinel is not None:
            self._sentinel.subscribe(self._hear)

    def request(self, kind: str, why: str = "") -> None:
        """Asks all processes to stop; `point` gives {kind, why, rank} to all of them, once."""
        wanted = {"kind": kind, "why": why, "rank": self.context.rank}
        with self._changed:
            if any(w["kind"] == kind for w in self._wanted):
                return
            self._wanted.append(wanted)
            if self.context.size == 1:
                self._decided = self._decided or (self.passed, wanted)
        if self.context.size > 1:
            self._call()

    def point(self) -> dict[str, Any] | None:
        """Before what all processes do together: None, or the request that all of them stop for here."""
        with self._changed:
            while self._held and self._decided is None:
                self._changed.wait(0.2)
            if self._decided is None or self.passed < self._decided[0]:
                self.passed += 1
                return None
            request = self._decided[1]
            self._decided, self._held = None, False
            self._wanted = [w for w in self._wanted if w["kind"] != request["kind"]]
            self._round += 1
            if self.context.size == 1 and self._wanted:
                self._decided = (self.passed, self._wanted[0])
        if self.context.size > 1:
            self._call()
            if self.context.is_root:
                coordination.forget(f"{CALLS}agree/{self._round - 2}")
                coordination.forget(f"jaxdp/agree/{self._round - 2}/")
        return request

    def _call(self) -> None:
        with self._changed:
            wanted, turn = self._wanted[0] if self._wanted and not self._held else None, self._round
        if wanted is not None:
            coordination.post(f"{CALLS}agree/{turn}", json.dumps(wanted), self._request)

    def _request(self, text: str) -> dict[str, Any] | None:
        return parse(text, {"kind": ("save", "preempt", "halt"), "why": str, "rank": range(self.context.size)})

    def _hear(self, calls: dict[str, str]) -> None:
        """In the sentinel's thread: what has been called."""
        with self._changed:
            key = f"{CALLS}agree/{self._round}"
            request = coordination.checked(key, calls.get(key), self._request)
            if request is None or self._held:
                return
            self._held = True
            passed, turn = self.passed, self._round
        coordination.put(f"jaxdp/agree/{turn}/{self.context.rank}", str(passed))
        threading.Thread(target=self._decide, args=(turn, request), name="agreement", daemon=True).start()

    def _decide(self, turn: int, request: dict[str, Any]) -> None:
        """Every process reads the same numbers, and so decides the same."""
        size, began, pause = self.context.size, time.monotonic(), 0.02
        limit = SIGTERM_DEADLINE if request["why"] == "SIGTERM" else DEADLINE
        own = self._sentinel
        assert own is not None
        while not own.ending.is_set():
            try:
                found = coordination.by_rank(f"jaxdp/agree/{turn}", size, integer)
                if len(found) == size:
                    with self._changed:
                        self._decided = (max(found.values()), request)
                        self._changed.notify_all()
                    return
                if time.monotonic() - began > limit:
                    missing = [r for r in own.silent(1.5) if r not in found]
                    if missing:
                        names = own.name(*missing)
                        text = (
                            f"{own.name(request['rank'])} got {request['why'] or request['kind']}, but {names} did not "
                            f"answer within {limit:g} s: dying, and this is no preemption; the last save stands"
                        )
                        if own.claim(text):
                            own.end(text, 1, own.rank)
            except DistributedError:
                pass
            time.sleep(pause)
            pause = min(0.5, 1.3 * pause)
