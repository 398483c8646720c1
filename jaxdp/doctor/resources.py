"""What a run uses up: files that are open, shared memory, and room on the disk; tried where trying is cheap."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import resource
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping

from jaxdp import environment
from jaxdp.doctor.check import OK, Check, failure, ok, warning
from jaxdp.errors import one_line
from jaxdp.metrics.numbers import size as shown

MB, GB = 1 << 20, 1 << 30
TRIAL = 4 * MB  # bytes written to see whether they can be
FULL, LITTLE = 256 * MB, 2 * GB  # free bytes below which a disk is full, and below which it soon will be


def check_limits(size: int = 1) -> Iterator[Check]:
    """The limits of a process (ulimit). size: processes in the job; rank 0 holds connections to each."""
    need = 512 + 4 * size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = f"ulimit -n {min(65536, hard) if hard >= need else 65536}"
    if 0 <= hard < need:
        raised = "raise the hard limit (limits.conf, LimitNOFILE=, docker run --ulimit nofile=65536)"
    if 0 <= soft < 128:
        yield failure("open files", f"{soft} at most; a run needs {need}", raised)
    elif 0 <= soft < need:
        yield warning("open files", f"{soft} at most; a run may need {need}", raised)
    else:
        yield ok("open files", "no limit" if soft < 0 else f"{soft:,} at most")
    written, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if written >= 0:
        bad = failure if written < 64 * MB else warning
        yield bad("file size", f"files end at {shown(written)}: a larger checkpoint fails", "ulimit -f unlimited")
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space >= 0:
        found = f"{shown(space)} of address space at most: XLA and CUDA reserve more than they use"
        yield warning("address space", found, "ulimit -v unlimited")


def check_memory() -> Iterator[Check]:
    """Memory that is left: the machine's, and that of the control group this process is in."""
    left: list[int] = []
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable:\s*(\d+) kB", pathlib.Path("/proc/meminfo").read_text())
        left += [1024 * int(found[1])] if found else []
    group = pathlib.Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # ValueError: no limit
            left.append(int((group / limit).read_text()) - int((group / used).read_text()))
    if not left:
        return
    bad = failure if min(left) < 256 * MB else warning
    if min(left) < GB:
        yield bad("memory", f"{shown(min(left))} left", "end other programs, or raise the container's memory limit")
    else:
        yield ok("memory", f"{shown(min(left))} left")


def check_shared_memory(size: int = 1, place: str = "/dev/shm") -> Iterator[Check]:
    """Open MPI, NCCL and worker processes pass data through it; containers are given 64 MB unless they ask for more."""
    name = "shared memory"
    fix = "mount a larger /dev/shm: docker run --shm-size=8g, or an emptyDir of medium Memory in Kubernetes"
    if not os.path.isdir(place):
        yield warning(name, f"{place} is not there", fix)
        return
    total, _, free = shutil.disk_usage(place)
    found = f"{place} has {shown(free)} free of {shown(total)}"
    if not os.access(place, os.W_OK):
        yield warning(name, f"{place} cannot be written to", f"chmod 1777 {place}")
    elif free < 16 * MB:
        yield failure(name, found, f"remove what is left in {place}, or {fix}")
    elif free < 64 * MB * max(1, min(size, 4)) or total <= 64 * MB:
        yield warning(name, found, fix)
    else:
        yield ok(name, found)


def check_run_dir(directory: pathlib.Path, needed: Callable[[], int] | None = None) -> Iterator[Check]:
    """Room and permission for checkpoints. needed: gives the bytes of one; two are there while one is saved."""
    place = existing(directory)
    what = f"{directory}" if place == directory else f"{directory} (to be made in {place})"
    yield from check_folder("run_dir", place, what, needed and needed(), "another --run_dir")


def check_temporary() -> Iterator[Check]:
    """mpirun and compilers keep files there."""
    place = pathlib.Path(tempfile.gettempdir())
    wanted = os.environ.get("TMPDIR")
    if wanted and pathlib.Path(wanted).absolute() != place.absolute():
        found = f"TMPDIR={wanted} cannot be written to, and {place} is taken instead"
        yield warning("temporary files", found, "make that folder, or unset TMPDIR")
    yield from check_folder("temporary files", place, str(place), 0, "set TMPDIR to another folder")


def check_cache(where: str | None = "auto", env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """The folder of compiled programs, where there is one on a disk. where: `compilation_cache` of the config.

    A run that cannot use it compiles anew, and is otherwise well: no failure.
    """
    name, variable = "compilation cache", "JAX_COMPILATION_CACHE_DIR"
    given = env.get(variable)
    if (where is None and given is None) or given == "":
        yield ok(name, "none: every start compiles anew")
        return
    if given is not None and "://" in given:
        return
    fix = f"set {variable} to another folder" if given else "set compilation_cache to another folder, or to null"
    try:
        folder = environment.compiled(str(where)) if given is None else pathlib.Path(given)
    except RuntimeError as error:  # a user without a home directory
        yield warning(name, f"{str(where)!r}: {one_line(error)}; every start compiles anew", fix)
        return
    for check in check_folder(name, existing(folder), str(folder), 0, fix):
        yield check if check.status == OK else warning(name, f"{check.found}; every start compiles anew", check.fix)


def check_folder(name: str, place: pathlib.Path, what: str, needed: int | None, other: str) -> Iterator[Check]:
    """place: a folder that is there. needed: bytes to be written, or None: more than a little. other: the way out."""
    if not place.is_dir():
        yield failure(name, f"{what}: {place} is no directory", f"choose {other}" if name == "run_dir" else other)
        return
    choose = f"choose {other}" if name == "run_dir" else other
    free = shutil.disk_usage(place).free
    nodes = os.statvfs(place)
    full = 2 * needed if needed else (FULL if needed is None else 16 * MB)
    little = 4 * needed if needed else (LITTLE if needed is None else 256 * MB)
    found = f"{what} has {shown(free)} free"
    if needed:
        found += f"; a checkpoint takes {shown(needed)}, and the next is written before the last is removed"
    if problem := try_to_write(place):
        yield failure(
            name,
            f"{what} cannot be written to: {problem} ({shown(free)} free)",
            f"make room or give leave to write there, or {choose}",
        )
    elif free < full:
        yield failure(name, found, f"make room there, or {choose}")
    elif nodes.f_files and nodes.f_favail < 1000:
        yield failure(name, f"{what} has room for {nodes.f_favail} more files only", f"remove files, or {choose}")
    elif free < little:
        yield warning(name, found, f"make room there, or {choose}")
    else:
        yield ok(name, found)


def existing(directory: pathlib.Path) -> pathlib.Path:
    """The folder, or the nearest above it that is there."""
    directory = directory.expanduser().absolute()
    return next(place for place in (directory, *directory.parents) if place.exists())


def try_to_write(place: pathlib.Path) -> str | None:
    """Writes TRIAL bytes down to the disk and removes them again: what went wrong, or None. A quota shows only so."""
    file = place / f".jaxdp-doctor-{secrets.token_hex(4)}"
    try:
        with file.open("wb", buffering=0) as out:
            left = secrets.token_bytes(1 << 16) * (TRIAL >> 16)
            while left:
                left = left[out.write(left) :]
            os.fsync(out.fileno())
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
    return None
