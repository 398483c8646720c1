"""A rank's connection to the coordinator, and the request to join the job over it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from jaxdp.errors import DistributedError, UsageError
from jaxdp.process import channel, hosts
from jaxdp.process.channel import Message, checked, printable
from jaxdp.process.protocol import ADMISSION, Facts, beat_interval, unpack

RETRIES = 5000.0  # attempts to connect in a second, of all ranks together
SILENT = 5.0  # seconds without a message after which a coordinator may be frozen
PATIENCE = 10.0  # seconds beyond the timeout, so that the coordinator's deadline comes first
REACTION = 1.0  # seconds that another program has to answer a line that is not of its protocol
# No program has answered.
NOBODY = (
    errno.ECONNREFUSED,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ETIMEDOUT,
)


def has_data(source: socket.socket | IO[str], seconds: float) -> bool:
    """Wait up to `seconds`; return whether a socket or a pipe has data, or is closed."""
    poll = select.poll()  # `select.select` knows 1024 files
    poll.register(source, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


class Foreign(ConnectionError):
    """The greeting is that of another program, or the coordinator of another job has refused the
    first message.

    A connection that is closed, or on which nothing arrives, says nothing about the program behind
    it."""


class Connection:
    """An authenticated connection to the coordinator. first: the fields of the first message.

    Raises Foreign, TimeoutError without a greeting within `timeout` seconds, or another OSError.
    """

    def __init__(self, host: str, port: int, secret: str, timeout: float, **first: Any):
        try:
            self.socket = socket.create_connection((host, port), timeout)
        except TimeoutError:
            raise TimeoutError(errno.ETIMEDOUT, "its host does not answer") from None
        self.has_answered = False
        self.socket.settimeout(timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            nonce = self._greeting(timeout)
        except OSError:
            self.socket.close()
            raise
        rank_nonce = secrets.token_hex(16)
        self._out = channel.to_coordinator(secret, nonce)
        self._in = channel.to_rank(secret, nonce, rank_nonce.encode())
        self._lock = threading.Lock()
        self.send(nonce=rank_nonce, **first)

    def _greeting(self, timeout: float) -> bytes:
        """Return the nonce of the coordinator's greeting. A program that waits for a request gets a
        wrong one.
        """
        if is_late := not has_data(self.socket, timeout):
            # Not a message: this connection can no longer be used.
            self.socket.sendall(channel.MAGIC)
            if not has_data(self.socket, REACTION):
                raise TimeoutError(
                    "it accepts connections, but sends nothing: frozen, overloaded or another program"
                )
        data = b""
        while len(data) < len(channel.MAGIC) + channel.NONCE:
            data += self._read(1)
            if not channel.MAGIC.startswith(data[: len(channel.MAGIC)]):
                self.socket.settimeout(REACTION)
                with contextlib.suppress(OSError):
                    data += self.socket.recv(40)
                raise Foreign(f"it answered {printable(data.decode(errors='replace'), 40)!r}")
        if is_late:
            raise TimeoutError(f"it sends nothing for {timeout:g} s: frozen or overloaded")
        return data[len(channel.MAGIC) :]

    def send(self, **message: Any) -> None:
        """Send a message. Raises OSError if the coordinator has ended."""
        with self._lock:
            self.socket.sendall(self._out.seal(channel.encode(message)))

    def receive(self) -> Message:
        """Wait for the next message. Raises OSError if the coordinator has ended or belongs to
        another job.
        """
        head = self._read(channel.HEAD)
        if head == channel.REFUSAL:
            raise Foreign("it has another secret")
        try:
            return self._in.open(head, self._read(channel.length(head, 1 << 30)))
        except channel.Refused as error:
            raise Foreign(str(error)) from None

    def answer(self, timeout: float, interval: float, silent: Callable[[], None]) -> Message:
        """Return the next message that is not the answer to a heartbeat. Raises TimeoutError after
        `timeout` seconds without any message; meanwhile `silent` is called every few seconds.
        interval: seconds between two heartbeats."""
        heard = time.monotonic()
        pause = max(SILENT, 2 * interval)
        while time.monotonic() - heard < timeout:
            if not has_data(self.socket, min(pause, timeout)):
                silent()
                continue
            message = self.receive()
            heard = time.monotonic()
            self.has_answered = True
            if message.keys() != {"beat"}:
                return message
        raise TimeoutError(f"it has sent nothing for {timeout:.0f} s: frozen or overloaded")

    @contextlib.contextmanager
    def beating(self, interval: float) -> Iterator[None]:
        """Send a heartbeat every `interval` seconds, until the coordinator has ended."""
        done = threading.Event()

        def beat() -> None:
            with contextlib.suppress(OSError):
                while not done.wait(interval):
                    # With an id, the coordinator answers before the admission.
                    self.send(op="beat", id="", note={})

        thread = threading.Thread(
            target=beat, name="heartbeats of a process that joins", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def prepare(self, prepare: Callable[[], None]) -> None:
        """Call `prepare`, and tell the coordinator that it has returned."""
        os.register_at_fork(after_in_child=self.socket.close)  # a worker may outlive this process
        prepare()
        with contextlib.suppress(
            OSError
        ):  # the coordinator has ended; its last message can still be read
            self.send(op="prepared", id="")

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            if not (part := self.socket.recv(min(count - len(data), 1 << 20))):
                raise ConnectionError("it closed the connection")
            data += part
        return bytes(data)


@dataclass(frozen=True)
class Joined:
    """A joined job. connection: to the coordinator. facts[rank]. jax_address: "host:port" of JAX's
    service.

    rank: this process's, in this generation of the job. address: (host, port) of the coordinator.
    secret: the job's."""

    connection: Connection
    facts: list[Facts]
    jax_address: str
    rank: int
    generation: int
    address: tuple[str, int]
    secret: str


def join(
    host: str,
    port: int,
    secret: str,
    facts: Facts,
    timeout: float,
    absent: Callable[[float], None] = lambda seconds: None,
    prepare: Callable[[], None] | None = None,
    silent: Callable[[], None] = lambda: None,
) -> Joined:
    """Join the job at its coordinator, or its next generation, retrying until it answers.

    absent: called with the seconds since the start while no coordinator is there; silent: called
    every few seconds while one is there, but sends nothing. prepare: called if the job runs, and
    this process is asked to build its run first. Raises UsageError (foreign program at the address,
    other secret, other facts) or DistributedError (a missing rank or coordinator; too few processes
    to continue)."""
    title = hosts.title(facts["rank"], facts["host"])
    began = time.monotonic()
    problem = "not tried"
    foreign = 0
    greeted = False
    interval = beat_interval(facts["size"])
    while (remaining := began + timeout - time.monotonic()) > 0:
        connection = None
        try:
            connection = Connection(host, port, secret, min(remaining, SILENT), facts=facts)
            greeted = True
            patience = timeout + PATIENCE
            connection.socket.settimeout(patience)
            with connection.beating(interval):
                admission = connection.answer(patience, interval, silent)
                if admission == {"prepare": True} and prepare is not None:
                    facts = {**facts, "prepares": False}
                    connection.prepare(prepare)
                    admission = connection.answer(patience, interval, silent)
                if admission.keys() == {"rank"}:  # admitted: what all ranks receive follows
                    admission |= connection.answer(patience, interval, silent)
            return Joined(connection, **_admitted(admission), address=(host, port), secret=secret)
        except OSError as error:
            problem = printable(error, 200) or type(error).__name__
            if connection is not None:
                connection.socket.close()
                if connection.has_answered:
                    began = time.monotonic()  # it may have waited for long
            if isinstance(error, TimeoutError):
                silent()
            elif error.errno in NOBODY:
                absent(time.monotonic() - began)
                foreign = 0  # what listens there next is another program
            foreign += isinstance(error, Foreign)
            if foreign >= 3 and connection is not None:
                raise UsageError(
                    f"{title}: the coordinator at {host}:{port} refused it, or is not of this job ({problem}): every "
                    f"process needs the same secret, in {channel.VARIABLE} or in {channel.secret_file()}"
                ) from None
            if foreign >= 3:
                raise UsageError(
                    f"rank {facts['rank']}: what listens at the coordinator's address {host}:{port} is not rank 0 of "
                    f"this job ({problem}): another program has that port; choose another"
                ) from None
        time.sleep(0.5 if foreign else max(0.05, facts["size"] / RETRIES))
    if greeted:
        raise DistributedError(
            f"{title} has lost the coordinator at {host}:{port} ({problem}), and none has taken its place within "
            f"{round(timeout, 1):g} s"
        )
    raise DistributedError(
        f"{title} found no rank 0 at the coordinator's address {host}:{port} within {round(timeout, 1):g} s "
        f"({problem}): see whether rank 0 was started there (JAXDP_TIMEOUT sets how long to wait)"
    )


def _admitted(message: Message) -> Message:
    """Return the fields of `Joined` in an answer of the coordinator. Raises its error."""
    admission = checked(message, ADMISSION)
    if admission is None:
        raise Foreign(f"it answered {str(message)[:80]!r}")
    if "code" in admission:
        failure = DistributedError(admission["error"], admission.get("rank"))
        failure.code = admission["code"]
        raise failure
    if "error" in admission:
        raise UsageError(admission["error"], rank=0)
    return {
        "facts": unpack(admission["members"]),
        "jax_address": admission["jax"],
        "rank": admission["rank"],
        "generation": admission["generation"],
    }
