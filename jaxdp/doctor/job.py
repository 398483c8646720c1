"""Check this process's machine, join the job, and check it."""

import json
import os
import pathlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxdp.doctor import mpi_check, resources, versions
from jaxdp.doctor.findings import LIMIT, OK, Check, Stage, of_text, ok, run_checks
from jaxdp.errors import ReportedError, UsageError
from jaxdp.process import hosts
from jaxdp.process.launchers import World
from jaxdp.run import rundir


def run(
    world: World,
    timeout: float,
    directory: pathlib.Path,
    available: int,
    send: Callable[[Stage], None],
) -> None:
    """Examine as a rank of the job. timeout: seconds to wait for the other ranks. available:
    the number of cores of the launcher. send: is called before each stage begins.
    """
    text = f"{world.launcher}, {world.size} process{'es' * (world.size > 1)}"
    checks = [ok("launcher", text)]
    names = [hosts.hostname()] * world.size

    def stage(name: str, seconds: float) -> None:
        send(Stage(name, seconds, checks, names))

    checks += run_checks(local_checks(world, directory))
    stage("imports", LIMIT)
    import jax

    from jaxdp.process import context as contexts

    stage("ranks", 2 * timeout + LIMIT)
    try:
        context = contexts.init(timeout=timeout)
    except ReportedError as error:
        if error.rank not in (None, world.rank):
            # the doctor of that rank prints it; this one has its own findings, and ends soon
            os._exit(2)
        raise
    names = [*context.hosts]
    stage("devices", LIMIT)
    checks.append(resources.open_devices())
    stage("network", 3 * LIMIT + timeout)
    with socket.create_server(("", 0), backlog=128) as listener:
        facts = {
            **hosts.identity(),
            "outward": hosts.outward(),
            "port": listener.getsockname()[1],
            "cores": sorted(os.sched_getaffinity(0)),
            "available": available,
            "limit": hosts.core_quota(),
        }
        everyone = exchange(context, "facts", facts)
        if world.size > 1:
            checks += check_between(context, everyone)
            context.barrier("network")  # until then, the listener is open
    checks.append(resources.check_bindings(world.rank, everyone))
    checks = merge(exchange(context, "checks", checks))
    if jax.device_count() > 1:
        stage("all-reduce", LIMIT)
        # a rank that fails from now on ends all, and rank 0 has sent its findings
        context.barrier("all-reduce")
        measured = resources.check_all_reduce(**resources.all_reduce())
        checks += merge(exchange(context, "reduced", [measured]))
    stage("", 0)
    contexts.leave(0)


def local_checks(world: World, directory: pathlib.Path) -> dict[str, Iterator[Check]]:
    """Return the checks that need no other process."""
    checks = {
        "versions": versions.check_versions(),
        "environment": versions.check_settings(world.size),
        "gpu": versions.check_gpus(),
        "memory": resources.check_memory(world.size, world.local_size or 1),
        "run_dir": resources.check_run_dir(directory),
    }
    if world.launcher == "none":  # mpirun does not start mpirun
        checks["mpirun"] = mpi_check.check_mpirun()
    return checks


def check_between(context: Any, everyone: list[dict[str, Any]]) -> Iterator[Check]:
    """Check what lies between the ranks. everyone: the facts of each rank, with the port of a
    listener.
    """
    yield ok("ranks", f"{context.size} processes have joined")
    try:
        versions_here = {name: str(version) for name, version in rundir.versions().items()}
        context.check_same("packages", versions_here)
    except UsageError as error:
        if context.rank == 0:
            yield of_text("versions", str(error))
    reach = resources.check_reach(context.rank, everyone)
    yield from run_checks({"network": reach}, 3 * LIMIT)


def exchange(context: Any, name: str, value: Any) -> list[Any]:
    return [json.loads(text) for text in context.exchange(name, json.dumps(value))]


def merge(reports: Sequence[Sequence[Any]]) -> list[Check]:
    """Return every rank's findings once, with their ranks. One that is ok is left out unless rank 0
    has the same: others differ in numbers.
    """
    merged: dict[Check, list[int]] = {}
    for rank, report in enumerate(reports):
        for fields in report:
            check = Check(*fields[:4])
            if check.status != OK or rank == 0 or check in merged:
                merged.setdefault(check, []).append(rank)
    return [check._replace(ranks=tuple(ranks)) for check, ranks in merged.items()]
