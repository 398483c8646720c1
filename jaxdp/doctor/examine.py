"""Examine a job: each rank checks its own machine, then they meet and check what lies between them."""

import contextlib
import functools
import os
import pathlib
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxdp import rundir
from jaxdp.distributed import hosts, launchers
from jaxdp.distributed.hosts import split
from jaxdp.distributed.world import MPI, World
from jaxdp.doctor import bindings, collective, devices, mpi, network, resources
from jaxdp.doctor.board import BROKEN, AddressFile, Board, Member, reach
from jaxdp.doctor.check import FAILURE, OK, Check, Checker, Line, failure, of_error, ok, run_checks, warning
from jaxdp.doctor.local import LOCAL, START, check_alone, check_begin, local_checks, of_devices
from jaxdp.doctor.probe import Ended, Probe
from jaxdp.doctor.report import Examined
from jaxdp.errors import ReportedError, UsageError

# A running job keeps its memory.
QUIET = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "1"}
Facts = Mapping[int, Mapping[str, Any]]


class Met(NamedTuple):
    """How this rank met the others. member: None if it did not reach rank 0. file: tells others of this host."""

    member: Member | None
    file: AddressFile


def timeout() -> float:
    """Return the seconds to wait for other ranks: JAXDP_TIMEOUT, or 30."""
    try:
        return max(1.0, float(os.environ.get("JAXDP_TIMEOUT", "30")))
    except ValueError:
        return 30.0


def examine(
    directory: pathlib.Path, needed: Callable[[], int] | None = None, cache: str | None = "auto"
) -> Examined | None:
    """Run all checks of every rank; return None on ranks whose findings rank 0 has. Always ends, and never raises.

    directory: where checkpoints would go. needed: returns the bytes of one. cache: `compilation_cache` of the config.
    """
    world, lines = None, list[Check]()
    try:
        world = launchers.discover()
        text = "a single process" if world.launcher == "none" else f"{world.launcher}, {world.size} processes"
        lines.append(ok("launcher", text))
    except UsageError as error:
        lines.append(of_error("launcher", error))
    probe = Probe("jax", QUIET)
    probe.send("begin")
    checks = local_checks(world, directory, needed, cache)
    try:
        if world is not None and world.size > 1:
            return examine_rank(world, lines, checks, directory, probe)
        lines += check_alone(world, checks, probe)
        return Examined([(check, ()) for check in lines], 1, {0: hosts.hostname()})
    finally:
        probe.close()


def examine_rank(
    world: World, lines: list[Check], checks: dict[str, Checker], directory: pathlib.Path, probe: Probe
) -> Examined | None:
    """Examine one rank of several, and send its findings to rank 0."""
    lines += run_checks({"port": functools.partial(network.check_port, world)}, LOCAL)
    met: list[Met] = []
    checks["ranks"] = functools.partial(meet, world, met)
    lines += run_checks(checks, LOCAL, {"ranks": 2 * timeout() + 10, "run_dir": START})
    member = met[0].member if met else None
    if member is None:
        fix = "see the lines on mpi4py, port and network, and what rank 0 printed"
        lines.append(failure("ranks", "rank 0 was not reached, so this list is of this rank alone", fix))
        return Examined([(c, (world.rank,)) for c in lines], world.size, {world.rank: hosts.hostname()}, stray=True)
    try:
        try:
            facts, more = check_between(world, member, directory, probe)
        except Exception as error:
            facts, more = {world.rank: identity(0)}, [of_error("ranks", error)]
        return gather(world, member, facts, [*lines, *more])
    finally:
        if world.rank == 0:
            met[0].file.path.unlink(missing_ok=True)


def identity(port: int) -> dict[str, Any]:
    """Return the facts that a rank meets the others with."""
    return {**hosts.identity(), "port": port, "outward": hosts.outward()}


def meet(world: World, met: list[Met]) -> Iterator[Check]:
    """Open the board on rank 0, and connect to it on the others; `met` gets the result."""
    file, board = AddressFile(world.coordinator), None
    addresses = [world.coordinator] if world.coordinator else []
    if world.rank == 0:
        try:
            board = Board(world.size, split(world.coordinator)[1] if world.coordinator else 0)
        except OSError:  # `check_port` reports it
            board = Board(world.size)
        file.write(f"127.0.0.1:{board.port}")
        met.append(Met(Member(0, world.size, board), file))
    if world.launcher in MPI and world.coordinator is None:
        hellos, lines = mpi.meet(world, identity(board.port if board else 0), timeout())
        yield from lines
        if hellos and board is None:
            addresses = [hosts.meeting_address(hellos, hellos[0]["port"])]
    if board is None:
        met.append(Met(reach(world.rank, world.size, lambda: [*addresses, *file.read()], timeout()), file))


def check_between(world: World, member: Member, directory: pathlib.Path, probe: Probe) -> tuple[Facts, list[Check]]:
    """Return (the facts of every rank, this rank's findings between itself and the others)."""
    lines = check_begin(probe)
    ready = lines[-1].status != FAILURE
    folder = resources.existing(directory)
    nonce = folder / f".jaxdp-doctor-{secrets.token_hex(8)}"
    if world.rank == 0:
        run_checks({"nonce": functools.partial(write_nonce, nonce)}, LOCAL)
    own = {
        **identity(network.Listener().port),
        **bindings.read_cores(),
        "nonce": nonce.name if nonce.exists() else "",
        "ready": ready,
        "jax_port": hosts.free_port() if world.rank == 0 else 0,
        "versions": rundir.versions(),
    }
    try:
        member.put("facts", own)
        facts = member.read("facts", timeout())
    except BROKEN as error:
        return {world.rank: own}, [*lines, failure("ranks", f"rank 0 went away: {error}", "see what it printed")]
    several = len({hosts.key(f) for f in facts.values()}) > 1
    speeds: list[float] = []
    checks: dict[str, Checker] = {
        "host name": functools.partial(network.check_name, world.size, several),
        "network": functools.partial(network.check_reach, world.rank, facts, speeds),
        "shared run_dir": functools.partial(check_shared, folder, facts, several),
    }
    lines += run_checks(checks, LOCAL * 2)
    if not several and world.rank == 0:  # alone, so that no other check slows it down
        speeds.append(network.loopback_speed())
    if len(facts) == world.size and all(f["ready"] for f in facts.values()):
        more, opened = all_reduce(world, facts, probe)
        lines += more
        own |= {**opened, "link": min(speeds, default=None)}
    elif ready:
        lines.append(warning(collective.NAME, "not tried, since not all ranks can take part", "see the other lines"))
    nonce.unlink(missing_ok=True)
    return {**facts, world.rank: own}, lines


def write_nonce(file: pathlib.Path) -> Iterator[Check]:
    """Write the file that the others look for; `check_run_dir` reports a folder that cannot be written to."""
    with contextlib.suppress(OSError):
        file.write_text("")
    yield from ()


def check_shared(folder: pathlib.Path, facts: Facts, several: bool) -> Iterator[Check]:
    """Check that the file that rank 0 wrote to the run directory is seen on this host; network file systems lag."""
    deadline = time.monotonic() + (5.0 if several else 1.0)
    name = facts[0]["nonce"] if 0 in facts else ""
    if not name:
        return
    while not (folder / name).exists():
        if time.monotonic() > deadline:
            text = f"{folder} is not the folder that rank 0 writes to"
            yield failure("run_dir", text, "use a --run_dir on a file system that all hosts share")
            return
        list(folder.iterdir())[:0]  # makes NFS look again
        time.sleep(0.05)
    if several:
        yield ok("run_dir", "shared by all hosts")


def all_reduce(world: World, facts: Facts, probe: Probe) -> tuple[list[Check], dict[str, Any]]:
    """Join the others as a run does, open the devices, and time an all-reduce: return (findings, facts)."""
    ordered = [dict(facts[r]) for r in range(world.size)]
    local_rank, local_size = hosts.local_ranks(ordered, world.rank)
    patience, name = min(timeout(), 20.0), "processes"
    try:
        variables = {
            "JAXDP_COORDINATOR": hosts.meeting_address(ordered, facts[0]["jax_port"]),
            "JAXDP_NUM_PROCESSES": str(world.size),
            "JAXDP_PROCESS_ID": str(world.rank),
            "JAXDP_LOCAL_RANK": str(local_rank if world.local_rank is None else world.local_rank),
            "JAXDP_LOCAL_SIZE": str(local_size if world.local_size is None else world.local_size),
            "JAXDP_TIMEOUT": str(patience),
        }
        probe.ask("join", 2 * patience + 5, variables=variables)
        name = "devices"
        opened = probe.ask("devices", START)
        lines = list(devices.check_devices(opened))
        name = collective.NAME
        timed = probe.ask("all_reduce", START, elements=collective.elements(opened["platform"]), times=5)
    except ReportedError as error:
        return [of_error(name, error)], {}
    except Ended as error:
        return [of_devices(name, error)], {}
    return lines, {"platform": opened["platform"], "uuids": opened["uuids"], "kind": opened["kind"], "timed": timed}


def gather(world: World, member: Member, facts: Facts, lines: list[Check]) -> Examined | None:
    """Send this rank's findings to rank 0; there, wait for those of all, merge them, and compare the ranks' facts."""
    try:
        member.put("report", [lines, dict(facts[world.rank])])
    except BROKEN:
        return None  # rank 0 has ended, and says why
    if world.rank != 0:
        member.outlive(2 * timeout())
        return None
    reports = member.read("report", timeout())
    facts = {**facts, **{rank: fact for rank, (_, fact) in reports.items()}}
    across: dict[str, Checker] = {
        "bindings": lambda: bindings.check_bindings(facts),
        "gpu sharing": lambda: devices.check_sharing(facts),
        "versions": lambda: check_same(facts),
        collective.NAME: lambda: check_timed(facts, world),
    }
    job = run_checks(across, LOCAL)
    if missing := [r for r in range(world.size) if r not in reports]:
        who = ", ".join(hosts.title(r, facts[r]["host"]) if r in facts else f"rank {r}" for r in missing[:8])
        fix = "see whether it was started, and what it printed (JAXDP_TIMEOUT: how long to wait)"
        job.append(failure("ranks", f"{who} did not report within {timeout():g} s", fix))
    names = {rank: fact["host"] for rank, fact in facts.items()}
    merged = merge({rank: [Check(*c) for c in checks] for rank, (checks, _) in reports.items()}, facts)
    return Examined([*merged, *((c, ()) for c in job)], world.size, names)


def merge(checks: Mapping[int, list[Check]], facts: Facts) -> list[Line]:
    """Return every finding once, with its ranks. What is ok on a host may differ in numbers from rank to rank."""
    merged: dict[Check, list[int]] = {}
    same: dict[tuple[object, ...], Check] = {}
    for rank, lines in checks.items():
        for check in lines:
            if check.status == OK:
                kind = (hosts.key(facts[rank]), check.name, re.sub(r"[\d.]+", "", check.found))
                check = same.setdefault(kind, check)
            merged.setdefault(check, []).append(rank)
    return [(check, tuple(ranks)) for check, ranks in merged.items()]


def check_timed(facts: Facts, world: World) -> Iterator[Check]:
    """Check the all-reduce as this rank timed it, if it took part in one."""
    own = facts[world.rank]
    if "timed" in own:
        number = len({hosts.key(fact) for fact in facts.values()})
        how = own["platform"], own["kind"], number, own["link"], world.size
        yield from collective.check_collective(own["timed"], *how)


def check_same(facts: Facts) -> Iterator[Check]:
    """Check that every rank has the package versions of the first."""
    first = min(facts)
    for rank, fact in facts.items():
        for package, version in fact["versions"].items():
            other = facts[first]["versions"].get(package)
            if version != other:
                one, another = hosts.title(rank, fact["host"]), hosts.title(first, facts[first]["host"])
                text = f"{one} has {version}, {another} {other}"
                yield failure(package, text, "use one environment for all ranks")
