"""The coordinator: a small process beside rank 0, whose life depends on no rank's, that every rank speaks to.

It admits the ranks and compares what they report of themselves, runs JAX's coordination service, exchanges texts
between ranks, stores a few keys, and notices who has gone: a connection that closes, or a silent rank. The first fault
ends the job, and every rank hears its cause. Messages are those of `channel`.

    python -m jaxdp.distributed.coordinator    reads `Settings` as JSON from standard input; prints "ready" or a problem
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import secrets
import signal
import socket
import sys
import threading
import time
from typing import Any

from jaxdp.distributed import channel, hosts, private_jax
from jaxdp.distributed.exchange import Exchanges, Keys
from jaxdp.distributed.messages import LONG_TEXT, checked, printable
from jaxdp.errors import UsageError

TICK = 0.1  # seconds between two looks at deadlines and silent ranks
QUIET = 5.0  # seconds: if all ranks are silent for so long, the job is suspended, and nobody is missed
FIRST_MESSAGE = 10.0  # seconds that a connection has for it
UNAUTHENTICATED = 256  # open connections without a first message; the oldest of more is closed
LINGER = 20.0  # seconds that the coordinator outlives a fault at most
# What rank 0's process and any other must have in common; in the order in which a difference is reported.
COMMON = {
    "size": "world size",
    "jaxdp": "jaxdp version",
    "jax": "JAX version",
    "jaxlib": "jaxlib version",
    "python": "Python version",
}
Facts = dict[str, Any]
FACTS: dict[str, Any] = {
    **dict.fromkeys(["host", "boot", "jaxdp", "jax", "jaxlib", "python"], str),
    "addresses": [str],
    "outward": (str, None),
    "spaces": [str],
    "rank": range(1 << 20),
    "size": range(1 << 21),
    "pid": range(1 << 31),
    "gloo": bool,
    "visible": (str, None),
}
NOTE = {"suspended?": bool, "own_ms?": float}
# The operations that a rank may ask for, and the fields of each.
OPERATIONS: dict[str, dict[str, Any]] = {
    "beat": {"note": NOTE},
    "beats": {},
    "silent": {"seconds": float},
    "exchange": {
        "name": str,
        "turn": range(1 << 53),
        "members": [range(1 << 20)],
        "text": LONG_TEXT,
        "timeout": float,
        "await_responsive": bool,
    },
    "put": {"key": str, "text": LONG_TEXT},
    "get": {"key": str, "timeout": float},
    "forget": {"prefix": str},
    "announce": {"name": str, "text": LONG_TEXT},
    "fault": {"text": str, "code": range(1, 256)},
    "log": {"path": str},
    "leave": {},
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """size: ranks. timeout: seconds that all have to join. silence: seconds after which a rank is missed.

    address: where to listen; None for all addresses of this host. jax_host: the host of JAX's service as other ranks
    reach it; None to choose one by what the ranks report. stderr: the file descriptor of rank 0's standard error.
    """

    size: int
    secret: str
    port: int
    address: str | None
    jax_host: str | None
    timeout: float
    silence: float
    stderr: int


class Member:
    """A rank that has joined: its facts and its connection."""

    def __init__(self, facts: Facts, writer: asyncio.StreamWriter, sealer: channel.Sealer):
        self.facts, self.writer, self.sealer = facts, writer, sealer
        self.rank: int = facts["rank"]
        self.title = hosts.title(self.rank, facts["host"])
        self.silent = 0.0  # seconds
        self.note: dict[str, Any] = {}

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # it has gone
            self.writer.write(self.sealer.seal(message))


def difference(first: Facts, other: Facts) -> str | None:
    """Return a line that names the first fact in which `other` differs from rank 0; None where they agree."""
    for field, label in COMMON.items():
        if first.get(field) != other.get(field):
            return (
                f"{hosts.title(other['rank'], other['host'])} has {label} {other.get(field)}, but "
                f"{hosts.title(0, first['host'])} has {first.get(field)}: start every process of the job with the same"
            )
    return None


class Coordinator:
    """The state of one job."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.members: dict[int, Member] = {}  # those that are connected
        self.left: set[int] = set()
        self.admitted = False  # all ranks have joined
        self.deadline = time.monotonic() + settings.timeout
        self.fault: dict[str, Any] | None = None
        self.log: str | None = None
        self.exchanges, self.keys = Exchanges(), Keys()
        self.announced: dict[str, dict[str, Any]] = {}
        self.strangers: collections.OrderedDict[asyncio.StreamWriter, None] = collections.OrderedDict()
        self.over = asyncio.Event()
        self.suspended = self.reported = False
        self.service: Any = None
        self.jax_loaded = threading.Thread(target=__import__, args=("jaxlib._jax",))
        self.jax_loaded.start()  # takes a good part of a second, while the ranks come

    def report(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self.settings.stderr, f"jaxdp: {line}\n".encode())

    # Connections

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Speak with one connection until it ends."""
        self.strangers[writer] = None
        if len(self.strangers) > UNAUTHENTICATED + self.settings.size:
            self.strangers.popitem(last=False)[0].close()
        member: Member | None = None
        try:
            nonce = secrets.token_bytes(channel.NONCE)
            writer.write(channel.MAGIC + nonce)
            sealer = channel.to_coordinator(self.settings.secret, nonce)
            async with asyncio.timeout(FIRST_MESSAGE):
                first = await self.receive(reader, sealer, channel.FIRST_LIMIT)
            member = self.join(first, nonce, writer)
            while True:
                self.handle(member, await self.receive(reader, sealer))
        except channel.Refused as error:
            peer = writer.get_extra_info("peername") or ["?"]
            self.refuse(f"a message from {peer[0]}", str(error))
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            self.strangers.pop(writer, None)
            if member is not None:
                self.disconnected(member)
            writer.close()

    async def receive(
        self, reader: asyncio.StreamReader, sealer: channel.Sealer, limit: int = channel.LIMIT
    ) -> dict[str, Any]:
        head = await reader.readexactly(channel.HEAD)
        return sealer.open(head, await reader.readexactly(channel.length(head, limit)))

    def refuse(self, what: str, value: str) -> None:
        """Report, once for the job, a message that is not one of this job's."""
        if not self.reported:
            self.reported = True
            self.report(
                f"rank 0: refused {printable(what, 200)}: {printable(value, 80)}: no message of this job; the job "
                "continues, further ones are refused without a line (who can reach its port? see docs/hosts.md)"
            )

    # Joining

    def join(self, message: dict[str, Any], nonce: bytes, writer: asyncio.StreamWriter) -> Member:
        if probe := checked(message, {"nonce": str, "probe": True}):
            nonces = nonce, probe["nonce"].encode()
            writer.write(channel.to_rank(self.settings.secret, *nonces).seal({"pid": os.getpid()}))
            raise EOFError
        first = checked(message, {"nonce": str, "facts": FACTS})
        if first is None or first["facts"]["rank"] >= first["facts"]["size"] or len(first["facts"]["spaces"]) != 2:
            raise channel.Refused("its first message is malformed")
        self.strangers.pop(writer, None)
        member = Member(first["facts"], writer, channel.to_rank(self.settings.secret, nonce, first["nonce"].encode()))
        if self.admitted:
            member.send(error=f"{member.title} comes too late: all ranks of the job have joined already")
            raise EOFError
        before, self.members[member.rank] = self.members.get(member.rank), member
        error = difference(self.members[0].facts, member.facts) if 0 in self.members else None
        if before:
            error = (
                f"two processes say they are rank {member.rank}: {before.facts['pid']} on host {before.facts['host']} "
                f"and {member.facts['pid']} on host {member.facts['host']}: give every process its own rank"
            )
            before.send(error=error)
        elif member.rank == 0:
            errors = (difference(member.facts, other.facts) for other in self.members.values())
            error = next(filter(None, errors), None)
        if error and 0 in self.members:
            self.decide(error=error)
        elif len(self.members) == self.settings.size:
            self.admit()
        return member

    def admit(self) -> None:
        """All ranks are here: start JAX's service, and tell everyone who the others are."""
        self.admitted = True
        facts = [self.members[rank].facts for rank in range(self.settings.size)]
        try:
            one_host = hosts.on_one_host(facts)
            port = hosts.free_port()
            address = hosts.meeting_address(facts, port)
            if not one_host and self.settings.jax_host:
                address = hosts.join(self.settings.jax_host, port)
            bind = hosts.listening_address(hosts.split(address)[0], one_host) or "::"
            self.jax_loaded.join()
            self.service = private_jax.start_service(
                hosts.join(bind, port),
                self.settings.size,
                heartbeat_timeout=round(3 * self.settings.silence),  # it counts from a beat that may be half as old
                shutdown_timeout=max(1, min(20, round(self.settings.timeout))),
            )
        except (UsageError, RuntimeError) as error:
            self.decide(error=str(error))
            return
        for member in self.members.values():
            member.send(members=facts, jax=address)

    def decide(self, **verdict: Any) -> None:
        """The job does not start: tell every rank that is here the same."""
        self.admitted = True
        self.left |= self.members.keys()
        for member in self.members.values():
            member.send(**verdict)

    # Operations

    def handle(self, member: Member, message: dict[str, Any]) -> None:
        """Do one operation of a rank; a malformed one is refused, and the rank stays."""
        member.silent = 0.0
        name = message.get("op")
        fields = checked(message, OPERATIONS[name]) if isinstance(name, str) and name in OPERATIONS else None
        if fields is None:
            self.refuse(f"an operation of rank {member.rank}", str(name))
            member.send(id=message.get("id"), refused=True)
            return
        reply = getattr(self, f"do_{name}")(member, message.get("id"), **fields)
        if reply is not None:
            member.send(id=message.get("id"), **reply)

    def do_beat(self, member: Member, id: Any, note: dict[str, Any]) -> None:
        member.note = note
        member.send(beat=True)

    def do_beats(self, member: Member, id: Any) -> dict[str, Any]:
        return {"beats": {m.rank: m.note for m in self.members.values()}}

    def do_silent(self, member: Member, id: Any, seconds: float) -> None:
        def answer() -> None:
            silent = [m.rank for m in self.members.values() if m.silent >= seconds - TICK and m is not member]
            member.send(id=id, silent=silent)

        asyncio.get_running_loop().call_later(min(seconds, 60.0), answer)

    def do_exchange(self, member: Member, id: Any, members: list[int], **fields: Any) -> None:
        reply = lambda message: member.send(id=id, **message)
        self.exchanges.bring(member.rank, tuple(members), reply, self.left, **fields)

    def do_put(self, member: Member, id: Any, key: str, text: str) -> dict[str, Any]:
        self.keys.put(key, text)
        return {}

    def do_get(self, member: Member, id: Any, key: str, timeout: float) -> None:
        self.keys.get(key, timeout, lambda text: member.send(id=id, text=text))

    def do_forget(self, member: Member, id: Any, prefix: str) -> dict[str, Any]:
        self.keys.forget(prefix)
        return {}

    def do_announce(self, member: Member, id: Any, name: str, text: str) -> dict[str, Any]:
        """The first announcement of a name counts: every rank hears it."""
        first = name not in self.announced
        if first:
            self.announced[name] = {"rank": member.rank, "text": text}
            for other in self.members.values():
                other.send(announced=name, **self.announced[name])
        return {"first": first}

    def do_fault(self, member: Member, id: Any, text: str, code: int) -> dict[str, Any]:
        return {"first": self.end(text, code, member.rank)}

    def do_log(self, member: Member, id: Any, path: str) -> dict[str, Any]:
        self.log = path
        return {}

    def do_leave(self, member: Member, id: Any) -> dict[str, Any]:
        self.left.add(member.rank)
        self.exchanges.left(member.rank)
        return {}

    # Faults

    def end(self, text: str, code: int = 1, author: int | None = None) -> bool:
        """End the job for this cause, unless another came first; return whether it is the cause."""
        if self.fault is not None:
            return False
        self.fault = {"fault": text, "code": code, "rank": author}
        if author is None:
            self.report(text)
        for member in self.members.values():
            member.send(**self.fault)
        asyncio.get_running_loop().call_later(LINGER, self.over.set)
        return True

    def disconnected(self, member: Member) -> None:
        if self.members.get(member.rank) is not member:
            return
        del self.members[member.rank]
        if self.admitted and member.rank not in self.left:
            # Launchers kill all ranks some milliseconds after the first has died, and may name another.
            self.end(f"{member.title}, process {member.facts['pid']}, ended first, without a word: killed or crashed")
            self.left.add(member.rank)
            self.exchanges.left(member.rank)
        if member.rank == 0:
            self.note()
        if self.admitted and not self.members:
            self.over.set()

    def note(self) -> None:
        """Append the cause to the run's events where rank 0 could not write it any more."""
        if self.fault is None or self.fault["rank"] is not None or self.log is None:
            return
        with contextlib.suppress(OSError, ValueError):
            text = pathlib.Path(self.log).read_text()
            *_, last = text.rstrip("\n").rpartition("\n")
            if self.fault["fault"] in last:
                return
            line = json.dumps({"t": round(time.time(), 3), "kind": "failed", "reason": self.fault["fault"]})
            with open(self.log, "a") as file:
                file.write(line + "\n" if text.endswith("\n") or not text else f"\n{line}\n")

    async def watch(self) -> None:
        """Look at deadlines and silent ranks, until the job is over."""
        looked = time.monotonic()
        while not self.over.is_set():
            await asyncio.sleep(TICK)
            now = time.monotonic()
            elapsed, looked = now - looked, now
            self.exchanges.expire(lambda rank: rank in self.members and self.members[rank].silent < 1.5)
            self.keys.expire()
            if not self.admitted and now > self.deadline:
                missing = [rank for rank in range(self.settings.size) if rank not in self.members]
                self.decide(missing=missing, timeout=self.settings.timeout)
            if self.admitted and not self.members:
                self.over.set()
            if self.admitted:
                self.look_for_silence(elapsed)

    def look_for_silence(self, elapsed: float) -> None:
        """Count the silence of each rank by our own looks, so that a job that was suspended accuses nobody."""
        live = [m for m in self.members.values() if m.rank not in self.left]
        was_suspended = self.suspended
        self.suspended = bool(live) and all(m.silent > QUIET for m in live)
        for member in live:
            member.silent = 0.0 if was_suspended and not self.suspended else member.silent + min(elapsed, 1.0)
        if not self.suspended and (silent := [m for m in live if m.silent >= self.settings.silence]):
            names = ", ".join(m.title for m in silent)
            verb = "has" if len(silent) == 1 else "have"
            seconds = f"{self.settings.silence:.0f} s"
            self.end(f"{names} {verb} not been heard from for {seconds}: killed, stopped, or cut off")


def listen(address: str | None, port: int) -> socket.socket:
    """Return a socket that listens at an address of this host, or at all. Raises OSError."""
    families = [socket.AF_INET6, socket.AF_INET] if address is None and socket.has_ipv6 else [socket.AF_INET]
    if address is not None and ":" in address:
        families = [socket.AF_INET6]
    for family in families:
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and address is None:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.bind((address or ("::" if family == socket.AF_INET6 else ""), port))
            server.listen(1024)
            return server
        except OSError as error:
            server.close()
            problem = error
    raise problem


async def run(settings: Settings, server: socket.socket) -> None:
    coordinator = Coordinator(settings)
    loop = asyncio.get_running_loop()
    parent_gone = lambda: None if coordinator.admitted else coordinator.over.set()
    threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(parent_gone)), daemon=True).start()
    listener = await asyncio.start_server(coordinator.serve, sock=server)
    print("ready", flush=True)
    await coordinator.watch()
    listener.close()
    await asyncio.sleep(0.05)  # what was sent last goes out


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the ranks, and sent to all that a launcher knows of
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 1 << 16) if most > 0 else 1 << 16, most))
    settings = Settings(**json.loads(sys.stdin.readline()))
    try:
        server = listen(settings.address, settings.port)
    except OSError as error:
        print(error.strerror or error, flush=True)
        os._exit(1)
    try:
        asyncio.run(run(settings, server))
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(settings.stderr, f"jaxdp: the coordinator failed: {type(error).__name__}: {error}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()
