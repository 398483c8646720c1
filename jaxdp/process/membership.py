"""This process's membership in a job: its connection to the coordinator, from before JAX starts
until it leaves.

One thread reads the coordinator's messages; another sends heartbeats (`beat_interval`). A process
that fails reports its fault; all others receive the cause and end within a second. The
`coordinator` detects processes that die silently.

`Group` says how the processes of a job belong together.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax

from jaxdp.errors import DistributedError, one_line, record_fault
from jaxdp.metrics.safe_print import drain
from jaxdp.process import hosts, private_jax
from jaxdp.process.channel import LONG_TEXT, Message, checked
from jaxdp.process.connection import Joined
from jaxdp.process.protocol import GENERATION, TIMEOUT, Facts, beat_interval

# Seconds beyond the timeout of a request, so that the coordinator's deadline comes first.
ANSWER_MARGIN = 5.0


@dataclasses.dataclass(eq=False)
class Membership:
    """The membership of a process in a job of several whose first fault ends all.

    note: data sent with each heartbeat. parent: id of the launcher's process that started this one;
    this process ends when it does. None: not tied to a parent. timeout: seconds to wait for others.
    ended: why the group has changed since this process joined it; a fixed one never does.
    ends_alone: whether a fault of this process is its own, so that it prints it even if there was
    another one before. collectives: those of another backend than JAX, see `interop.kernels.run`."""

    job: Joined
    local_rank: int
    silence: float
    parent: int | None
    timeout: float = TIMEOUT
    ended: str | None = dataclasses.field(default=None, init=False)
    collectives: Any = None
    ends_alone: ClassVar[bool] = False

    def __post_init__(self) -> None:
        job = self.job
        self.connection = job.connection
        self.rank = job.rank
        self.size = len(job.facts)
        self.hosts = [facts["host"] for facts in job.facts]
        self.note: Message = {}
        self.ending = threading.Event()
        self._changed = threading.Condition()
        self.beat = beat_interval(self.size)
        self._unheard = 0  # heartbeats since the last message from the coordinator
        self._ids = itertools.count()
        self._turns: collections.Counter[tuple[Any, ...]] = collections.Counter()
        self._replies: dict[str, Message] = {}
        self._lost: str | None = None  # why the connection to the coordinator was lost
        self._listeners: dict[str, Callable[[int, str], None]] = {}
        self._announced: dict[str, tuple[int, str]] = {}

    def start(self) -> None:
        self.connection.socket.settimeout(None)
        for work in (self._listen, self._beat):
            threading.Thread(target=work, name=f"coordinator {work.__name__}", daemon=True).start()
        # A worker may outlive its rank.
        os.register_at_fork(after_in_child=lambda: self.connection.socket.close())
        atexit.register(self.leave)

    def name(self, *ranks: int) -> str:
        return hosts.listed(hosts.title(rank, self.hosts[rank]) for rank in ranks)

    # Requests

    def request(self, op: str, wait: float = TIMEOUT, /, **fields: Any) -> Message:
        """Send a request to the coordinator and return its reply. Raises DistributedError without
        an answer.
        """
        number = fields.pop("id", None) or str(next(self._ids))
        deadline = time.monotonic() + wait
        try:
            self.connection.send(op=op, id=number, **fields)
        except OSError as error:
            self.check_generation()
            raise DistributedError(
                f"the coordinator beside rank 0 has gone: {one_line(error)}"
            ) from None
        with self._changed:
            while number not in self._replies:
                self.check_generation()
                remaining = deadline - time.monotonic()
                if self._lost is not None or remaining <= 0:
                    why = self._lost or f"it did not answer within {wait:g} s"
                    raise DistributedError(f"the coordinator beside rank 0 has gone: {why}")
                self._changed.wait(min(remaining, 0.5))  # Python's signal handlers run in between
            return self._replies.pop(number)

    def exchange(
        self,
        name: str,
        text: str,
        members: Sequence[int],
        timeout: float,
        await_responsive: bool = False,
        title: str = "",
    ) -> list[str]:
        """Return every member's `text`, in the order of `members`; all members must make the same
        call.

        Repeated calls with one name are matched by their count. await_responsive: wait beyond
        `timeout` seconds for ranks that still send heartbeats. title: the name in errors. Raises
        DistributedError: the missing ranks, and `texts` of the others.
        """
        if len(members) == 1:
            return [text]
        group = None if list(members) == list(range(self.size)) else list(members)
        turn = self.turn(name, *(group or ()))
        fields = {"name": name, "turn": turn, "members": group, "text": text, "timeout": timeout}
        if group is None:
            fields["id"] = (
                # the same on all ranks, so that the coordinator encodes its answer once
                f"{name} {turn}"
            )
        wait = float("inf") if await_responsive else timeout + ANSWER_MARGIN
        reply = self.request("exchange", wait, **fields, await_responsive=await_responsive)
        if kinds := checked(reply, {"kinds": [LONG_TEXT], "of": [range(len(members))]}):
            return [kinds["kinds"][i] for i in kinds["of"]]
        if departed := reply.get("left"):
            raise DistributedError(
                f"rank {hosts.listed(departed)} has left the job: see what it printed"
            )
        missing = reply.get("missing", [])
        names = f"rank {hosts.listed(missing)}" if missing else "an answer"
        came = [member for member in members if member not in missing]
        # A rank that arrives too late prints for itself.
        speaker = came[0] if self.rank in came else None
        error = DistributedError(
            f"{names} did not come to {title or repr(name)} within {timeout:g} s", rank=speaker
        )
        error.texts = {int(rank): text for rank, text in reply.get("texts", {}).items()}
        raise error

    def turn(self, *key: Any) -> int:
        """Return how often this was called with this key, which is the same on all ranks that make
        the same calls.
        """
        with self._changed:
            turn = self._turns[key]
            self._turns[key] = self._turns[key] + 1
        return turn

    def put(self, key: str, text: str) -> None:
        """Store a text under a key, for all ranks."""
        self.request("put", key=key, text=text)

    def get(self, key: str, timeout: float) -> str | None:
        """Return the text under a key, waiting up to `timeout` seconds; None if there is none."""
        return self.request("get", timeout + TIMEOUT, key=key, timeout=timeout).get("text")

    def beats(self, suspended: bool = False) -> dict[int, Message]:
        """Return the note of the last heartbeat of every connected rank, or of those whose timeout
        is suspended.
        """
        return {
            int(rank): note
            for rank, note in self.request("beats", suspended=suspended)["beats"].items()
        }

    def silent(self) -> dict[str, list[int]]:
        """Wait for three heartbeats; return the other ranks that were `silent` meanwhile, and those
        that `left`.
        """
        return self.request("silent", TIMEOUT, seconds=3 * self.beat)

    # Announcements and faults

    def announced(self, name: str) -> str | None:
        """Return the text of the announcement `name`; None if it has not arrived."""
        return self._announced.get(name, (0, None))[1]

    def on(self, name: str, listener: Callable[[int, str], None]) -> None:
        """Call `listener(rank, text)` when the announcement `name` arrives, in the reader thread;
        it must not block.
        """
        with self._changed:
            self._listeners[name] = listener
            past = self._announced.get(name)
        if past is not None:
            listener(*past)

    def announce(self, name: str, text: str) -> bool:
        """Announce `text` to every rank. Return False if the name was announced before; then this
        text is ignored.
        """
        return bool(self.request("announce", name=name, text=text)["first"])

    def report_fault(self, text: str, code: int = 1) -> bool:
        """Publish this fault as the job's cause of failure. Return False if another rank published
        one first.
        """
        with contextlib.suppress(DistributedError):
            return bool(self.request("fault", 2.0, text=one_line(text)[:4000], code=code)["first"])
        return self.ended is None  # else another fault has ended this generation

    def report_missing(self, text: str) -> None:
        """End the job, since other processes do not answer."""
        if self.report_fault(text):
            self.end_process(text, 1, self.rank)

    def is_new(self, rank: int) -> bool:
        """Return whether a rank has joined a running job in this generation: if its input is wrong,
        it ends alone.
        """
        return False

    def check_generation(self) -> None:
        """Raise GenerationEnded if the group of processes has changed."""

    def has_ended(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of this generation; return whether it has ended."""
        return False

    def compute(self, work: Callable[[], Any]) -> Any:
        """Return the arrays of work(), a program that may connect processes, when they are there.

        Raises GenerationEnded if this generation ends before.
        """
        return jax.block_until_ready(work())

    def connect(self) -> Any:
        """Return a client of JAX's coordination service, connected with all other ranks."""
        address, secret = self.job.jax_address, self.job.secret
        client = private_jax.make_client(address, self.rank, secret, self.timeout, survives=False)
        client.connect()
        return client

    def keep_log(self, path: str) -> None:
        """Let the coordinator append the fault to this file, events.jsonl, if rank 0 ends before it
        can.
        """
        with contextlib.suppress(DistributedError):
            self.request("log", path=path)

    def leave(self, code: int = 0) -> None:
        """Tell the coordinator that this process ends, with an exit code."""
        if not self.ending.is_set():
            self.ending.set()
            with contextlib.suppress(DistributedError):
                self.request("leave", 2.0, code=code)

    def end_process(self, text: str, code: int = 1, author: int | None = None) -> None:
        """End this process now. author: the rank that prints the cause; None if the coordinator has
        printed it.
        """
        if self.ending.is_set():
            return
        self.ending.set()
        record_fault(text)
        same_host = self.hosts[0 if author is None else author] == self.hosts[self.rank]
        if author == self.rank:
            sys.stderr.write(f"jaxdp: {text}\n")
        elif self.local_rank == 0 and (
            author is not None or not same_host
        ):  # one line on every host
            sys.stderr.write(f"jaxdp: {self.name(self.rank)} ends: {text}\n")
        drain()
        os._exit(code)

    # Threads

    def _listen(self) -> None:
        try:
            while True:
                message = self.connection.receive()
                self._unheard = 0
                self._hear(message)
        except OSError as error:
            with self._changed:
                self._lost = one_line(error)
                self._changed.notify_all()
        self._lost_coordinator()

    def _lost_coordinator(self) -> None:
        gone = f"the coordinator beside {self.name(0)} has gone"
        self.end_process(f"{self.name(self.rank)} ends: {gone}", 1, self.rank)

    def _hear(self, message: Message) -> None:
        if fault := checked(
            message, {"fault": str, "code": range(1, 256), "rank": (range(self.size), None)}
        ):
            if fault["rank"] != self.rank and not self.ending.is_set():
                time.sleep(0.3)  # the failed rank prints first
                self.end_process(fault["fault"], fault["code"], fault["rank"])
        elif call := checked(
            message, {"announced": str, "rank": range(self.size), "text": LONG_TEXT}
        ):
            with self._changed:
                self._announced[call["announced"]] = (call["rank"], call["text"])
                listener = self._listeners.get(call["announced"])
            if listener is not None:
                listener(call["rank"], call["text"])
        elif isinstance(number := message.get("id"), str):
            with self._changed:
                self._replies[number] = message
                self._changed.notify_all()

    def _beat(self) -> None:
        # The first time: all have started at the same moment.
        wait = self.beat * (self.rank + 1) / self.size
        while not self.ending.wait(wait):
            wait = self.beat
            if self.parent is not None and os.getppid() != self.parent:
                cause = f"the process that started it ({self.parent} on that host) has ended"
                self.end_process(f"{self.name(self.rank)} ends: {cause}", 1, self.rank)
            self._unheard += self._lost is None
            self._each_beat()
            if self._unheard * self.beat > self.silence:
                lost = f"{self.name(0)} cannot be reached for {self.silence:.0f} s"
                text = f"{self.name(self.rank)} ends: {lost}: the network is cut, its host is down, or it is frozen"
                self.end_process(text, 1, self.rank)
            with contextlib.suppress(OSError):
                self.connection.send(op="beat", note=self.note)

    def _each_beat(self) -> None:
        """Do what a subclass does before each heartbeat."""


_membership: Membership | None = None


def start(membership: Membership) -> None:
    global _membership
    _membership = membership
    membership.start()


def forget() -> None:
    """Clear the membership of this process after it has left the job."""
    global _membership
    _membership = None


def current() -> Membership | None:
    """Return the membership of this process; None if it is alone."""
    return _membership


def joined() -> Membership:
    """Return the membership of a process that is not alone."""
    assert _membership is not None
    return _membership


Fields = dict[str, Any]  # of a `Context`


class Group:
    """A fixed group of processes: the first fault ends all. A subclass may let them leave and join.

    kind: what all processes of a job must have alike. membership: of a process. generation:
    "module:class" of the ranks in the coordinator. silence: see `protocol.silence`. moves: whether
    any process may start a coordinator in the place of one that has gone. prepare: called by a
    process that joins a running job, before the others stop for it; it may open devices, which are
    closed again. meet: returns the job, like `joining.meet`, if its processes need no coordinator."""

    kind: ClassVar[str] = "fixed"
    membership: type[Membership] = Membership
    generation: ClassVar[str] = GENERATION
    silence: ClassVar[float] = 20.0
    moves: ClassVar[bool] = False
    prepare: Callable[[], None] | None = None
    meet: Callable[..., Joined] | None = None

    def options(self) -> dict[str, Any]:
        """Return the settings of `generation`."""
        return {}

    def facts(self) -> Facts:
        """Return what the coordinator compares."""
        return {"group": self.kind}

    def enter(self, enter: Callable[[Joined], Fields], job: Joined) -> Fields:
        """Return what `enter` returns for a job that this process has joined."""
        return enter(job)
