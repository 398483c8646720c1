"""Every process says that it lives, hears what ended another, and notices who has fallen silent.

A process that fails claims the fault, with its rank and cause, under one key; all others hear of it and end within a
second. One that was killed, stopped or cut off claims nothing: its neighbours miss its beat, and name it. Silence is
counted in a process's own looks at the others, not by a clock, so that a job that was suspended, or a clock that was
set, accuses nobody.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxdp.distributed import coordination, hosts, last_words
from jaxdp.distributed.messages import parse
from jaxdp.errors import DistributedError, one_line

BEAT = 1.0  # seconds
LOOKS = 4  # in a beat, for faults
CALLS = "jaxdp/call/"  # what all processes are to hear
FAULT = f"{CALLS}fault"
# What JAX says on a process whose collective, or coordination service, has lost another process.
CONSEQUENCES = ("gloo", "nccl", "connection", "coordination", "peer", "socket", "heartbeat", "unhealthy")


def _beat(text: str) -> dict[str, Any] | None:
    return parse(text, {"n": range(1 << 53), "patient?": bool, "own_ms?": float})


class Sentinel:
    """Of one process. silence: beats after which another is taken for gone. note: what else a beat says.

    parent: the process of the launcher that started this one, whose end ends this one too; None: nobody's end does.
    """

    def __init__(
        self, rank: int, size: int, hosts: Sequence[str], local_rank: int, silence: float, parent: int | None = None
    ):
        self.rank, self.size, self.hosts, self.local_rank, self.silence = rank, size, hosts, local_rank, silence
        self.parent = parent
        self.note: dict[str, Any] = {}
        self.ending = threading.Event()
        self._listeners: list[Callable[[dict[str, str]], None]] = []
        self._heard = 0  # beats since the service last answered

    def start(self) -> None:
        self._threads = [
            threading.Thread(target=work, name=f"sentinel {work.__name__}", daemon=True)
            for work in (self._look_around, self._look_at_time)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """This process leaves as it should: it is not missed. A thread inside JAX's client at exit would abort it."""
        if not self.ending.is_set():
            self.ending.set()
            with contextlib.suppress(Exception):
                coordination.put(f"jaxdp/left/{self.rank}", coordination.LEFT)
        self._threads[0].join(2.0)

    def subscribe(self, listener: Callable[[dict[str, str]], None]) -> None:
        """`listener` is given all calls, a few times a second, in the sentinel's thread; it must not wait."""
        self._listeners.append(listener)

    def name(self, *ranks: int) -> str:
        return ", ".join(hosts.title(rank, self.hosts[rank]) for rank in ranks)

    def claim(self, text: str, code: int = 1) -> bool:
        """Names what ends the job, unless another has done so before: whether this is the text that all will hear."""
        if self.size == 1:
            return True
        own = json.dumps({"rank": self.rank, "text": one_line(text)[:4000], "code": code})
        with contextlib.suppress(DistributedError, AttributeError):
            coordination.post(FAULT, own, self._fault)
            return coordination.peek(FAULT) == own
        return True

    def _fault(self, text: str) -> dict[str, Any] | None:
        return parse(text, {"rank": range(self.size), "text": str, "code": range(1, 256)})

    def beats(self) -> dict[int, dict[str, Any]]:
        """The last beat of every process that has made one: `n`, and its note."""
        return coordination.by_rank("jaxdp/alive", self.size, _beat)

    def silent(self, seconds: float = 3 * BEAT) -> list[int]:
        """The processes that make no beat in so many seconds, and have not said that they leave."""
        before = self.beats()
        time.sleep(seconds)
        after, left = self.beats(), coordination.leavers()
        return [r for r, beat in before.items() if r not in left and r != self.rank and after.get(r) == beat]

    def _look_around(self) -> None:
        watched = sorted({(self.rank - 1) % self.size, (self.rank + 1) % self.size} - {self.rank})
        missed = dict.fromkeys(watched, 0)
        last: dict[int, Any] = {}
        looks = 0
        while not self.ending.wait(BEAT / LOOKS):
            looks += 1
            try:
                self._hear()
                if looks % LOOKS:
                    continue
                coordination.put(f"jaxdp/alive/{self.rank}", json.dumps({"n": looks // LOOKS, **self.note}))
                for other in watched:
                    beat = coordination.peek(f"jaxdp/alive/{other}", read=_beat)
                    missed[other] = missed[other] + 1 if beat is not None and beat == last.get(other) else 0
                    last[other] = beat or last.get(other)
                if any(count * BEAT >= self.silence for count in missed.values()):
                    self._accuse()
                    missed = dict.fromkeys(watched, 0)
            except (DistributedError, AttributeError):  # this process, or the service, is ending
                continue
            except Exception as error:  # the job is watched on, whatever came
                coordination.refuse(f"what it hears ({type(error).__name__})", str(error))

    def _accuse(self) -> None:
        if missing := self.silent():
            who = f"{self.name(*missing)} {has(missing)}"
            text = f"{who} not been heard from for {self.silence:.0f} s: killed, stopped, or cut off"
            if self.claim(text):
                self.end(text, 1, self.rank)

    def _hear(self) -> None:
        """Ends this process where another has claimed a fault."""
        calls = coordination.directory(CALLS)
        self._heard = 0
        for listener in self._listeners:
            listener(calls)
        fault = coordination.checked(FAULT, calls.get(FAULT), self._fault)
        if fault is not None and fault["rank"] != self.rank and not self.ending.is_set():
            time.sleep(0.3)  # the one that failed prints first
            self.end(fault["text"], fault["code"], fault["rank"])

    def _look_at_time(self) -> None:
        """In a thread of its own, since a call to a service that cannot be reached may not return."""
        while not self.ending.wait(BEAT):
            if self.parent is not None and os.getppid() != self.parent:
                text = f"{self.name(self.rank)} ends: what started it (process {self.parent} there) has ended"
                self.end(text)
            self._heard += 1
            if self._heard * BEAT > self.silence and coordination.client() is not None:
                lost = f"{self.name(0)} cannot be reached for {self.silence:.0f} s"
                self.end(f"{self.name(self.rank)} ends: {lost}: the network is cut, or its host is down")

    def end(self, text: str, code: int = 1, author: int | None = None) -> None:
        """Ends this process now, with a line; one process a host says what another has found."""
        if self.ending.is_set():
            return
        self.ending.set()
        last_words.tell(text)
        coordination.tell_service(over=True)
        if author is None or author == self.rank:
            sys.stderr.write(f"jaxdp: {text}\n")
        elif self.local_rank == 0 or (author is not None and self.hosts[author] == self.hosts[self.rank]):
            sys.stderr.write(f"jaxdp: {self.name(self.rank)} ends: {text}\n")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


_sentinel: Sentinel | None = None


def start(
    rank: int, size: int, hosts: Sequence[str], local_rank: int, silence: float, parent: int | None = None
) -> None:
    global _sentinel
    _sentinel = Sentinel(rank, size, hosts, local_rank, silence, parent)
    _sentinel.start()


def forget() -> None:
    """This process has left the others."""
    global _sentinel
    _sentinel = None


def current() -> Sentinel | None:
    """This process's; None where it is alone."""
    return _sentinel


def is_consequence(error: BaseException) -> bool:
    """Whether this looks like what a process sees when another has gone."""
    import jax

    text = str(error).lower()
    return isinstance(error, jax.errors.JaxRuntimeError | DistributedError) and any(w in text for w in CONSEQUENCES)


def crash(error: BaseException, trace: str) -> int:
    """What this process has to say of an error that ends it: the cause, once, with its rank; the exit code.

    trace: the traceback, printed where the fault is this process's own and it is the first to fail.
    """
    own = _sentinel
    if own is None:
        sys.stderr.write(trace)
        return 1
    text = f"{own.name(own.rank)} failed: {type(error).__name__}: {one_line(error)[:300]}"
    if is_consequence(error):
        with contextlib.suppress(DistributedError):
            missing = own.silent()  # meanwhile the listener ends us, if the fault was claimed
            if missing:
                text, trace = f"{own.name(*missing)} {has(missing)} gone: killed, stopped, or cut off", ""
    if own.claim(text):
        own.ending.set()
        if not trace:
            last_words.tell(text)
        sys.stderr.write(f"{trace}jaxdp: {text}\n")
        return 1
    time.sleep(2.0)  # the listener says what it was, and ends this process
    return 1
