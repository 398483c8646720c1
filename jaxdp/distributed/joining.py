"""Join a job: agree on an address and a secret, start the coordinator (rank 0), and connect to it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from jaxdp import imports
from jaxdp.distributed import channel, hosts, mpi
from jaxdp.distributed.connection import Connection, Joined, join
from jaxdp.distributed.protocol import Facts, Settings, silence
from jaxdp.distributed.world import MPI, World
from jaxdp.errors import UsageError

BY_NAME = 3.0  # seconds that rank 0 tries to reach its coordinator at an address that its host does not have


@dataclasses.dataclass(frozen=True)
class ElasticOptions:
    """Settings of a job whose processes may come and go; see `jaxdp.config.Elastic`.

    config: a digest of what all processes must agree on. prepare: called by a process that joins a running job, before
    the others stop for it; it may open devices, which are closed again.
    """

    min_processes: int = 1
    join_timeout: float = 60.0
    join_after: float = 15.0
    config: str = ""
    prepare: Callable[[], None] | None = dataclasses.field(default=None, compare=False, repr=False)


def meet(world: World, facts: Mapping[str, object], timeout: float, elastic: ElasticOptions | None = None) -> Joined:
    """Join the job of `world` within about `timeout` seconds.

    facts: versions and properties of this rank; `gloo`: whether its collectives run over Gloo. elastic: processes may
    come and go; if the job is running already, this process joins it. Raises UsageError (port
    in use, wrong address or secret, different facts, a host name that other ranks cannot use) or DistributedError (a
    rank did not come); rank=0 if all ranks raise the same.
    """
    began = time.monotonic()
    local: Facts = {"rank": world.rank, "size": world.size, **hosts.identity(), "outward": hosts.outward(), **facts}
    address, secret = agree(world, local, timeout)
    host, port = hosts.split(address)
    one_host = world.local_size == world.size
    if one_host and hosts.is_own(host):
        host = "127.0.0.1"
    remaining = max(1.0, timeout - (time.monotonic() - began))
    is_there = lambda: coordinator_pid(host, port, secret)
    if world.rank == 0 and not (elastic and is_there()):  # it is there if this process was started again
        settings = coordinator_settings(world, host, port, secret, timeout, elastic)
        try:
            pid = start_coordinator(dataclasses.replace(settings, timeout=remaining), local["host"])
            if not hosts.is_own(host) and coordinator_pid(host, port, secret) != pid:  # nor forwards to this one
                raise UsageError(
                    f"the coordinator {hosts.join(host, port)} is not rank 0's host {local['host']} "
                    f"({', '.join(local['addresses']) or 'no address'}): give rank 0's address, or start rank 0 there"
                )
        except UsageError:
            if not is_there():  # else another process has just started it, maybe also as rank 0
                raise
    return join(host, port, secret, local, remaining, prepare=elastic.prepare if elastic else None)


def coordinator_settings(
    world: World, host: str, port: int, secret: str, timeout: float, elastic: ElasticOptions | None
) -> Settings:
    """Return the settings of a coordinator at an address of this host, or one that forwards to it."""
    return Settings(
        size=world.size,
        secret=secret,
        port=port,
        address=hosts.listening_address(host, world.local_size == world.size),
        jax_host=host if hosts.is_own(host) else None,
        timeout=timeout,
        silence=silence(timeout, elastic is not None),
        elastic=elastic is not None,
        min_processes=elastic.min_processes if elastic else 1,
        join_timeout=elastic.join_timeout if elastic else 0.0,
        join_after=elastic.join_after if elastic else 0.0,
    )


def restart_coordinator(settings: Settings, local_rank: int, waited: float) -> None:
    """Start a coordinator in the place of one that has gone, if its address is this host's.

    The processes of the host try it one by one, a second apart; the port is free for one of them. waited: seconds
    without one.
    """
    if settings.jax_host is not None and waited >= local_rank:
        with contextlib.suppress(UsageError):  # another process has just done so
            start_coordinator(settings, hosts.hostname())


def coordinator_pid(host: str, port: int, secret: str) -> int | None:
    """Return the process id of this job's coordinator at an address; None if there is none."""
    try:
        connection = Connection(host, port, secret, BY_NAME, probe=True)
        with connection.socket:
            return connection.receive().get("pid")
    except OSError:
        return None


def agree(world: World, facts: Facts, timeout: float) -> tuple[str, str]:
    """Return the coordinator's "host:port" and the job's secret. If MPI started the ranks, exchange both over MPI."""
    if world.coordinator is not None:
        return world.coordinator, channel.shared_secret()
    if world.launcher not in MPI:
        raise UsageError(f"{world.size} processes have no coordinator: set JAXDP_COORDINATOR to rank 0's host:port")
    offer = {"port": hosts.free_port(), "secret": secrets.token_hex(32)} if world.rank == 0 else {}
    everyone = mpi.exchange(world, {**facts, **offer}, timeout)
    hosts.check_reachable(everyone)
    return hosts.meeting_address(everyone, everyone[0]["port"]), everyone[0]["secret"]


def start_coordinator(settings: Settings, host: str) -> int:
    """Start the coordinator and return its process id. Raises UsageError if it cannot serve its port."""
    most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], 2 * settings.size + 100  # JAX's service is there too
    if 0 < most < needed:
        raise UsageError(
            f"rank 0's host {host} lets a process open {most} files, and the coordinator of {settings.size} processes "
            f"needs {needed}: raise the hard limit there (ulimit -Hn)"
        )
    stderr = os.dup(settings.stderr)
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxdp.distributed.coordinator_process"],
        env=imports.for_module(),
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
    child.stdin.write(json.dumps({**dataclasses.asdict(settings), "stderr": stderr}) + "\n")
    child.stdin.flush()
    answer = child.stdout.readline().strip()
    if answer != "ready":
        raise UsageError(
            f"rank 0 cannot listen on port {settings.port} of {host} ({answer or f'code {child.wait()}'}): choose "
            "another coordinator port"
        )
    _children.append(child)  # its standard input stays open for as long as this process lives
    return child.pid


_children: list[subprocess.Popen[str]] = []
