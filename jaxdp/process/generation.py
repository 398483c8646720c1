"""One generation of a job: the ranks that train together, from the first to join until the last has
left.

It admits the ranks and compares their facts, runs JAX's coordination service, exchanges texts
between ranks, stores a few keys, and detects dead ranks: a closed connection, or missing
heartbeats. The first fault ends the job, and every rank receives its cause. A subclass may end only
the generation, and let the ranks form another one.

`Exchanges` are the open exchanges of texts between ranks.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jaxdp.errors import PREEMPTED, UsageError, append_fault
from jaxdp.process import channel, hosts, private_jax
from jaxdp.process.channel import Encoded, Message, checked, encode
from jaxdp.process.protocol import FACTS, OPERATIONS, Facts, beat_interval, difference, pack
from jaxdp.process.relay import Relay

Answer = Callable[[str], Encoded]  # the answer to the requests with an id
Reply = Callable[[Answer], None]
REMEMBERED = 64  # results of failed exchanges, for ranks that arrive too late
KEYS = 1 << 16  # the newest that are kept: those of three saves of 4,096 ranks, five for each


@dataclasses.dataclass
class Exchange:
    """One open exchange. await_responsive: wait beyond the deadline for ranks that are not silent."""

    members: Sequence[int]
    deadline: float
    await_responsive: bool

    def __post_init__(self) -> None:
        self.missing = set(self.members)
        self.texts: dict[int, str] = {}
        self.replies: list[Reply] = []

    def answer(self, result: Message) -> Answer:
        """Send the result to all, encoded once for all requests with the same id; return what
        encodes it.
        """
        answer = functools.cache(lambda id: encode({"id": id, **result}))
        for reply in self.replies:
            reply(answer)
        return answer


class Exchanges:
    """The open exchanges: each member adds a text, and all members receive all texts once they are
    complete.

    departed: the ranks that have left the job.
    """

    def __init__(self, departed: Collection[int]) -> None:
        self.departed = departed
        self.open: dict[tuple[Any, ...], Exchange] = {}
        self.failed: collections.OrderedDict[tuple[Any, ...], Answer] = collections.OrderedDict()

    def add(
        self,
        rank: int,
        members: Sequence[int],
        reply: Reply,
        name: str,
        turn: int,
        text: str,
        timeout: float,
        await_responsive: bool,
    ) -> None:
        """Add a rank's text; the replies are {kinds, of}, {missing, texts} at the deadline, or
        {left: ranks}.
        """
        key = (name, members, turn)
        if key in self.failed:
            reply(self.failed[key])
            return
        if key not in self.open:
            self.open[key] = Exchange(members, time.monotonic() + timeout, await_responsive)
        exchange = self.open[key]
        exchange.texts[rank] = text
        exchange.missing.discard(rank)
        exchange.replies.append(reply)
        if not exchange.missing:
            del self.open[key]
            # Most are equal.
            kinds = {text: i for i, text in enumerate(dict.fromkeys(exchange.texts.values()))}
            exchange.answer({"kinds": [*kinds], "of": [kinds[exchange.texts[m]] for m in members]})
        elif absent := exchange.missing.intersection(self.departed) if self.departed else ():
            self.fail(key, {"left": sorted(absent)})

    def fail(self, key: tuple[Any, ...], result: Message) -> None:
        self.failed[key] = self.open.pop(key).answer(result)
        if len(self.failed) > REMEMBERED:
            self.failed.popitem(last=False)

    def remove_rank(self, rank: int) -> None:
        """Fail the exchanges that wait for a rank which has left the job."""
        for key in [key for key, exchange in self.open.items() if rank in exchange.missing]:
            self.fail(key, {"left": [rank]})

    def expire(self, is_responsive: Callable[[int], bool]) -> None:
        """Fail the exchanges whose deadline has passed."""
        now = time.monotonic()
        for key, exchange in list(self.open.items()):
            late = now > exchange.deadline
            if late and not (
                exchange.await_responsive and all(map(is_responsive, exchange.missing))
            ):
                self.fail(key, {"missing": sorted(exchange.missing), "texts": exchange.texts})


class Keys:
    """A key-value store of the newest KEYS texts; a reader may wait for a key."""

    def __init__(self) -> None:
        self.texts: collections.OrderedDict[str, str] = collections.OrderedDict()
        self.waiting: dict[
            str, list[tuple[float, Callable[[str | None], None]]]
        ] = {}  # {key: (deadline, reply)}

    def put(self, key: str, text: str) -> None:
        self.texts[key] = text
        if len(self.texts) > KEYS:
            self.texts.popitem(last=False)
        for _, reply in self.waiting.pop(key, ()):
            reply(text)

    def get(self, key: str, timeout: float, reply: Callable[[str | None], None]) -> None:
        """Reply with the text, or with None after `timeout` seconds."""
        if key in self.texts or not timeout:
            reply(self.texts.get(key))
        else:
            self.waiting.setdefault(key, []).append((time.monotonic() + timeout, reply))

    def expire(self) -> None:
        now = time.monotonic()
        waiting = self.waiting
        self.waiting = {}
        for key, waiters in waiting.items():
            for deadline, reply in waiters:
                if deadline < now:
                    reply(None)
                else:
                    self.waiting.setdefault(key, []).append((deadline, reply))


TICK = 0.1  # seconds between two checks of deadlines and silent ranks
# seconds: if all ranks are silent for longer, the job is suspended, and no rank is declared dead
QUIET = 5.0
# seconds after which JAX's service closes a connection that the network does not answer on
GRPC_SILENCE = 20.0
HEARD = channel.encode({"beat": True})
OTHERS = 5.0  # seconds that ranks have to come, and hear why the job does not start
# seconds after which the others of a rank that left with an error end too: it may be an error of
# all
ALONE = 10.0
LINGER = 20.0  # seconds that the coordinator runs after a fault, at most


@dataclasses.dataclass(eq=False)
class Member:
    """A rank that has joined: its facts and its connection."""

    generation: Generation
    facts: Facts
    writer: asyncio.StreamWriter
    sealer: channel.Sealer

    def __post_init__(self) -> None:
        self.rank: int = self.facts["rank"]
        self.silent = 0.0  # seconds
        self.note: Message = {}

    @property
    def title(self) -> str:
        return hosts.title(self.rank, self.facts["host"])

    def send(self, **message: Any) -> None:
        self.send_encoded(channel.encode(message))

    def send_encoded(self, message: channel.Encoded) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the rank has ended
            self.writer.write(self.sealer.seal(message))


class Generation:
    """The ranks that train together. coordinator: the `Coordinator` that owns the generation."""

    number = 0
    operations = OPERATIONS

    def __init__(self, coordinator: Any):
        self.coordinator = coordinator
        self.settings = coordinator.settings
        self.members: dict[int, Member] = {}  # the connected ranks
        self.left: set[int] = set()  # ranks that have left the job
        self.admitted = False  # whether all ranks have joined
        self.size = self.settings.size
        self.deadline = time.monotonic() + self.settings.timeout
        self.fault: Message | None = None
        self.log: str | None = None
        self.exchanges = Exchanges(self.left)
        self.keys = Keys()
        self.announced: dict[str, Message] = {}
        self.suspended = False
        self.jax_address = ""  # of JAX's service
        self.refusal: Message = {}  # why the job does not start
        self.rivals: list[Member] = []  # processes whose rank another one has too

    # Joining

    def greet(self, message: Message, nonce: bytes, writer: asyncio.StreamWriter) -> Member:
        """Return the process of a first message. Raises channel.Refused if the message is
        malformed.
        """
        first = checked(message, {"nonce": str, "facts": FACTS})
        if first is None or first["facts"]["rank"] >= first["facts"]["size"]:
            raise channel.Refused("its first message is malformed")
        key = channel.to_rank(self.settings.secret, nonce, first["nonce"].encode())
        return Member(self, first["facts"], writer, key)

    def join(self, message: Message, nonce: bytes, writer: asyncio.StreamWriter) -> Member:
        member = self.greet(message, nonce, writer)
        if self.admitted:
            late = f"{member.title} comes too late: all ranks of that job have joined; another job needs another port"
            member.send(**self.refusal or {"error": late, "code": 1, "rank": member.rank})
            raise EOFError
        rival = self.members.get(member.rank)
        self.members[member.rank] = member
        error = difference(self.members[0].facts, member.facts) if 0 in self.members else None
        if rival:
            error = (
                f"two processes say they are rank {member.rank}: {rival.facts['pid']} on host {rival.facts['host']} "
                f"and {member.facts['pid']} on host {member.facts['host']}: give every process its own rank"
            )
            self.rivals.append(rival)
        elif member.rank == 0:
            errors = (difference(member.facts, other.facts) for other in self.members.values())
            error = next(filter(None, errors), None)
        if error and not self.refusal:
            self.refusal = {"error": error}
            # They would wait for those who have left.
            self.deadline = min(self.deadline, time.monotonic() + OTHERS)
        if len(self.members) == self.settings.size and self.refusal:
            self.refuse_all(**self.refusal)
        elif len(self.members) == self.settings.size:
            self.admit()
        return member

    def admit(self) -> None:
        """Start JAX's service and send every rank the facts of all, once all ranks have connected."""
        self.admitted = True
        facts = [self.members[rank].facts for rank in range(len(self.members))]
        try:
            hosts.check_reachable(facts)
            one_host = hosts.on_one_host(facts)
            port = hosts.free_port()
            address = hosts.meeting_address(facts, port)
            if not one_host and self.settings.jax_host:
                address = hosts.join(self.settings.jax_host, port)
            bind = hosts.listening_address(hosts.split(address)[0], one_host) or "::"
            self.coordinator.jax_loaded.join()
            listen = bind, port
            if self.settings.silence > GRPC_SILENCE and not one_host:
                listen = "127.0.0.1", hosts.free_port()
                self.coordinator.services.append(Relay(*listen, (bind, port)))
            service = private_jax.start_service(
                hosts.join(*listen),
                len(facts),
                self.settings.secret,
                shutdown_timeout=max(1, min(20, round(self.settings.timeout))),
            )
            # A client of an earlier one aborts its process if that one ends.
            self.coordinator.services.append(service)
            self.jax_address = address
        except (UsageError, RuntimeError) as error:
            self.refuse_all(error=str(error))
            return
        for member in self.members.values():
            member.send(rank=member.rank)
        self.send_all(members=pack(facts), jax=address, generation=self.number)

    def refuse_all(self, **reason: Any) -> None:
        """Send every connected rank the same reason why the job does not start."""
        self.admitted = True
        self.refusal = reason
        self.left |= self.members.keys()
        self.send_all(**reason)
        for rival in self.rivals:
            rival.send(**reason)

    def send_all(self, **message: Any) -> None:
        """Send a message to all connected ranks."""
        encoded = channel.encode(message)
        for member in self.members.values():
            member.send_encoded(encoded)

    # Operations

    def handle(self, member: Member, message: Message) -> None:
        """Do one operation for a rank. Refuse a malformed one, without ending the rank."""
        member.silent = 0.0
        name, fields = message.get("op"), None
        if isinstance(name, str) and name in self.operations:
            fields = checked(message, self.operations[name])
        if fields is None or not isinstance(message.get("id"), int | str | None):
            self.coordinator.refuse(f"an operation of rank {member.rank}", str(name))
            member.send(id=message.get("id"), refused=True)
            return
        reply = getattr(self, f"do_{name}")(member, message.get("id"), **fields)
        if reply is not None:
            member.send(id=message.get("id"), **reply)

    def do_beat(self, member: Member, id: Any, note: Message) -> None:
        member.note = note
        if self.admitted or id is not None:  # else the rank waits for its admission
            member.send_encoded(HEARD)

    def do_beats(self, member: Member, id: Any, suspended: bool) -> Message:
        notes = {m.rank: m.note for m in self.members.values()}
        return {
            "beats": {
                rank: note for rank, note in notes.items() if note.get("suspended") or not suspended
            }
        }

    def do_silent(self, member: Member, id: Any, seconds: float) -> None:
        def answer() -> None:
            silent = [
                m.rank
                for m in self.members.values()
                if m.silent >= seconds - TICK and m is not member
            ]
            member.send(id=id, silent=silent, left=sorted(self.left))

        asyncio.get_running_loop().call_later(min(seconds, 60.0), answer)

    def do_exchange(
        self, member: Member, id: Any, members: list[int] | None, **fields: Any
    ) -> None:
        group = range(self.size) if members is None else tuple(members)
        self.exchanges.add(
            member.rank, group, lambda answer: member.send_encoded(answer(id)), **fields
        )

    def do_put(self, member: Member, id: Any, key: str, text: str) -> Message:
        self.keys.put(key, text)
        return {}

    def do_get(self, member: Member, id: Any, key: str, timeout: float) -> None:
        self.keys.get(key, timeout, lambda text: member.send(id=id, text=text))

    def do_announce(self, member: Member, id: Any, name: str, text: str) -> Message:
        """Send every rank the first announcement of a name; ignore later ones."""
        first = name not in self.announced
        if first:
            self.announced[name] = {"rank": member.rank, "text": text}
            self.send_all(announced=name, **self.announced[name])
        return {"first": first}

    def do_fault(self, member: Member, id: Any, text: str, code: int) -> Message:
        return {"first": self.fail(text, code, member.rank)}

    def do_log(self, member: Member, id: Any, path: str) -> Message:
        self.log = path
        return {}

    def do_leave(self, member: Member, id: Any, code: int) -> Message:
        def end_others() -> None:
            if not self.members.keys() <= self.left:
                self.fail(f"{member.title} has ended with code {code}: see what it printed")

        self.left.add(member.rank)
        self.exchanges.remove_rank(member.rank)
        if code not in (0, PREEMPTED):
            asyncio.get_running_loop().call_later(ALONE, end_others)
        return {}

    # Faults

    def fail(self, text: str, code: int = 1, author: int | None = None) -> bool:
        """Fail with this cause: end the job, unless another fault came first; return whether this
        one is the cause.
        """
        if self.fault is not None:
            return False
        self.fault = {"fault": text, "code": code, "rank": author}
        if author is None:
            self.coordinator.report(text)
        self.send_all(**self.fault)
        asyncio.get_running_loop().call_later(LINGER, self.coordinator.done.set)
        return True

    def disconnected(self, member: Member) -> None:
        if self.members.get(member.rank) is not member:
            return
        del self.members[member.rank]
        if self.admitted and member.rank not in self.left:
            # Launchers kill all ranks some milliseconds after the first has died, and may blame
            # another one.
            process = f"{member.title}, process {member.facts['pid']}"
            self.fail(f"{process}, ended first, without an error: killed or crashed")
            self.left.add(member.rank)
            self.exchanges.remove_rank(member.rank)
        if (
            member.rank == 0
            and self.fault is not None
            and self.fault["rank"] is None
            and self.log is not None
        ):
            append_fault(self.log, self.fault["fault"])  # in case rank 0 could not

    def is_empty(self) -> bool:
        """Return whether all ranks have joined and disconnected."""
        return self.admitted and not self.members

    def tick(self, elapsed: float) -> None:
        """Check deadlines and silent ranks. elapsed: seconds since the last call."""
        recent = 1.5 * beat_interval(self.size)
        self.exchanges.expire(
            lambda rank: rank in self.members and self.members[rank].silent < recent
        )
        self.keys.expire()
        if not self.admitted and time.monotonic() > self.deadline:
            size = self.settings.size
            waited = round(self.settings.timeout, 1)
            missing = hosts.listed(rank for rank in range(size) if rank not in self.members)
            text = (
                f"rank {missing} of {size} did not come within {waited:g} s: see whether it was started and what it "
                "printed (JAXDP_TIMEOUT sets how long to wait, in seconds)"
            )
            self.refuse_all(**self.refusal or {"error": text, "code": 1, "rank": 0})
        if self.admitted:
            self.check_silence(elapsed)

    def check_silence(self, elapsed: float) -> None:
        """Add up the silence of each rank, at most 1 s for each check, so that a suspended job
        blames no rank.
        """
        active = [m for m in self.members.values() if m.rank not in self.left]
        was_suspended = self.suspended
        self.suspended = bool(active) and all(m.silent > QUIET for m in active)
        for member in active:
            member.silent = (
                0.0 if was_suspended and not self.suspended else member.silent + min(elapsed, 1.0)
            )
        if not self.suspended and (
            silent := [m for m in active if m.silent >= self.settings.silence]
        ):
            names = hosts.listed(m.title for m in silent)
            verb = "has" if len(silent) == 1 else "have"
            silence = self.settings.silence
            self.fail(
                f"{names} {verb} not been heard from for {silence:.0f} s: killed, stopped, or cut off"
            )
