"""An examination: each rank looks at its own machine, then they meet and look at what lies between them."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxdp.distributed import hosts, launchers
from jaxdp.distributed.rendezvous import split
from jaxdp.distributed.world import World
from jaxdp.doctor import bindings, collective, devices, mpi, ports
from jaxdp.doctor.between import Facts, between, timeout
from jaxdp.doctor.board import BROKEN, Board, Member, Note, reach
from jaxdp.doctor.check import OK, Check, Checker, Examined, Line, failure, of_error, ok, run_checks, title
from jaxdp.doctor.machine import LOCAL, START, Needed, alone, local_checks
from jaxdp.doctor.probe import Probe
from jaxdp.errors import UsageError

# A running job keeps its memory.
QUIET = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "1"}


class Job(NamedTuple):
    """This process's place among the others. member: None where it did not find them."""

    world: World
    board: Board | None
    member: Member | None
    note: Note


def examine(directory: pathlib.Path, needed: Needed | None = None, cache: str | None = "auto") -> Examined | None:
    """All checks, of every rank; None on ranks whose findings rank 0 has. Neither raises nor waits for ever.

    directory: where checkpoints would go. needed: gives the bytes of one. cache: `compilation_cache` of the config.
    """
    world, lines = launch()
    probe = Probe("jax", QUIET)
    probe.send("begin")
    try:
        if world is None or world.size == 1:
            lines += alone(world, directory, needed, cache, probe)
            host = hosts.hostname()
            return Examined(title([host], 1), [(check, ()) for check in lines], 1, {0: host})
        return together(world, lines, directory, needed, cache, probe)
    finally:
        probe.close()


def launch() -> tuple[World | None, list[Check]]:
    """(which process this is, or None where the launcher's variables make no sense; what is said of it)."""
    try:
        world = launchers.discover()
    except UsageError as error:
        return None, [of_error("launcher", error)]
    text = "one process by itself" if world.launcher == "none" else f"{world.launcher}, {world.size} processes"
    return world, [ok("launcher", text)]


def together(
    world: World, lines: list[Check], directory: pathlib.Path, needed: Needed | None, cache: str | None, probe: Probe
) -> Examined | None:
    """One rank of several. What each found travels to rank 0, which waits no longer than the timeout for any."""
    lines += run_checks({"port": functools.partial(ports.check_port, world)}, LOCAL)
    met: list[Job] = []
    checks = local_checks(world, directory, needed, cache)
    checks["ranks"] = functools.partial(meet, world, met)
    lines += run_checks(checks, LOCAL, {"ranks": 2 * timeout() + 10, "run_dir": START})
    member = met[0].member if met else None
    if member is None:
        host = hosts.hostname()
        found = "did not find rank 0, so this is its own list"
        lines.append(failure("ranks", found, "see the lines on mpi4py, port and network, and what rank 0 printed"))
        own: list[Line] = [(check, (world.rank,)) for check in lines]
        return Examined(title([host], 1), own, world.size, {world.rank: host}, stray=True)
    job = met[0]
    try:
        try:
            facts, more = between(world, member, directory, probe)
        except Exception as error:
            facts, more = {world.rank: mpi.identity(0)}, [of_error("ranks", error)]
        return judge(job, facts, [*lines, *more])
    finally:
        if job.board is not None:
            job.note.remove()


def meet(world: World, met: list[Job]) -> Iterator[Check]:
    """Opens the board on rank 0, and finds it on the others; adds the Job to `met`."""
    wait = timeout()
    note = Note(world.coordinator)
    board: Board | None = None
    addresses = [world.coordinator] if world.coordinator else []
    if world.rank == 0:
        try:
            board = Board(world.size, split(world.coordinator)[1] if world.coordinator else 0)
        except OSError:  # said by `check_port`
            board = Board(world.size)
        note.write(f"127.0.0.1:{board.port}")
        met.append(Job(world, board, Member(0, world.size, board), note))
    if mpi.is_mpi(world):
        hellos, lines = mpi.meet(world, mpi.identity(board.port if board else 0), wait)
        yield from lines
        if hellos and board is None:
            addresses = [hosts.meeting_address(hellos, hellos[0]["port"])]
    if board is None:
        member = reach(world.rank, world.size, lambda: [*addresses, *note.read()], wait)
        met.append(Job(world, None, member, note))


def judge(job: Job, facts: Facts, lines: list[Check]) -> Examined | None:
    """Hands this rank's lines to rank 0; there, waits for all of them, and looks at them side by side."""
    world, member = job.world, job.member
    assert member is not None
    try:
        member.pin("report", [lines, dict(facts[world.rank])])
    except BROKEN:
        return None  # rank 0 is gone, and its own end says why
    if world.rank != 0:
        member.outlive(2 * timeout())
        return None
    reports = member.read("report", timeout())
    merged: dict[Check, list[int]] = {}
    same: dict[tuple[object, ...], Check] = {}  # what is well on a host, and differs by a few bytes from rank to rank
    for rank, (found, fact) in reports.items():
        for check in (Check(*c) for c in found):
            if check.status == OK:
                check = same.setdefault((hosts.key(fact), check.name, re.sub(r"[\d.]+", "", check.found)), check)
            merged.setdefault(check, []).append(rank)
    known: Facts = {**facts, **{rank: fact for rank, (_, fact) in reports.items()}}
    across: dict[str, Checker] = {
        "bindings": lambda: bindings.check_bindings(known),
        "gpu sharing": lambda: devices.check_sharing(known),
        "versions": lambda: check_same(known),
        collective.NAME: lambda: check_timed(known, world),
    }
    whole = run_checks(across, LOCAL)
    if missing := [r for r in range(world.size) if r not in reports]:
        who = ", ".join(hosts.title(r, facts[r]["host"]) if r in facts else f"rank {r}" for r in missing[:8])
        found = f"{who} did not report within {timeout():g} s"
        whole.append(
            failure("ranks", found, "see whether it was started, and what it printed (JAXDP_TIMEOUT: how long to wait)")
        )
    host_names = {rank: fact["host"] for rank, fact in known.items()}
    merged_lines = [(check, tuple(ranks)) for check, ranks in merged.items()]
    return Examined(
        title(list(host_names.values()), world.size),
        merged_lines + [(c, ()) for c in whole],
        world.size,
        host_names,
    )


def check_timed(facts: Facts, world: World) -> Iterator[Check]:
    """The all-reduce as this rank timed it, where it took part in one."""
    own = facts[world.rank]
    if "timed" in own:
        number = len({hosts.key(fact) for fact in facts.values()})
        how = own["platform"], own["kind"], number, own["link"], world.size
        yield from collective.check_collective(own["timed"], *how)


def check_same(facts: Facts) -> Iterator[Check]:
    """The versions of every rank against those of rank 0."""
    first = min(facts)
    for rank, fact in facts.items():
        for package, version in fact["versions"].items():
            other = facts[first]["versions"].get(package)
            if version != other:
                one, another = hosts.title(rank, fact["host"]), hosts.title(first, facts[first]["host"])
                found = f"{one} has {version}, {another} {other}"
                yield failure(package, found, "use one environment for all ranks")
