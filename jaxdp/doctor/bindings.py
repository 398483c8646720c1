"""Cores are dealt to ranks by the launcher and limited by the system: ranks that share some wait for each other."""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdp.distributed import hosts
from jaxdp.doctor.check import Check, ok, warning

BIND = "mpirun --bind-to none (Open MPI), -bind-to none (MPICH), or srun --cpus-per-task"


def own_cores() -> dict[str, Any]:
    """The cores this process may run on; how many its launcher may; how many processors' worth of time it gets."""
    if not hasattr(os, "sched_getaffinity"):
        return {"cores": list(range(os.cpu_count() or 1)), "launcher_cores": os.cpu_count() or 1, "limit": None}
    cores = sorted(os.sched_getaffinity(0))
    above = len(cores)
    with contextlib.suppress(OSError):
        above = len(os.sched_getaffinity(os.getppid()))
    return {"cores": cores, "launcher_cores": max(above, len(cores)), "limit": cpu_limit()}


def cpu_limit() -> float | None:
    """Processors' worth of time that the control group allows (version 2 or 1), the least on the way up; None: all."""
    limits = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        root = pathlib.Path("/sys/fs/cgroup" if not controllers else "/sys/fs/cgroup/cpu")
        if controllers and "cpu" not in controllers.split(","):
            continue
        for folder in (pathlib.PurePosixPath(path), *pathlib.PurePosixPath(path).parents):
            place = root / str(folder).lstrip("/")
            quota, period = (_read(place / "cpu.max").split() or ["max", "1"])[:2]
            if controllers:
                quota, period = _read(place / "cpu.cfs_quota_us") or "-1", _read(place / "cpu.cfs_period_us") or "1"
            with contextlib.suppress(ValueError, ZeroDivisionError):
                limits += [int(quota) / int(period)] if int(quota) > 0 else []
    return min(limits, default=None)


def _read(path: str | pathlib.PurePath) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(path).read_text().strip()
    return ""


def check_bindings(facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Check]:
    """The cores of every rank, host by host: enough for its ranks, and none left idle by a binding."""
    by_host: dict[Any, list[int]] = {}
    for rank, fact in facts.items():
        by_host.setdefault(hosts.key(fact), []).append(rank)
    for ranks in by_host.values():
        yield _of_host(facts[ranks[0]]["host"], {rank: facts[rank] for rank in ranks})


def _of_host(host: str, facts: Mapping[int, Mapping[str, Any]]) -> Check:
    sets = {frozenset(fact["cores"]) for fact in facts.values()}
    there = max(fact["launcher_cores"] for fact in facts.values())
    used = len(frozenset().union(*sets))
    limit = min((fact["limit"] for fact in facts.values() if fact["limit"]), default=None)
    for cores in sorted(sets, key=len):
        inside = [rank for rank, fact in facts.items() if set(fact["cores"]) <= cores]
        if len(inside) > len(cores):
            who = f"ranks {', '.join(map(str, inside[:8]))}{' ...' if inside[8:] else ''} on host {host}"
            which = f"core {min(cores)}" if len(cores) == 1 else f"{len(cores)} cores"
            found = f"{who} share {which}: each waits for the other"
            few = f"start {len(cores)} there at most, or ask for more cores"
            unbound = len(cores) < there or len(cores) < (os.cpu_count() or 1)
            return warning("bindings", found, f"{BIND}, or --map-by; or {few}" if unbound else few)
    if used * 2 <= there:
        return warning("bindings", f"{len(facts)} ranks on host {host} are bound to {used} of {there} cores", BIND)
    if limit is not None and limit < min(used, len(facts)):
        found = f"{len(facts)} ranks on host {host} have {limit:g} processors' worth of time (control group)"
        return warning("bindings", found, "raise the container's CPU limit, or start fewer ranks")
    if limit is not None and limit < 0.75 * used:
        found = f"host {host} shows {used} cores, but the control group allows {limit:g}: threads are held up"
        return warning(
            "bindings", found, "raise the container's CPU limit, or bind it to as many cores (--cpuset-cpus)"
        )
    each = f"{len(facts)} rank{'s' * (len(facts) > 1)} on host {host}, {used} core{'s' * (used > 1)}"
    return ok("bindings", each if used == 1 or len(facts) == 1 else f"{each} in all")
