"""Join a job: agree on an address and a secret, start the coordinator (rank 0), and connect to it.

`Frozen` ends a coordinator of this job on this host that does not run: stopped by a signal, or in a frozen
control group. It would keep the job's port, and might continue later, when another one has taken its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import hmac
import json
import math
import os
import pathlib
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from jaxdp.errors import UsageError
from jaxdp.process import channel, hosts, imports, mpi
from jaxdp.process.connection import SILENT, Connection, Joined, has_data, join
from jaxdp.process.launchers import MPI, World
from jaxdp.process.membership import Group
from jaxdp.process.protocol import Facts, Settings, silence

APART = 4.0  # seconds between two checks of what a process does, at least
VARIABLE = "JAXDP_COORDINATOR_OF"  # in a coordinator's environment, which other users cannot read


def mark(secret: str, port: int) -> str:
    """Return the value of VARIABLE: what identifies the coordinators of a job."""
    return hmac.digest(
        secret.encode(), f"coordinator at port {port}".encode(), hashlib.sha256
    ).hex()


class Frozen:
    """Finds the coordinators of a job on this host (and in this network namespace) that do not run.

    A coordinator that runs wakes up every tenth of a second, and one that is overloaded uses the
    CPU."""

    def __init__(self, secret: str, port: int):
        self.entry = f"{VARIABLE}={mark(secret, port)}".encode()
        self.last: dict[str, list[str]] = {}  # process id -> its activity at the last check
        self.checked_at = -math.inf

    def end(self) -> None:
        """End each coordinator that has not run since the last call; do nothing if that was a
        moment ago.
        """
        if time.monotonic() - self.checked_at < APART:
            return
        now = {}
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                is_one = self.entry in (process / "environ").read_bytes().split(b"\0")
                if is_one and os.readlink(process / "ns/net") == os.readlink("/proc/self/ns/net"):
                    now[process.name] = activity(process)
        for pid, active in now.items():
            if self.last.get(pid) == active:
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
        self.last = now
        self.checked_at = time.monotonic()


def activity(process: pathlib.Path) -> list[str]:
    """Return the CPU time and the context switches of the main thread of a process, which change
    while it runs.
    """
    times = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
    return [
        *times,
        *re.findall(r"ctxt_switches:\s*(\d+)", (process / "status").read_text(encoding="utf-8")),
    ]


# seconds that rank 0 tries to reach its coordinator at an address that its host does not have
BY_NAME = 3.0
# seconds that rank 0 has to start the coordinator, before other ranks try it if it may move
FIRST_RANK = 5.0


class PortTaken(UsageError):
    """Another program, or another coordinator, listens on the coordinator's port."""


def meet(world: World, facts: Mapping[str, object], timeout: float, group: Group) -> Joined:
    """Join the job of `world` within about `timeout` seconds.

    facts: versions and properties of this rank; `gloo`: whether its collectives run over Gloo.
    Raises UsageError (port in use, wrong address or secret, different facts, a host name that other
    ranks cannot use) or DistributedError (a rank did not come); rank=0 if all ranks raise the same.
    """
    began = time.monotonic()
    local: Facts = {
        "rank": world.rank,
        "size": world.size,
        **hosts.identity(),
        "outward": hosts.outward(),
        **facts,
    }
    address, secret = agree(world, local, timeout)
    host, port = hosts.split(address)
    one_host = world.local_size == world.size
    if one_host and hosts.is_own(host):
        host = "127.0.0.1"
    remaining = max(1.0, timeout - (time.monotonic() - began))

    def is_there():
        return coordinator_pid(host, port, secret) is not None

    settings = coordinator_settings(world, host, port, secret, timeout, group)
    settings = dataclasses.replace(settings, timeout=remaining)
    # It is there if this process was started again.
    if world.rank == 0 and not (group.moves and is_there()):
        try:
            pid = start_coordinator(settings, local["host"])
            if (
                pid is not None
                and not hosts.is_own(host)
                and coordinator_pid(host, port, secret) != pid
            ):  # nor forwards to this one
                raise UsageError(
                    f"the coordinator {hosts.join(host, port)} is not rank 0's host {local['host']} "
                    f"({', '.join(local['addresses']) or 'no address'}): give rank 0's address, or start rank 0 there"
                )
        except UsageError as error:
            may_be_ours = group.moves and isinstance(error, PortTaken)  # and frozen, or overloaded
            # Else another process has just started it, maybe also as rank 0.
            if not may_be_ours and not is_there():
                raise
    place = Place(settings, world.rank and world.rank + FIRST_RANK)
    watched: dict[str, Any] = (
        {"absent": place.absent, "silent": place.silent} if group.moves or world.rank == 0 else {}
    )
    return join(host, port, secret, local, remaining, prepare=group.prepare, **watched)


def coordinator_settings(
    world: World, host: str, port: int, secret: str, timeout: float, group: Group
) -> Settings:
    """Return the settings of a coordinator at an address of this host, or one that forwards to it."""
    return Settings(
        size=world.size,
        secret=secret,
        port=port,
        address=hosts.listening_address(host, world.local_size == world.size),
        jax_host=host if hosts.is_own(host) else None,
        timeout=timeout,
        silence=silence(timeout, group.silence),
        generation=group.generation,
        options=group.options(),
    )


class Place:
    """The place of a job's coordinator, if it is on this host: starts one where none is, and ends
    one that is frozen.

    The port is the lock: it is free for one coordinator. delay: seconds without one before this
    process starts one; the processes of a host have different ones.
    """

    def __init__(self, settings: Settings, delay: float):
        self.settings = settings
        self.delay = delay
        self.frozen = Frozen(settings.secret, settings.port)

    def absent(self, waited: float) -> None:
        """Start a coordinator if none has been there for `waited` seconds."""
        if self.settings.jax_host is not None and waited >= self.delay:
            with contextlib.suppress(UsageError):  # another process has just done so
                start_coordinator(self.settings, socket.gethostname())

    def silent(self) -> None:
        """End the coordinator if it has not run since the last call."""
        self.frozen.end()


def coordinator_pid(host: str, port: int, secret: str) -> int | None:
    """Return the process id of this job's coordinator at an address; None if there is none."""
    try:
        connection = Connection(host, port, secret, BY_NAME, probe=True)
        with connection.socket:
            return connection.receive().get("pid")
    except OSError:
        return None


def agree(world: World, facts: Facts, timeout: float) -> tuple[str, str]:
    """Return the coordinator's "host:port" and the job's secret. If MPI started the ranks, exchange
    both over MPI.
    """
    if world.coordinator is not None:
        return world.coordinator, channel.shared_secret()
    if world.launcher not in MPI:
        raise UsageError(
            f"{world.size} processes have no coordinator: set JAXDP_COORDINATOR to rank 0's host:port"
        )
    offer = {"port": hosts.free_port(), "secret": secrets.token_hex(32)} if world.rank == 0 else {}
    everyone = mpi.exchange(world, {**facts, **offer}, timeout)
    hosts.check_reachable(everyone)
    return hosts.meeting_address(everyone, everyone[0]["port"]), everyone[0]["secret"]


def start_coordinator(settings: Settings, host: str) -> int | None:
    """Start the coordinator and return its process id; None if it was killed, or has been ended
    because it is frozen.

    Raises UsageError if it cannot serve its port.
    """
    # JAX's service needs some of the open files, too.
    most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], 2 * settings.size + 100
    if 0 < most < needed:
        raise UsageError(
            f"rank 0's host {host} lets a process open {most} files, and the coordinator of {settings.size} processes "
            f"needs {needed}: raise the hard limit there (ulimit -Hn)"
        )
    stderr = os.dup(settings.stderr)
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxdp.process.coordinator_process"],
        env={
            **imports.for_module(),
            VARIABLE: mark(settings.secret, settings.port),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # gRPC's log
        encoding="utf-8",
        errors="replace",
        pass_fds=[stderr],
        start_new_session=True,  # a launcher kills the process groups of its ranks
    )
    os.close(stderr)
    assert child.stdin is not None and child.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it was killed
        child.stdin.write(json.dumps({**dataclasses.asdict(settings), "stderr": stderr}) + "\n")
        child.stdin.flush()
    watch = Frozen(settings.secret, settings.port)
    while not has_data(child.stdout, SILENT):
        watch.end()
    answer = child.stdout.readline().strip()
    if answer != "ready":
        child.communicate()  # it ends
        if child.returncode < 0:
            return None
        kind = PortTaken if answer == os.strerror(errno.EADDRINUSE) else UsageError
        raise kind(
            f"rank 0 cannot listen on port {settings.port} of {host} ({answer or f'code {child.returncode}'}): choose "
            "another coordinator port"
        )
    _children.append(child)  # its standard input stays open for as long as this process lives
    return child.pid


_children: list[subprocess.Popen[str]] = []
