"""A rank's connection to the coordinator, and the request to join the job over it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxdp.distributed import channel, hosts
from jaxdp.distributed.messages import checked, printable
from jaxdp.distributed.protocol import ADMISSION, Facts, beat_interval, unpack
from jaxdp.errors import DistributedError, UsageError

RETRIES = 5000.0  # attempts to connect in a second, of all ranks together
BUSY = 1200.0  # seconds that a coordinator may let a process wait while the job compiles, or trains for `join_after`
# No program has answered.
NOBODY = (errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ETIMEDOUT)


class Connection:
    """An authenticated connection to the coordinator. first: the fields of the first message."""

    def __init__(self, host: str, port: int, secret: str, timeout: float, **first: Any):
        try:
            self.socket = socket.create_connection((host, port), timeout)
        except TimeoutError:
            raise TimeoutError(errno.ETIMEDOUT, "its host does not answer") from None
        self.socket.settimeout(timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = self._read(len(channel.MAGIC) + channel.NONCE)
        if not greeting.startswith(channel.MAGIC):
            self.socket.close()
            raise ConnectionError(f"it answered {printable(greeting[:40])!r}")
        nonce, rank_nonce = greeting[len(channel.MAGIC) :], secrets.token_hex(16)
        self._out = channel.to_coordinator(secret, nonce)
        self._in = channel.to_rank(secret, nonce, rank_nonce.encode())
        self._lock = threading.Lock()
        self.send(nonce=rank_nonce, **first)

    def send(self, **message: Any) -> None:
        """Send a message. Raises OSError if the coordinator has ended."""
        with self._lock:
            self.socket.sendall(self._out.seal(channel.encode(message)))

    def receive(self) -> dict[str, Any]:
        """Wait for the next message. Raises OSError if the coordinator has ended or belongs to another job."""
        head = self._read(channel.HEAD)
        try:
            return self._in.open(head, self._read(channel.length(head, 1 << 30)))
        except channel.Refused as error:
            raise ConnectionError(str(error)) from None

    @contextlib.contextmanager
    def beating(self, interval: float) -> Iterator[None]:
        """Send a heartbeat every `interval` seconds, until the coordinator has ended."""
        done = threading.Event()

        def beat() -> None:
            with contextlib.suppress(OSError):
                while not done.wait(interval):
                    self.send(op="beat", note={})

        thread = threading.Thread(target=beat, name="heartbeats of a process that joins", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def receive_after(self, prepare: Callable[[], None]) -> dict[str, Any]:
        """Call `prepare`, tell the coordinator that it has returned, and wait for the next message."""
        os.register_at_fork(after_in_child=self.socket.close)  # a worker may outlive this process
        prepare()
        with contextlib.suppress(OSError):  # the coordinator has ended; its last message can still be read
            self.send(op="prepared", id="")
        return self.receive()

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            if not (part := self.socket.recv(min(count - len(data), 1 << 20))):
                raise ConnectionError("it closed the connection")
            data += part
        return bytes(data)


@dataclass(frozen=True)
class Joined:
    """A joined job. connection: to the coordinator. facts[rank]. jax_address: "host:port" of JAX's service.

    rank: this process's, in this generation of the job. address: (host, port) of the coordinator. secret: the job's.
    """

    connection: Connection
    facts: list[Facts]
    jax_address: str
    rank: int
    generation: int
    address: tuple[str, int]
    secret: str

    @property
    def last_facts(self) -> Facts:
        """Return the facts of this process for the generation after this one."""
        return {**self.facts[self.rank], "last": [self.generation, len(self.facts)]}

    def reconnect(self) -> Connection:
        """Connect to another coordinator at the address, for the heartbeats of this process while it is busy."""
        connection = Connection(*self.address, self.secret, 5.0, facts={**self.last_facts, "busy": True})
        connection.socket.settimeout(None)
        return connection


def join(
    host: str,
    port: int,
    secret: str,
    facts: Facts,
    timeout: float,
    absent: Callable[[float], None] = lambda seconds: None,
    prepare: Callable[[], None] | None = None,
) -> Joined:
    """Join the job at its coordinator, or the next generation of an elastic one, retrying until it answers.

    absent: called with the seconds since the start while no coordinator is there. prepare: called if the job runs, and
    this process is asked to build its run first. Raises UsageError (foreign program at the address, other secret, other
    facts) or DistributedError (a missing rank or coordinator; too few processes to continue an elastic job).
    """
    title, began, problem = hosts.title(facts["rank"], facts["host"]), time.monotonic(), "not tried"
    foreign, refused, greeted = 0, 0, False
    patience = timeout + (BUSY if facts.get("elastic") == "on" else 0.0)
    while (remaining := began + timeout - time.monotonic()) > 0:
        greeted = False
        try:
            connection = Connection(host, port, secret, min(remaining, 5.0), facts=facts)
            greeted = True
            connection.socket.settimeout(patience + 10.0)  # the coordinator's deadline comes first
            with connection.beating(beat_interval(facts["size"])):
                admission = connection.receive()
                if admission == {"prepare": True} and prepare is not None:
                    facts = {**facts, "prepares": False}
                    admission = connection.receive_after(prepare)
                if admission.keys() == {"rank"}:  # admitted: what all ranks receive follows
                    admission |= connection.receive()
            return Joined(connection, **_admitted(admission), address=(host, port), secret=secret)
        except (OSError, channel.Refused) as error:
            problem = printable(error, 200) or type(error).__name__
            if greeted:
                connection.socket.close()
                refused += 1
                began = began if "last" in facts else time.monotonic()  # it may have waited for long
            if refused >= 3 and "last" not in facts:
                raise UsageError(
                    f"{title}: the coordinator at {host}:{port} refused it, or is not of this job ({problem}): every "
                    f"process needs the same secret, in {channel.VARIABLE} or in {channel.secret_file()}"
                ) from None
            if is_absent := getattr(error, "errno", None) in NOBODY:
                absent(time.monotonic() - began)
                foreign = refused = 0  # what listens there next is another program
            foreign += not greeted and not is_absent
        if foreign >= 3:
            raise UsageError(
                f"rank {facts['rank']}: what listens at the coordinator's address {host}:{port} is not rank 0 of this "
                f"job ({problem}): another program has that port; choose another"
            )
        is_closing = refused and "last" not in facts  # a coordinator that ends closes what it has accepted
        time.sleep(0.5 if foreign or is_closing else max(0.05, facts["size"] / RETRIES))
    if greeted:
        raise DistributedError(f"{title} was not admitted by the coordinator at {host}:{port}: {problem}")
    raise DistributedError(
        f"{title} found no rank 0 at the coordinator's address {host}:{port} within {round(timeout, 1):g} s "
        f"({problem}): see whether rank 0 was started there (JAXDP_TIMEOUT sets how long to wait)"
    )


def _admitted(message: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `Joined` in an answer of the coordinator. Raises its error."""
    admission = checked(message, ADMISSION)
    if admission is None:
        raise channel.Refused(f"it answered {str(message)[:80]!r}")
    if "code" in admission:
        failure = DistributedError(admission["error"], admission.get("rank"))
        failure.code = admission["code"]
        raise failure
    if "error" in admission:
        raise UsageError(admission["error"], rank=0)
    members, rank, number = unpack(admission["members"]), admission["rank"], admission["generation"]
    return {"facts": members, "jax_address": admission["jax"], "rank": rank, "generation": number}
