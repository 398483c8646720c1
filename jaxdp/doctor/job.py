"""Check this process's machine, join the job, and check it: `python -m jaxdp.doctor.job OPTIONS`; see `examine`.

Before each stage it prints its name, the seconds it may take, the findings so far, rank, size and the names of hosts.
"""

import contextlib
import functools
import json
import os
import pathlib
import re
import secrets
import socket
import sys
from collections.abc import Mapping
from typing import Any

from jaxdp import rundir
from jaxdp.distributed import hosts, launchers, protocol
from jaxdp.distributed.world import World
from jaxdp.doctor import devices, mpi, network, resources, settings, versions
from jaxdp.doctor.check import LIMIT, OK, Check, Checker, Line, of_text, ok, run_checks
from jaxdp.errors import UsageError


def main(options: dict[str, Any]) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not a stage
    world, checks, directory = None, list[Check](), pathlib.Path(options["directory"])
    try:
        world = launchers.discover()
        text = "a single process" if world.launcher == "none" else f"{world.launcher}, {world.size} processes"
        checks.append(ok("launcher", text))
    except UsageError as error:
        checks.append(of_text("launcher", str(error)))
    rank, size = (world.rank, world.size) if world else (0, 1)
    names = {rank: hosts.hostname()}

    def stage(name: str, seconds: float, lines: list[Line] | None = None) -> None:
        lines = [(check, (rank,)) for check in checks] if lines is None else lines
        print(json.dumps([name, seconds, lines, rank, size, names]), file=out, flush=True)

    checks += run_checks(local_checks(world, directory))
    stage("imports", LIMIT)
    checks += versions.check_imports()
    timeout = protocol.default_timeout(None if os.environ.get("JAXDP_TIMEOUT") else 30.0)
    stage("ranks", 2 * timeout + LIMIT)
    facts = {**hosts.identity(), "outward": hosts.outward(), **resources.read_cores(options["launcher"]), "marker": ""}
    with contextlib.suppress(OSError):  # `check_run_dir` reports it
        resources.marker(directory, str(rank)).write_text(text := secrets.token_hex(8))
        facts["marker"] = text
    import jax

    from jaxdp.distributed import context as contexts

    context = contexts.init(timeout=timeout) if world else contexts.Context()
    names = dict(enumerate(context.hosts)) if size > 1 else names
    stage("network", 3 * LIMIT + timeout)
    checks += check_between(context, directory, facts) if size > 1 else []
    reports = gather(context, "checks", {**facts, "checks": checks})
    lines = [*merge(reports), *((check, ()) for check in resources.check_bindings(reports))]
    stage("devices", LIMIT, lines)
    context.barrier("devices")  # a rank that fails from now on ends all, and rank 0 has sent its findings
    opened = devices.open_devices()
    if jax.device_count() > 1:
        stage("all-reduce", LIMIT, lines)
        opened["timed"] = devices.all_reduce(opened["platform"])
    reports = gather(context, "devices", {**facts, **opened, "checks": list(devices.check_devices(opened))})
    lines += merge(reports)
    if rank == 0:
        lines += [(check, ()) for check in devices.check_sharing(reports)]
        lines += [(check, ()) for check in devices.check_all_reduce(opened)]
    stage("", 0, lines)
    contexts.leave(0)


def local_checks(world: World | None, directory: pathlib.Path) -> dict[str, Checker]:
    """Return the checks that need no other process."""
    size, local_size = (world.size, world.local_size or 1) if world else (1, 1)
    checks: dict[str, Checker] = {
        "versions": versions.check_versions,
        "environment": functools.partial(settings.check_settings, size),
        "gpu": devices.check_gpus,
        "open files": functools.partial(resources.check_limits, size),
        "memory": resources.check_memory,
        "shared memory": functools.partial(resources.check_shared_memory, local_size),
        "run_dir": lambda: [resources.check_run_dir(directory)],
        "host name": network.check_name,
        "port": functools.partial(network.check_port, world),
    }
    alone = world is None or (size == 1 and world.launcher in ("none", "jaxdp"))  # mpirun does not start mpirun
    return checks | {"mpirun": mpi.check_mpirun} if alone else checks


def check_between(context: Any, directory: pathlib.Path, facts: dict[str, Any]) -> list[Check]:
    """Check what lies between the ranks."""
    listener = socket.create_server(("", 0), backlog=128)
    local = {name: facts[name] for name in ("host", "boot", "addresses", "outward", "marker")}
    texts = context.exchange("facts", json.dumps({**local, "port": listener.getsockname()[1]}))
    everyone = {rank: json.loads(text) for rank, text in enumerate(texts)}
    several = len({hosts.key(fact) for fact in everyone.values()}) > 1
    checks: dict[str, Checker] = {"network": functools.partial(network.check_reach, context.rank, everyone)}
    if text := everyone[0]["marker"]:
        checks["run_dir"] = functools.partial(resources.check_shared, directory, text, several)
    findings = run_checks(checks)
    try:
        context.check_same("packages", {name: str(version) for name, version in rundir.versions().items()})
    except UsageError as error:
        findings += [of_text("versions", str(error))] * (context.rank == 0)
    context.barrier("network")  # until then, the listener is open
    return [ok("ranks", f"{context.size} processes have joined"), *findings]


def gather(context: Any, name: str, value: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return every rank's value on rank 0, and an empty dict on the others."""
    texts = context.exchange(name, json.dumps(value))
    return {rank: json.loads(text) for rank, text in enumerate(texts) if context.rank == 0}


def merge(reports: Mapping[int, Mapping[str, Any]]) -> list[Line]:
    """Return every finding once, with its ranks. What is ok on a host may differ in numbers from rank to rank."""
    merged, same = dict[Check, list[int]](), dict[tuple[object, ...], Check]()
    for rank, report in reports.items():
        for check in (Check(*fields) for fields in report["checks"]):
            if check.status == OK:
                check = same.setdefault((hosts.key(report), check.name, re.sub(r"[\d.]+", "", check.found)), check)
            merged.setdefault(check, []).append(rank)
    return [(check, tuple(ranks)) for check, ranks in merged.items()]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
