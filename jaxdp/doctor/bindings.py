"""Check the cores of ranks: a launcher binds them and a container limits them, and ranks that share some are slow."""

import contextlib
import os
import pathlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdp.distributed import hosts
from jaxdp.doctor.check import Check, ok, warning

BIND = "mpirun --bind-to none (Open MPI), -bind-to none (MPICH), or srun --cpus-per-task"


def read_cores() -> dict[str, Any]:
    """Return the cores this process may run on, the number its launcher may, and the container's CPU limit."""
    affinity = getattr(os, "sched_getaffinity", lambda pid: range(os.cpu_count() or 1))
    cores = sorted(affinity(0))
    launcher_cores = len(cores)
    with contextlib.suppress(OSError):
        launcher_cores = max(launcher_cores, len(affinity(os.getppid())))
    return {"cores": cores, "launcher_cores": launcher_cores, "limit": cpu_limit()}


def cpu_limit() -> float | None:
    """Return the processors' worth of time that this process's control groups allow; None: no limit."""
    limits = []
    with contextlib.suppress(OSError, StopIteration):
        lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
        group = pathlib.PurePosixPath(next(line[3:] for line in lines if line.startswith("0::")))
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # ValueError: "max", which is no limit
                file = pathlib.Path("/sys/fs/cgroup") / str(folder).lstrip("/") / "cpu.max"
                quota, period = map(int, file.read_text().split())
                limits.append(quota / period)
    return min(limits, default=None)


def check_bindings(facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Check]:
    """Check on every host that its ranks have enough cores, and that bindings leave none idle."""
    by_host = defaultdict[Any, dict[int, Mapping[str, Any]]](dict)
    for rank, fact in facts.items():
        by_host[hosts.key(fact)][rank] = fact
    for (host, _), local in by_host.items():
        yield check_host(host, local)


def check_host(host: str, facts: Mapping[int, Mapping[str, Any]]) -> Check:
    sets = {frozenset(fact["cores"]) for fact in facts.values()}
    available = max(fact["launcher_cores"] for fact in facts.values())
    used = len(frozenset().union(*sets))
    limit = min((fact["limit"] for fact in facts.values() if fact["limit"]), default=None)
    ranks = f"{len(facts)} rank{'s' * (len(facts) > 1)} on host {host}"
    for cores in sorted(sets, key=len):
        sharers = [rank for rank, fact in facts.items() if set(fact["cores"]) <= cores]
        if len(sharers) > len(cores):
            names = f"ranks {', '.join(map(str, sharers[:8]))}{' ...' if sharers[8:] else ''} on host {host}"
            shared = f"core {min(cores)}" if len(cores) == 1 else f"{len(cores)} cores"
            fix = f"start at most {len(cores)} on that host, or request more cores"
            unbound = len(cores) < max(available, os.cpu_count() or 1)
            fix = f"{BIND}, or --map-by; or {fix}" if unbound else fix
            return warning("bindings", f"{names} share {shared}: each waits for the other", fix)
    if used * 2 <= available:
        return warning("bindings", f"{ranks} are bound to {used} of {available} cores", BIND)
    if limit is not None and limit < max(0.75 * used, min(used, len(facts))):
        text = f"{ranks} see {used} cores, but the control group allows {limit:g} processors' worth of time"
        return warning("bindings", text, "raise the container's CPU limit, or start fewer ranks or threads")
    return ok("bindings", f"{ranks}, {used} core{'s' * (used > 1)}{' in all' * (used > 1 and len(facts) > 1)}")
