"""Check what a run needs of its host: open files, memory, space on disks (by a test write), and
cores.
"""

import contextlib
import math
import os
import pathlib
import resource
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxdp.doctor.findings import Check, failure, graded, ok, warning
from jaxdp.metrics.numbers import size as shown
from jaxdp.process import hosts
from jaxdp.run.rundir import sees

MB, GB = 1 << 20, 1 << 30
BIND = "mpirun --bind-to none (Open MPI), -bind-to none (MPICH), or srun --cpus-per-task"


def check_memory(size: int = 1, local_size: int = 1) -> Iterator[Check]:
    """Check open files, free memory (also the control group's), and shared memory for Open MPI,
    NCCL and data workers.

    size, local_size: processes of the job, to each of which rank 0 has a connection, and of this
    host."""
    need = 512 + 4 * size
    soft, hard = (
        need if limit < 0 else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    fix = "raise the hard limit (limits.conf, LimitNOFILE=, docker run --ulimit nofile=65536)"
    text = f"{soft} at most{f'; a run may need {need}' * (soft < need)}"
    yield graded(
        "open files",
        soft,
        128,
        need,
        text,
        f"ulimit -n {min(65536, hard)}" if hard >= need else fix,
    )
    if (free := hosts.free_memory()) < math.inf:
        fix = "end other programs, or raise the container's memory limit"
        yield graded("memory", free, 256 * MB, GB, f"{shown(free)} free", fix)
    if not os.access("/dev/shm", os.W_OK):
        yield warning(
            "shared memory", "/dev/shm cannot be written to", "mount it, or chmod 1777 /dev/shm"
        )
        return
    total, _, free = shutil.disk_usage("/dev/shm")
    enough = (
        64 * MB * min(local_size, 4) if total > 64 * MB else math.inf
    )  # 64 MB is a container's default
    fix = "mount a larger /dev/shm: docker run --shm-size=8g, or an emptyDir of medium Memory in Kubernetes"
    yield graded(
        "shared memory",
        free,
        16 * MB,
        enough,
        f"/dev/shm has {shown(free)} free of {shown(total)}",
        fix,
    )


def check_run_dir(directory: pathlib.Path) -> Check:
    """Check space and permission for checkpoints, in the run directory or the folder that it would
    be made in.
    """
    name, other, folder = "run_dir", "choose another --run_dir", existing(directory)
    if not folder.is_dir():
        return failure(name, f"{directory}: {folder} is no directory", other)
    free, fix = shutil.disk_usage(folder).free, f"make room there, or {other}"
    try:  # a quota shows up in no other way
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".jaxdp-doctor-") as out:
            out.write(secrets.token_bytes(4 * MB))
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        text = f"{directory} cannot be written to: {error.strerror or error} ({shown(free)} free)"
        return failure(name, text, fix)
    return graded(name, free, 256 * MB, 2 * GB, f"{directory} has {shown(free)} free", fix)


def existing(directory: pathlib.Path) -> pathlib.Path:
    """Return the folder, or its nearest parent that exists."""
    directory = directory.expanduser().absolute()
    return next(folder for folder in (directory, *directory.parents) if folder.exists())


def marker(directory: pathlib.Path, rank: str) -> pathlib.Path:
    """Return the file that a rank of several keeps in the run directory while it is examined."""
    return existing(directory) / f".jaxdp-doctor-rank-{rank}"


def check_shared(directory: pathlib.Path, text: str) -> Iterator[Check]:
    """Check that this process sees the marker of rank 0, and `text` in it."""
    file = marker(directory, "0")
    if sees(file, text, 5.0):
        yield ok("run_dir", "shared by all ranks")
    else:
        fix = (
            "use a --run_dir on a file system that all hosts share, or set checkpoint.local to true"
        )
        yield failure("run_dir", f"{file.parent} is not the folder that rank 0 writes to", fix)


def check_missing(directory: pathlib.Path, size: int) -> Iterator[Check]:
    """Report the ranks that have no marker."""
    missing = [str(rank) for rank in range(size) if not marker(directory, str(rank)).exists()]
    if 0 < len(missing) < size:
        text = f"rank {hosts.listed(missing)} did not report in {existing(directory)}"
        yield failure(
            "ranks",
            text,
            "see whether it was started, what it printed, and whether it has that folder",
        )


def read_cores(launcher: int) -> dict[str, Any]:
    """Return the cores of this process, the number of its launcher's (a process id), and the
    container's limit.
    """
    affinity = getattr(os, "sched_getaffinity", lambda pid: range(os.cpu_count() or 1))
    quota = hosts.core_quota()
    facts = {
        "cores": sorted(affinity(0)),
        "launcher_cores": 0,
        "limit": quota if quota < math.inf else None,
    }
    with contextlib.suppress(OSError):
        facts["launcher_cores"] = len(affinity(launcher))
    return facts


def check_bindings(facts: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Check on every host that its ranks have enough cores, and that bindings leave none idle.
    facts: of each rank.
    """
    by_host: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for rank, fact in enumerate(facts):
        by_host.setdefault(hosts.key(fact), {})[rank] = fact
    return [check_host(host, ranks) for (host, _), ranks in by_host.items()]


def check_host(host: str, facts: Mapping[int, Mapping[str, Any]]) -> Check:
    sets = {frozenset(fact["cores"]) for fact in facts.values()}
    available = max(fact["launcher_cores"] for fact in facts.values())
    used = len(frozenset().union(*sets))
    limit = min((fact["limit"] for fact in facts.values() if fact["limit"]), default=used)
    ranks = f"{len(facts)} rank{'s' * (len(facts) > 1)} on host {host}"
    for cores in sorted(sets, key=len):
        sharers = [str(rank) for rank, fact in facts.items() if set(fact["cores"]) <= cores]
        if len(sharers) > len(cores):
            names = f"ranks {hosts.listed(sharers)} on host {host}"
            shared = f"core {min(cores)}" if len(cores) == 1 else f"{len(cores)} cores"
            fix = f"{BIND}; or start at most {len(cores)} on that host, or request more cores"
            return warning("bindings", f"{names} share {shared}: each waits for the other", fix)
    if used * 2 <= available:
        return warning("bindings", f"{ranks} are bound to {used} of {available} cores", BIND)
    if limit < max(0.75 * used, min(used, len(facts))):
        text = f"{ranks} see {used} cores, but the control group allows {limit:g} processors' worth of time"
        return warning(
            "bindings", text, "raise the container's CPU limit, or start fewer ranks or threads"
        )
    return ok(
        "bindings",
        f"{ranks}, {used} core{'s' * (used > 1)}{' in all' * (used > 1 and len(facts) > 1)}",
    )
