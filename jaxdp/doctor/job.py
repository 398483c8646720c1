"""Check this process's machine, join the job, and check it."""

import functools
import json
import os
import pathlib
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any

from jaxdp.doctor import mpi_check, resources, versions
from jaxdp.doctor.findings import (
    FAILURE,
    LIMIT,
    OK,
    Check,
    Checker,
    Stage,
    of_text,
    ok,
    run_checks,
)
from jaxdp.errors import ReportedError, UsageError
from jaxdp.process import hosts, launchers, protocol
from jaxdp.process.launchers import World
from jaxdp.run import rundir


def run(directory: pathlib.Path, launcher: int, send: Callable[[Stage], None]) -> None:
    """Examine as a rank of the job. launcher: the id of the process that started this one's parent.
    send: is called before each stage begins.
    """
    world = World(0, 1)
    try:
        world = launchers.discover()
        text = f"{world.launcher}, {world.size} processes"
        checks = [ok("launcher", "a single process" if world.launcher == "none" else text)]
    except UsageError as error:
        checks = [of_text("launcher", str(error))]
    names = [hosts.hostname()] * world.size

    def stage(name: str, seconds: float) -> None:
        send(Stage(name, seconds, checks, world.rank, names))

    checks += run_checks(local_checks(world, directory))
    stage("imports", LIMIT)
    checks += versions.check_imports()
    if checks[0].status != OK:  # it cannot join the others
        stage("", 0)
        return
    timeout = protocol.default_timeout(None if os.environ.get("JAXDP_TIMEOUT") else 30.0)
    stage("ranks", 2 * timeout + LIMIT)
    facts = {**hosts.identity(), "outward": hosts.outward(), **resources.read_cores(launcher)}
    facts["marker"] = secrets.token_hex(8)
    try:
        marker = resources.marker(directory, str(world.rank))
        marker.write_text(facts["marker"], encoding="utf-8")
    except OSError:  # `check_run_dir` reports it
        facts["marker"] = ""
    import jax

    from jaxdp.process import context as contexts

    try:
        context = contexts.init(timeout=timeout)
    except ReportedError as error:
        if error.rank not in (None, world.rank):
            # the doctor of that rank prints it; this one has its own findings, and ends soon
            os._exit(2)
        raise
    if world.size > 1:
        names = [*context.hosts]
    stage("network", 3 * LIMIT + timeout)
    with socket.create_server(("", 0), backlog=128) as listener:
        everyone = exchange(context, "facts", {**facts, "port": listener.getsockname()[1]})
        if world.size > 1:
            checks += check_between(context, directory, everyone)
    checks = merge(everyone, exchange(context, "checks", checks))
    checks += resources.check_bindings(everyone)
    stage("devices", LIMIT)
    # a rank that fails from now on ends all, and rank 0 has sent its findings
    context.barrier("devices")
    checks += merge(everyone, exchange(context, "opened", [resources.open_devices()]))
    if jax.device_count() > 1:
        stage("all-reduce", LIMIT)
        reduced = [
            resources.check_all_reduce(**timed)
            for timed in exchange(context, "all-reduce", resources.all_reduce())
        ]
        wrong = tuple(rank for rank, check in enumerate(reduced) if check.status == FAILURE)
        checks.append(reduced[min(wrong, default=0)]._replace(ranks=wrong))
    stage("", 0)
    contexts.leave(0)


def local_checks(world: World, directory: pathlib.Path) -> dict[str, Checker]:
    """Return the checks that need no other process."""
    size, local_size = world.size, world.local_size or 1
    checks: dict[str, Checker] = {
        "versions": versions.check_versions,
        "environment": functools.partial(versions.check_settings, size),
        "gpu": resources.check_gpus,
        "memory": functools.partial(resources.check_memory, size, local_size),
        "run_dir": lambda: [resources.check_run_dir(directory)],
        "host name": resources.check_name,
    }
    if size == 1 and world.launcher in ("none", "jaxdp"):  # mpirun does not start mpirun
        checks["mpirun"] = mpi_check.check_mpirun
    return checks


def check_between(
    context: Any, directory: pathlib.Path, everyone: list[dict[str, Any]]
) -> list[Check]:
    """Check what lies between the ranks. everyone: the facts of each rank, with the port of a
    listener.
    """
    checks: dict[str, Checker] = {
        "network": functools.partial(resources.check_reach, context.rank, everyone)
    }
    if text := everyone[0]["marker"]:
        checks["run_dir"] = functools.partial(resources.check_shared, directory, text)
    findings = run_checks(checks)
    try:
        versions_here = {name: str(version) for name, version in rundir.versions().items()}
        context.check_same("packages", versions_here)
    except UsageError as error:
        findings += [of_text("versions", str(error))] * (context.rank == 0)
    context.barrier("network")  # until then, the listener is open
    return [ok("ranks", f"{context.size} processes have joined"), *findings]


def exchange(context: Any, name: str, value: Any) -> list[Any]:
    return [json.loads(text) for text in context.exchange(name, json.dumps(value))]


def merge(everyone: Sequence[dict[str, Any]], reports: Sequence[Sequence[Any]]) -> list[Check]:
    """Return every rank's findings once, with their ranks. On a host, those that are ok may differ
    in numbers.
    """
    merged, same = dict[Check, list[int]](), dict[tuple[object, ...], Check]()
    for rank, report in enumerate(reports):
        for check in (Check(*fields[:4]) for fields in report):
            if check.status == OK:
                kind = hosts.key(everyone[rank]), check.name, re.sub(r"[\d.]+", "", check.found)
                check = same.setdefault(kind, check)
            merged.setdefault(check, []).append(rank)
    return [check._replace(ranks=tuple(ranks)) for check, ranks in merged.items()]
