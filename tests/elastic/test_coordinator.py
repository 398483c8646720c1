"""The coordinator of a job: what a rank does while it is frozen, flooded or gone, and which
generations form.

It runs in this process where its times are shortened, else in its own; all sockets are real.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from benchmarks.clients import facts
from jaxdp.elastic import regroup, states
from jaxdp.errors import DistributedError, UsageError
from jaxdp.process import (
    channel,
    connection,
    coordinator_process,
    hosts,
    joining,
    protocol,
)
from jaxdp.process.connection import Connection

SECRET = "s" * 64


def until(condition, seconds=60.0):
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def listening(serve=lambda client: None):
    """A port of this host where a program does `serve` with each connection, and keeps it open."""
    clients = []

    def accept():
        with contextlib.suppress(OSError):
            while True:
                clients.append(server.accept()[0])
                serve(clients[-1])

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(2)
    for client in clients:
        client.close()


def greet(client):
    client.sendall(channel.MAGIC + secrets.token_bytes(channel.NONCE))


def answer_a_line(client):
    """As HTTP servers do: they wait for a request."""
    client.recv(1000)
    client.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")


def refuse(client):
    greet(client)
    client.recv(1000)
    client.sendall(channel.REFUSAL)


def greet_late(client):
    client.recv(1000)
    greet(client)


def hang_up(client):
    client.close()


def greet_and_hang_up(client):
    greet(client)
    client.shutdown(2)


@pytest.mark.quick(5)
@pytest.mark.parametrize("last", [{}, {"last": [3, 3]}], ids=["new", "survivor"])
@pytest.mark.parametrize(
    ("serve", "text"),
    [
        (lambda client: None, "sends nothing: frozen, overloaded or another program"),
        (lambda client: client.sendall(channel.MAGIC[:7]), "timed out"),
        (greet, "it has sent nothing for"),
        (greet_late, "sends nothing"),
        (hang_up, "found no rank 0"),
        (greet_and_hang_up, "has lost the coordinator at .* none has taken its place"),
    ],
    ids=["silence", "a part", "greets", "greets late", "closes", "greets and closes"],
)
def test_no_greeting_is_not_a_wrong_one(monkeypatch, serve, text, last):
    """It may be a frozen or a flooded coordinator: no reason to end a job for good, with code 2."""
    for name, seconds in {"SILENT": 0.1, "REACTION": 0.2, "PATIENCE": 0.2}.items():
        monkeypatch.setattr(connection, name, seconds)
    checks = []
    with listening(serve) as port, pytest.raises(DistributedError, match=text) as error:
        connection.join(
            "127.0.0.1", port, SECRET, facts(1, 3) | last, 0.8, silent=lambda: checks.append(1)
        )
    assert error.value.code is None and bool(checks) == ("hang" not in serve.__name__)


@pytest.mark.quick(5)
@pytest.mark.parametrize("last", [{}, {"last": [3, 3]}], ids=["new", "survivor"])
@pytest.mark.parametrize(
    ("serve", "text"),
    [
        (
            lambda client: client.sendall(b"SSH-2.0-x\r\n"),
            "SSH-2.0-x.*another program has that port",
        ),
        (answer_a_line, "HTTP/1.0 400.*another program has that port"),
        (refuse, "needs the same secret"),
    ],
    ids=["ssh", "http", "another secret"],
)
def test_a_wrong_greeting(monkeypatch, serve, text, last):
    monkeypatch.setattr(connection, "SILENT", 0.1)
    with listening(serve) as port, pytest.raises(UsageError, match=text):
        connection.join("127.0.0.1", port, SECRET, facts(1, 3) | last, 20.0)


def elastic_settings(size, port, **options):
    """The settings of the coordinator of an elastic job."""
    options = regroup.Options(join_after=0.0, **options)
    more = {"generation": options.generation, "options": options.options()}
    return protocol.Settings(size, SECRET, port, "127.0.0.1", "127.0.0.1", 60.0, 20.0, **more)


@pytest.fixture
def start():
    """A function that starts a coordinator of an elastic job of three in its own process; its
    settings.
    """
    settings = elastic_settings(3, hosts.free_port())
    settings = dataclasses.replace(settings, stderr=os.open(os.devnull, os.O_WRONLY))
    before = len(joining._children)
    yield lambda **more: (
        joining.start_coordinator(dataclasses.replace(settings, **more), "here"),
        settings,
    )
    for child in joining._children[before:]:
        child.kill()
        child.communicate()
    del joining._children[before:]


def runs(pid):
    return next(child.poll() is None for child in joining._children if child.pid == pid)


def test_only_a_coordinator_that_is_stopped_is_ended(monkeypatch, start):
    monkeypatch.setattr(joining, "APART", 0.0)
    pid, settings = start()
    other, _ = start(port=hosts.free_port())
    stranger, _ = start(port=hosts.free_port(), secret="t" * 64)
    for stopped in (other, stranger):
        os.kill(stopped, signal.SIGSTOP)
    ours = joining.Frozen(SECRET, settings.port)
    for _ in range(3):
        ours.end()
        time.sleep(0.3)  # it runs ten times a second
    assert [*ours.last] == [str(pid)] and runs(pid)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: ours.end() or not runs(pid))
    assert runs(other) and runs(stranger)


def test_two_checks_at_one_moment_end_nobody(start):
    pid, settings = start()
    ours = joining.Frozen(SECRET, settings.port)
    for _ in range(20):
        ours.end()
    assert ours.last and runs(pid)


@pytest.mark.parametrize("moment", ["before they connect", "while they wait"])
def test_a_frozen_coordinator_is_replaced(monkeypatch, start, moment):
    """All ranks join another one, which the first of them starts."""
    monkeypatch.setattr(connection, "SILENT", 0.5)
    monkeypatch.setattr(connection, "REACTION", 0.1)
    monkeypatch.setattr(joining, "APART", 0.3)
    pid, settings = start()
    settings = dataclasses.replace(settings, stderr=os.dup(settings.stderr))

    def enter(rank):
        place = joining.Place(settings, rank)
        address = "127.0.0.1", settings.port, SECRET
        return connection.join(
            *address, facts(rank, 3), 60.0, absent=place.absent, silent=place.silent
        )

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        if moment == "before they connect":
            os.kill(pid, signal.SIGSTOP)
        first = [pool.submit(enter, rank) for rank in range(2)]
        if moment == "while they wait":
            time.sleep(0.5)  # whichever they do then
            os.kill(pid, signal.SIGSTOP)
        until(lambda: not runs(pid))
        jobs = [x.result() for x in [*first, pool.submit(enter, 2)]]
    assert [job.rank for job in jobs] == [0, 1, 2] and {job.generation for job in jobs} == {0}
    for job in jobs:
        job.connection.socket.close()


def test_strangers_do_not_push_out_a_connecting_rank(start):
    """A flood brings hundreds of connections before a rank has answered the greeting."""
    _, settings = start()
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(socket.create_connection(("127.0.0.1", settings.port), 20.0))
        strangers = [
            socket.create_connection(("127.0.0.1", settings.port), 20.0) for _ in range(600)
        ]
        for stranger in strangers:
            stack.enter_context(stranger)
        assert all(stranger.recv(100) for stranger in strangers)
        greeting = rank.recv(100)
        nonce = greeting[len(channel.MAGIC) :]
        sealed = channel.to_coordinator(SECRET, nonce).seal(
            channel.encode({"nonce": "n", "probe": True})
        )
        rank.sendall(sealed)
        assert len(rank.recv(1000)) > channel.HEAD


class Job:
    """An elastic job of `size` ranks whose coordinator runs in this process, in a thread."""

    def __init__(self, size, port=None):
        self.size, self.port, self.lines, self.ranks = size, port or hosts.free_port(), [], []
        self.settings = elastic_settings(size, self.port, join_timeout=2.0)
        ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run(ready)), daemon=True)
        self.thread.start()
        assert ready.wait(60)

    async def _run(self, ready):
        self.coordinator = coordinator_process.Coordinator(self.settings)
        self.coordinator.report = self.lines.append
        self.loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self.coordinator.serve, "127.0.0.1", self.port)
        ready.set()
        await self.coordinator.watch()
        server.close()

    def connect(self, rank, **more):
        self.ranks.append(Rank(self, rank, more))
        return self.ranks[-1]

    def close(self):
        # First, so that no generation forms of ranks that are about to close their connections.
        self.loop.call_soon_threadsafe(self.coordinator.done.set)
        self.thread.join(60)
        for rank in self.ranks:
            rank.close()


class Rank:
    """A connection of a process, which sends heartbeats until `freeze`."""

    def __init__(self, job, rank, more):
        self.facts = facts(rank, job.size) | {"host": "a", "boot": "b"} | more
        self.line = Connection("127.0.0.1", job.port, SECRET, 20.0, facts=self.facts)
        self.line.socket.settimeout(None)
        self.messages, self.job, self.frozen = [], job, threading.Event()
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def _listen(self):
        with contextlib.suppress(OSError):
            while True:
                message = self.line.receive()
                if message.keys() != {"beat"}:
                    self.messages.append(message)
        self.messages.append("closed")

    def _beat(self):
        with contextlib.suppress(OSError):
            while not self.frozen.wait(0.1):
                self.line.send(op="beat", note={})

    def member(self):
        """The facts of all members, if this process was admitted."""
        return next(
            (protocol.unpack(m["members"]) for m in [*self.messages] if "members" in m), None
        )

    def open(self):
        """Report that this process has the state, as all do that have passed the first barrier."""
        self.line.send(op="opened")

    def report(self, generation, size, **more):
        """Connect again, for the next generation."""
        return self.job.connect(self.facts["rank"], **{k: v for k, v in self.facts.items() if k != "rank"}, **more,
                                last=[generation, size])  # fmt: skip

    def close(self):
        self.frozen.set()
        with contextlib.suppress(OSError):
            self.line.socket.shutdown(2)
        self.line.socket.close()


@pytest.fixture
def job(monkeypatch):
    """A function that starts an elastic job; its times are tenths of the usual ones, or less."""
    for name, seconds in {"WINDOW": 0.3, "LATE": 60.0, "QUIET": 30.0}.items():
        monkeypatch.setattr(states, name, seconds)
    jobs = []

    def start(size, port=None):
        jobs.append(Job(size, port))
        return jobs[-1]

    yield start
    for one in jobs:
        one.close()


def generation(job, size, opened=None):
    """The ranks of the first generation, of which some have the state."""
    ranks = [job.connect(rank) for rank in range(size)]
    until(lambda: all(rank.member() for rank in ranks))
    for rank in ranks if opened is None else opened and [ranks[i] for i in opened]:
        rank.open()

    def states():
        return [m.facts.get("state", -1) for m in job.coordinator.generation.members.values()]

    until(
        lambda: (
            sorted(states())
            == sorted(0 if opened is None or i in opened else -1 for i in range(size))
        )
    )
    return ranks


def hold(job, seconds, *ranks):
    """Assert that none of these processes is admitted for as long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert not any(rank.member() for rank in ranks), job.lines
        time.sleep(0.01)


def waited(job):
    """Seconds since the end of the generation; None while it trains."""
    machine = job.coordinator.generation.machine
    return None if machine.state in (states.FIRST, states.TRAINING) else machine.seconds


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_generation_forms_without_the_last_state(monkeypatch, job, size):
    """Its process sends heartbeats, and comes later than any limit; the others are dead, and have
    been started again.
    """
    monkeypatch.setattr(states, "LATE", 1.0)
    job = job(size)
    *lost, last = generation(job, size)
    for rank in lost:
        rank.close()
    new = [job.connect(rank, pid=500 + rank) for rank in range(size - 1)]
    until(lambda: last.messages[-1:] and "ended" in last.messages[-1])
    until(lambda: waited(job) > states.LATE + 0.5)
    hold(job, 0.3, *new)
    process = f"waits for rank {size - 1} (host a), process {last.facts['pid']}: it alone may have the newest state"
    assert [line for line in job.lines if process in line and "generation 1" in line]
    late = last.report(0, size, state=0)
    until(lambda: all(rank.member() for rank in [late, *new]))
    assert [f.get("state", -1) for f in late.member()] == [0] + [-1] * (size - 1)


def test_a_generation_forms_if_the_state_is_lost(job):
    """The state is lost with its last process, or if that sends nothing for LATE seconds."""
    job = job(2)
    first, last = generation(job, 2)
    first.close()
    new = job.connect(0, pid=500)
    until(lambda: waited(job) is not None and waited(job) > states.WINDOW + 0.2)
    hold(job, 0.2, new)
    last.close()
    until(new.member)
    assert len(new.member()) == 1


def test_a_process_reconnects_and_brings_the_state(monkeypatch, job):
    """It alone has it; the other one waits for it, though to the coordinator it may be dead."""
    monkeypatch.setattr(states, "WINDOW", 30.0)
    job = job(2)
    first, second = generation(job, 2, opened=[0])
    first.close()
    until(lambda: second.messages[-1:] and "ended" in second.messages[-1])
    other = second.report(0, 2)
    until(lambda: job.coordinator.generation.machine.waiting)
    hold(job, 0.3, other)
    back = first.report(0, 2, state=0)
    until(lambda: back.member() and other.member())
    assert [f.get("state", -1) for f in back.member()] == [0, -1]


def test_a_frozen_process_is_awaited_for_its_state(monkeypatch, job):
    """For LATE seconds, as if it were busy; without heartbeats its connection says that it may
    live.
    """
    monkeypatch.setattr(states, "LATE", 2.0)
    job = job(2)
    first, last = generation(job, 2)
    first.close()
    last.frozen.set()
    new = job.connect(0, pid=500)
    # It was silent for a moment before the end.
    until(lambda: (waited(job) or 0.0) > states.LATE - 0.5)
    assert not new.member()
    until(new.member)
    assert job.coordinator.generation.number == 1 and not [f for f in new.member() if "state" in f]


def test_a_generation_that_never_began_has_no_state(monkeypatch, job):
    """Its processes survive it, but its only rank with the state hangs: they wait for that one."""
    monkeypatch.setattr(states, "LATE", 1.0)
    job = job(3)
    old, *others = generation(job, 3, opened=[0])
    job.loop.call_soon_threadsafe(job.coordinator.generation.machine.on, "fails", "test")
    survivors = [rank.report(0, 3) for rank in others]
    until(lambda: waited(job) is not None and waited(job) > states.LATE + 0.3)
    hold(job, 0.3, *survivors)
    back = old.report(0, 3, state=0)
    until(back.member)
    assert [f.get("state", -1) for f in back.member()] == [0, -1, -1]


def test_most_with_the_state_do_not_await_a_frozen_one(job):
    job = job(3)
    first, second, third = generation(job, 3)
    third.frozen.set()
    first.close()
    until(lambda: "ended" in second.messages[-1])
    back = second.report(0, 3, state=0)
    new = job.connect(0, pid=500)
    until(lambda: back.member() and new.member())
    assert len(back.member()) == 2 and waited(job) is None


def test_a_new_coordinator_awaits_a_state_that_exists(job):
    """Two ranks of three were admitted together with the one that had the state, and the
    coordinator was lost.
    """
    job = job(3)
    two = [job.connect(rank, last=[4, 3], newest=3) for rank in (1, 2)]
    until(lambda: waited(job) is not None and waited(job) > states.WINDOW + 0.3)
    hold(job, 0.3, *two)
    last = job.connect(0, last=[4, 3], newest=3, state=3)
    until(lambda: all(rank.member() for rank in [*two, last]))
    assert job.coordinator.generation.number == 5


def test_all_processes_suffice_for_a_new_coordinator(job):
    """Half of the last generation have died with the coordinator; the processes in their place
    prove that.
    """
    job = job(4)
    survivor = job.connect(3, last=[7, 4], state=7, newest=7)
    new = [job.connect(rank, pid=500 + rank) for rank in range(2)]
    until(lambda: waited(job) is not None and waited(job) > states.WINDOW + 0.3)
    hold(job, 0.3, survivor, *new)
    new.append(job.connect(2, pid=502))
    until(lambda: all(rank.member() for rank in [survivor, *new]))
    assert [f.get("state", -1) for f in survivor.member()] == [7, -1, -1, -1]


def test_a_coordinator_that_was_stopped_did_not_wait(monkeypatch, job):
    """It would form a generation of the ranks whose messages it happens to read first."""
    monkeypatch.setattr(states, "WINDOW", 5.0)
    job = job(3)
    first, *_ = generation(job, 3)
    job.loop.call_soon_threadsafe(job.coordinator.generation.machine.on, "fails", "test")
    back = first.report(0, 3, state=0)
    until(lambda: waited(job) is not None and job.coordinator.generation.machine.waiting)
    ended, done = job.coordinator.generation, concurrent.futures.Future()
    before = waited(job)
    job.loop.call_soon_threadsafe(lambda: done.set_result(ended.tick(60.0)))
    done.result(60)
    assert waited(job) < before + 10.0 and back.line


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_coordinator_lost_early_is_no_usage_error(monkeypatch, start, number, tmp_path):
    monkeypatch.setattr(joining, "SILENT", 0.3)
    monkeypatch.setattr(joining, "APART", 0.2)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nkill -{number.name[3:]} $$\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    assert start()[0] is None
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


CONNECT = """
import os, threading, types
from jaxdp.elastic import regroup
from jaxdp.process import hosts, private_jax
from jaxdp.errors import GenerationEnded


class Member(regroup.ElasticMembership):
    def __init__(self):
        address = f"127.0.0.1:{hosts.free_port()}"
        self.job = types.SimpleNamespace(jax_address=address, secret="s" * 64)
        self.rank, self.timeout = 0, 1.0


member = Member()
if SERVED:
    service = private_jax.start_service(member.job.jax_address, 2, member.job.secret, 5)
before = {*threading.enumerate()}
threading.Timer(2.0, lambda: setattr(member, "ended", "lost")).start()
try:
    member.connect()
except GenerationEnded as error:
    for thread in {*threading.enumerate()} - before:
        if thread.name != "relay":
            thread.join()
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "served", [True, False], ids=["a rank is missing", "the service is missing"]
)
def test_a_process_none_connects_with_keeps_its_state(served):
    """It hears at once that the generation has ended; JAX would abort it after `JAXDP_TIMEOUT`,
    here a second, and the five that JAX adds.
    """
    code = CONNECT.replace("SERVED", str(served))
    env = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout) == (0, "lost\n"), done.stderr
