"""What lies between the ranks of a job: ways, clocks, a folder, and the collectives of a run; each rank looks."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdp import rundir
from jaxdp.distributed import hosts
from jaxdp.distributed.world import World
from jaxdp.doctor import bindings, collective, devices, mpi, names, network, resources
from jaxdp.doctor.board import BROKEN, Member
from jaxdp.doctor.check import FAILURE, Check, failure, of_error, ok, run_checks, warning
from jaxdp.doctor.machine import LOCAL, START, begin, of_devices
from jaxdp.doctor.network import Listener
from jaxdp.doctor.probe import Ended, Probe
from jaxdp.errors import Said

SKEW = 2.0  # seconds between clocks that confuse people who read logs
Facts = Mapping[int, Mapping[str, Any]]


def timeout() -> float:
    """Seconds to wait for other ranks: JAXDP_TIMEOUT, 30 where it is none."""
    try:
        return max(1.0, float(os.environ.get("JAXDP_TIMEOUT", "30")))
    except ValueError:
        return 30.0


def between(world: World, member: Member, directory: pathlib.Path, probe: Probe) -> tuple[Facts, list[Check]]:
    """(what every rank says of itself, what this rank finds between itself and the others)."""
    imports = begin(probe)
    ready = imports[-1].status != FAILURE
    listener, place = Listener(), resources.existing(directory)
    nonce = place / f".jaxdp-doctor-{secrets.token_hex(8)}"
    if world.rank == 0:
        run_checks({"nonce": functools.partial(leave_nonce, nonce)}, LOCAL)
    own = {
        **mpi.identity(listener.port),
        **bindings.own_cores(),
        "local_rank": world.local_rank,
        "nonce": nonce.name if nonce.exists() else "",
        "ready": ready,
        "jax_port": hosts.free_port() if world.rank == 0 else 0,
        "versions": rundir.versions(),
    }
    lines = list(imports)
    try:
        facts = member.exchange("facts", own, timeout())
    except BROKEN as error:
        return {world.rank: own}, [*lines, failure("ranks", f"rank 0 went away: {error}", "see what it printed")]
    several = len({hosts.key(f) for f in facts.values()}) > 1
    reached: list[float] = []
    lines += run_checks(
        {
            "host name": functools.partial(names.check_name, world.size, several),
            "network": functools.partial(check_network, world.rank, facts, reached),
            "clock": functools.partial(check_clock, member, facts, several),
            "shared run_dir": functools.partial(check_shared, place, facts, several),
        },
        LOCAL * 2,
    )
    if not several and world.rank == 0:  # by itself, so that no other check slows it down
        reached.append(network.loopback_speed())
    if len(facts) == world.size and all(f["ready"] for f in facts.values()):
        more, opened = all_reduce(world, facts, probe)
        lines += more
        own |= {**opened, "link": min(reached, default=None)}
    elif ready:
        lines.append(warning(collective.NAME, "not tried, since not all ranks can take part", "see the other lines"))
    if world.rank == 0:
        nonce.unlink(missing_ok=True)
    return {**facts, world.rank: own}, lines


def leave_nonce(file: pathlib.Path) -> Iterator[Check]:
    """What the others are to see; that it cannot be written is said by `check_run_dir`."""
    with contextlib.suppress(OSError):
        file.write_text("")
    yield from ()


def check_network(rank: int, facts: Facts, reached: list[float]) -> Iterator[Check]:
    """The ways to other hosts. Adds bytes per second of the slowest to `reached`."""
    lines, rate = network.check_reach(rank, facts)
    reached += [rate] if rate else []
    yield from lines


def check_clock(member: Member, facts: Facts, several: bool) -> Iterator[Check]:
    """Clocks of different hosts, against rank 0's."""
    if several and hosts.key(facts[member.rank]) != hosts.key(facts[0]):
        skew = member.skew()
        if abs(skew) > SKEW:
            found = f"{skew:+.1f} s against rank 0's host: logs and files are out of order"
            yield warning("clock", found, "start chrony or ntpd there")
        else:
            yield ok("clock", f"within {SKEW:g} s of rank 0's host")


def check_shared(place: pathlib.Path, facts: Facts, several: bool) -> Iterator[Check]:
    """Whether the file that rank 0 made in the run directory is seen here; network file systems lag."""
    deadline = time.monotonic() + (5.0 if several else 1.0)
    name = facts[0]["nonce"] if 0 in facts else ""
    if not name:  # it could not be written, which `check_run_dir` says
        return
    while not (place / name).exists():
        if time.monotonic() > deadline:
            found = f"{place} is not the folder that rank 0 writes to"
            yield failure("run_dir", found, "use a --run_dir on a file system that all hosts share")
            return
        list(place.iterdir())[:0]  # makes NFS look again
        time.sleep(0.05)
    if several:
        yield ok("run_dir", "shared by all hosts")


def all_reduce(world: World, facts: Facts, probe: Probe) -> tuple[list[Check], dict[str, Any]]:
    """Joins the others as a run does, opens the devices, and times an all-reduce: (what was found, facts)."""
    ordered = [facts[r] for r in range(world.size)]
    counted = hosts.local_ranks([dict(f) for f in ordered], world.rank)
    local_rank = counted[0] if world.local_rank is None else world.local_rank
    local_size = counted[1] if world.local_size is None else world.local_size
    patience = min(timeout(), 20.0)
    name = "processes"
    try:
        variables = {
            "JAXDP_COORDINATOR": hosts.meeting_address([dict(f) for f in ordered], facts[0]["jax_port"]),
            "JAXDP_NUM_PROCESSES": str(world.size),
            "JAXDP_PROCESS_ID": str(world.rank),
            "JAXDP_LOCAL_RANK": str(local_rank),
            "JAXDP_LOCAL_SIZE": str(local_size),
            "JAXDP_TIMEOUT": str(patience),
        }
        probe.ask("join", 2 * patience + 5, variables=variables)
        name = "devices"
        found = probe.ask("devices", START)
        lines = list(devices.check_devices(found))
        name = collective.NAME
        timed = probe.ask("all_reduce", START, elements=collective.elements(found["platform"]), times=5)
    except Said as error:
        return [of_error(name, error)], {}
    except Ended as error:
        return [of_devices(name, error)], {}
    return lines, {"platform": found["platform"], "uuids": found["uuids"], "kind": found["kind"], "timed": timed}
