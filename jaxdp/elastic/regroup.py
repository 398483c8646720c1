"""The processes of an elastic job: each leaves a generation that has ended, and joins the next one;
what it runs is called again in each generation, until it returns."""

import collections
import contextlib
import ctypes
import dataclasses
import gc
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import jax

from jaxdp.elastic.states import LATE
from jaxdp.errors import (
    DistributedError,
    GenerationEnded,
    TooManyDevices,
    UsageError,
    is_consequence,
)
from jaxdp.process import connection, enter, hosts, joining, membership, private_jax
from jaxdp.process.channel import Message, printable
from jaxdp.process.connection import SILENT, Connection, Joined
from jaxdp.process.context import Context, renew
from jaxdp.process.enter import VERDICT
from jaxdp.process.membership import Fields, Group
from jaxdp.process.monitor import Stopped
from jaxdp.process.protocol import Facts
from jaxdp.process.relay import Relay

_services: set[int] = set()  # ports of the coordinator, and of JAX's service for each generation


def break_collectives() -> None:
    """Shut down this process's TCP connections for reading, but those to the job's services.

    A collective over Gloo then fails at once. Otherwise it waits as long as the connections to a
    lost process are open: those of a process that is stopped, cut off, or waits itself. A
    connection that is shut down for writing would make Gloo forget a send: it queues what could not
    be written, and its error reaches receivers only (gloo/transport/tcp, Pair::signalException).
    """
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if is_tcp and connection.getpeername()[1] not in _services:
                        connection.shutdown(socket.SHUT_RD)


T = TypeVar("T")


class ElasticMembership(membership.Membership):
    """The membership of a process in one generation. The end of the coordinator ends the
    generation, not the process, which then connects to the next one, for heartbeats only."""

    ends_alone = True

    def __post_init__(self) -> None:
        super().__post_init__()
        job, (host, port) = self.job, self.job.address
        if hosts.is_own(host):  # a cut network cannot be the cause
            self.silence = max(self.silence, self.timeout)
        _services.update((port, hosts.split(job.jax_address)[1]))
        self._frozen = joining.Frozen(job.secret, port)
        self._breaking = threading.Lock()

    @property
    def last_facts(self) -> Facts:
        """Return the facts of this process for the next generation."""
        facts = self.job.facts
        newest = max(one.get("state", -1) for one in facts)
        return facts[self.rank] | {"last": [self.job.generation, self.size], "newest": newest}

    def report_missing(self, text: str) -> None:
        """The coordinator ends the generation."""

    def is_new(self, rank: int) -> bool:
        return self.job.generation > 0 and "last" not in self.job.facts[rank]

    def check_generation(self) -> None:
        if self.ended is not None:
            raise GenerationEnded(self.ended)

    def has_ended(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.ended is not None, seconds)

    def interruptible(self, work: Callable[[], T]) -> T:
        """Return work(), from a thread that is left behind if this generation ends before. Raises
        GenerationEnded.
        """
        done: Future[T] = Future()

        def run():
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not wait([done], 0.02).done:
            if self.ended is not None:
                _abandoned.append(work)
                self.check_generation()
        return done.result()

    def compute(self, work: Callable[[], Any]) -> Any:
        # JAX would not return before Gloo gives up to connect to a process that was killed, and
        # `break_collectives` does not reach a connection that is not made yet.
        if jax.default_backend() != "cpu":
            return super().compute(work)
        try:
            return self.interruptible(lambda: jax.block_until_ready(work()))
        except GenerationEnded:
            keep_devices()
            raise

    def connect(self) -> Any:
        """Connect a client of JAX's service through a relay, and return it: this process may leave
        without waiting for the others, and connect again.

        Raises GenerationEnded if a rank or the service is lost meanwhile, and RuntimeError after
        `timeout` seconds."""
        relay = Relay(*hosts.split(self.job.jax_address))
        client = private_jax.make_client(relay.address, self.rank, self.job.secret, self.timeout)
        self.interruptible(client.connect)
        _relays.append((client, relay))
        return client

    def close(self) -> None:
        """Leave an ended generation: close the connection, stop the threads, and free what its
        listeners hold.
        """
        with self._breaking:  # else it would break off what the next generation does
            self.ending.set()
        self.connection.socket.close()
        self._listeners.clear()

    def _hear(self, message: Message) -> None:
        if isinstance(text := message.get("ended"), str):
            with self._changed:
                self.ended = self.ended or printable(text) or "its ranks regroup"
                self._changed.notify_all()
            self._break_off()
        else:
            super()._hear(message)

    def _break_off(self) -> None:
        """Let the collectives of this process, and its calls of JAX's service, fail."""
        with self._breaking:
            if not self.ending.is_set():
                break_collectives()
                cancel_calls()

    def _each_beat(self) -> None:
        if self._lost is None and self._unheard * self.beat >= SILENT:
            self._frozen.end()  # its connections close, and another one takes its place
        if self.ended is not None:
            self._break_off()  # what this process has begun since

    def _lost_coordinator(self) -> None:
        if not self.ending.is_set():
            self._hear({"ended": "its coordinator has gone"})
        # This process may be compiling, and report to the next coordinator later.
        while not self.ending.wait(0.5):
            with contextlib.suppress(OSError):
                facts = self.last_facts | {"busy": True}
                self.connection = Connection(*self.job.address, self.job.secret, 5.0, facts=facts)
                self.connection.socket.settimeout(None)
                with self.connection.socket:
                    while not self.ending.is_set():
                        self.connection.receive()


@dataclasses.dataclass
class Options(Group):
    """Settings of a job whose processes may come and go; see `jaxdp.config.Elastic`."""

    min_processes: int = 1
    join_timeout: float = 60.0
    join_after: float = 15.0

    kind = "elastic"
    membership = ElasticMembership
    generation = "jaxdp.elastic.elastic_generation:ElasticGeneration"
    silence = 10.0
    moves = True

    def options(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def enter(self, enter: Callable[[Joined], Fields], job: Joined) -> Fields:
        """Enter the job; if a process is lost meanwhile, the next generation."""
        if file := os.environ.get("JAXDP_LOSSES"):  # of `jaxdp launch`
            pathlib.Path(file).write_text("allowed", encoding="utf-8")
        while True:
            try:
                return enter(job)
            except GenerationEnded:
                job = rejoin()


def rejoin() -> Joined:
    """Leave the generation that has ended, and join the next one. Raises DistributedError if too
    few processes are left.
    """
    member = current()
    world, timeout, group, _ = enter.entered()
    assert member is not None and isinstance(group, Options)
    address, secret = member.job.address, member.job.secret
    membership.forget()
    cancel_calls()
    settings = joining.coordinator_settings(world, *address, secret, timeout, group)
    place = joining.Place(settings, member.local_rank)
    limit = LATE + group.join_timeout + timeout
    job = connection.join(
        *address, secret, member.last_facts, limit, place.absent, silent=place.silent
    )
    member.close()
    return job


def current() -> ElasticMembership | None:
    """Return the membership of this process; None if it is alone, or in a fixed group."""
    member = membership.current()
    return member if isinstance(member, ElasticMembership) else None


def report_state() -> None:
    """Tell the coordinator that this process has the state of this generation, from which the job
    can continue.
    """
    if (member := current()) is not None:
        member.job.facts[member.rank]["state"] = member.job.generation
        with contextlib.suppress(OSError):
            member.connection.send(op="opened")


# Among them are the calls of clients that wait for others, as one does that is destroyed.
_abandoned: list[Any] = []  # what has not returned when its generation ended
_relays: list[Any] = []  # the client and its relay, until this process leaves


def cancel_calls() -> None:
    """Leave JAX's service, if connected: what waits in it, such as a barrier of Orbax, raises at
    once.
    """
    while _relays:
        client, relay = _relays.pop()
        with contextlib.suppress(RuntimeError):  # it cannot say so
            client.shutdown()
        relay.close()


def keep_devices() -> None:
    """Keep the devices of this process open until it ends, for a program that does not return."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(jax.local_devices()[0].client))


LOST = 5.0  # seconds until the devices of a program that does not return are left open, on CPU
AGAIN = 600.0  # seconds in which a process may end 3 generations because a connection is broken
STUCK = 60.0  # seconds until its process ends, on GPUs

_ended = collections.deque[float](maxlen=3)  # when this process ended a generation


def run_generations(
    train: Callable[[Context], T], context: Context, ended: Callable[[], None]
) -> T:
    """Call `train` with the processes of each generation of the job, until it returns.

    All arrays and compiled programs of the one before become invalid. ended: called after each
    generation, before the devices are closed. Raises DistributedError if too few processes are
    left, or the coordinator has gone.
    """
    regrouped = False
    while True:
        try:
            if regrouped:
                context.agree(None)  # a process that joins tells here if its config is wrong
            return train(context)
        except Exception as error:
            if not has_ended(error):
                raise
            if isinstance(error, Stopped):
                # Another process may have ended the generation already.
                with contextlib.suppress(DistributedError):
                    context.barrier("regroup")
                    membership.joined().request("regroup", fault="")
            wait_for_programs()
        ended()
        gc.collect()
        fields = enter.entered().group.enter(enter.enter, rejoin())
        context, regrouped = renew(**fields), True


def wait_for_programs() -> None:
    """Wait for the programs of an ended generation, for at most LOST seconds on CPU, and STUCK on
    GPUs.

    One may wait for a message that Gloo has lost, and then the devices cannot be closed. Those of
    CPUs stay open until this process ends, beside those of the next generation. GPUs must be closed
    first: this process ends, and joins the next generation if a launcher starts it again. Call it
    while the results of all programs are still referenced."""
    began, on_cpu = time.monotonic(), jax.default_backend() == "cpu"
    while any(not x.is_deleted() and not x.is_ready() for x in jax.live_arrays()):
        waited = time.monotonic() - began
        if on_cpu and waited > LOST:
            keep_devices()
            return
        if waited > STUCK:
            member = membership.joined()
            text = f"{member.name(member.rank)} ends: a collective of the ended generation does not return"
            member.end_process(text, 1, member.rank)
        time.sleep(0.01)


def has_ended(error: BaseException) -> bool:
    """Return whether an error is a consequence of the end of this generation."""
    if isinstance(error, Stopped):
        return error.kind == "regroup"
    member = current()
    if member is None:
        return False
    if isinstance(error, TooManyDevices) and (new := [*filter(member.is_new, range(member.size))]):
        error.rank = member.rank if member.rank in new else new[0]
    if isinstance(error, UsageError) and error.rank is not None:
        return error.rank != member.rank and member.is_new(error.rank) and member.has_ended(VERDICT)
    if not is_consequence(error):
        return member.has_ended(0.5)
    return member.has_ended(VERDICT) or end_generation(member)


def end_generation(member: ElasticMembership) -> bool:
    """End the generation, since a collective has failed although no process was lost: a connection
    is broken.

    Returns False if this would be the fourth time within ten minutes: then the process ends."""
    now = time.monotonic()
    if len(_ended) == _ended.maxlen and now - _ended[0] < AGAIN:
        return False
    _ended.append(now)
    with contextlib.suppress(DistributedError):
        member.request(
            "regroup",
            fault=f"{member.name(member.rank)} has lost a connection, but no process has ended",
        )
    return member.has_ended(VERDICT)
