"""Check what a run uses up: open files, memory, shared memory, and room on disks, which is tried by writing."""

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
from jaxdp.doctor.check import OK, WARNING, Check, failure, graded, ok, warning
from jaxdp.errors import one_line
from jaxdp.metrics.numbers import size as shown

MB, GB = 1 << 20, 1 << 30
TRIAL = 4 * MB  # bytes written to see whether they can be


def check_limits(size: int = 1) -> Iterator[Check]:
    """Check the limits of a process (ulimit). size: processes of the job; rank 0 has a connection to each."""
    need = 512 + 4 * size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = f"ulimit -n {min(65536, hard) if hard >= need else 65536}"
    if 0 <= hard < need:
        fix = "raise the hard limit (limits.conf, LimitNOFILE=, docker run --ulimit nofile=65536)"
    limit = need if soft < 0 else soft
    text = "no limit" if soft < 0 else f"{soft} at most{f'; a run may need {need}' * (soft < need)}"
    yield graded("open files", limit, 128, need, text, fix)
    written, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if written >= 0:
        text = f"files end at {shown(written)}: a larger checkpoint fails"
        yield graded("file size", written, 64 * MB, float("inf"), text, "ulimit -f unlimited")
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space >= 0:
        text = f"{shown(space)} of address space at most: XLA and CUDA reserve more than they use"
        yield warning("address space", text, "ulimit -v unlimited")


def check_memory() -> Iterator[Check]:
    """Check the free memory of the machine, and of the control group that this process is in."""
    free: list[int] = []
    with contextlib.suppress(OSError):
        available = re.search(r"MemAvailable:\s*(\d+) kB", pathlib.Path("/proc/meminfo").read_text())
        free += [1024 * int(available[1])] if available else []
    group = pathlib.Path("/sys/fs/cgroup")
    for folder, limit, used in (
        (group, "memory.max", "memory.current"),
        (group / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # ValueError: no limit
            free.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
    if free:
        fix = "end other programs, or raise the container's memory limit"
        yield graded("memory", min(free), 256 * MB, GB, f"{shown(min(free))} free", fix)


def check_shared_memory(size: int = 1, folder: str = "/dev/shm") -> Iterator[Check]:
    """Check the shared memory that Open MPI, NCCL and worker processes use; a container has 64 MB by default."""
    name = "shared memory"
    fix = "mount a larger /dev/shm: docker run --shm-size=8g, or an emptyDir of medium Memory in Kubernetes"
    if not os.path.isdir(folder):
        yield warning(name, f"there is no {folder}", fix)
    elif not os.access(folder, os.W_OK):
        yield warning(name, f"{folder} cannot be written to", f"chmod 1777 {folder}")
    else:
        total, _, free = shutil.disk_usage(folder)
        enough = 64 * MB * max(1, min(size, 4)) if total > 64 * MB else float("inf")
        yield graded(name, free, 16 * MB, enough, f"{folder} has {shown(free)} free of {shown(total)}", fix)


def check_run_dir(directory: pathlib.Path, needed: Callable[[], int] | None = None) -> Iterator[Check]:
    """Check room and permission for checkpoints. needed: returns the bytes of one; saving one needs room for two."""
    folder = existing(directory)
    what = f"{directory}" if folder == directory else f"{directory} (to be made in {folder})"
    size = needed() if needed else 0
    least, enough = (2 * size, 4 * size) if size else (256 * MB, 2 * GB)
    more = f"; a checkpoint takes {shown(size)}, and the next is written before the last is removed" if size else ""
    yield check_folder("run_dir", folder, what, least, enough, "choose another --run_dir", more)


def check_temporary() -> Iterator[Check]:
    """Check the folder where mpirun and compilers keep files."""
    folder, wanted = pathlib.Path(tempfile.gettempdir()), os.environ.get("TMPDIR")
    if wanted and pathlib.Path(wanted).absolute() != folder.absolute():
        text = f"TMPDIR={wanted} cannot be written to, and {folder} is used instead"
        yield warning("temporary files", text, "make that folder, or unset TMPDIR")
    fix = "set TMPDIR to another folder"
    yield check_folder("temporary files", folder, str(folder), 16 * MB, 256 * MB, fix)


def check_cache(where: str | None = "auto", env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Check the folder of compiled programs. where: `compilation_cache` of the config.

    A run that cannot use it compiles again at each start, so this is never a failure.
    """
    name, variable = "compilation cache", "JAX_COMPILATION_CACHE_DIR"
    value = env.get(variable)
    if value == "" or (where is None and value is None):
        yield ok(name, "none: every start compiles again")
        return
    if value is not None and "://" in value:
        return
    fix = f"set {variable} to another folder" if value else "set compilation_cache to another folder, or to null"
    try:
        folder = environment.compiled(str(where)) if value is None else pathlib.Path(value)
    except RuntimeError as error:  # a user without a home directory
        yield warning(name, f"{str(where)!r}: {one_line(error)}; every start compiles again", fix)
        return
    check = check_folder(name, existing(folder), str(folder), 16 * MB, 256 * MB, fix)
    bad = check._replace(status=WARNING, found=f"{check.found}; every start compiles again")
    yield check if check.status == OK else bad


def check_folder(
    name: str, folder: pathlib.Path, what: str, least: int, enough: int, other: str, more: str = ""
) -> Check:
    """Check that an existing folder takes files. least, enough: free bytes. other: the alternative to making room."""
    if not folder.is_dir():
        return failure(name, f"{what}: {folder} is no directory", other)
    free, nodes = shutil.disk_usage(folder).free, os.statvfs(folder)
    fix = f"make room there, or {other}"
    if problem := try_to_write(folder):
        return failure(name, f"{what} cannot be written to: {problem} ({shown(free)} free)", fix)
    if nodes.f_files and nodes.f_favail < 1000:
        return failure(name, f"{what} has room for {nodes.f_favail} more files only", f"remove files, or {other}")
    return graded(name, free, least, enough, f"{what} has {shown(free)} free{more}", fix)


def existing(directory: pathlib.Path) -> pathlib.Path:
    """Return the folder, or its nearest parent that exists."""
    directory = directory.expanduser().absolute()
    return next(folder for folder in (directory, *directory.parents) if folder.exists())


def try_to_write(folder: pathlib.Path) -> str | None:
    """Write TRIAL bytes to the disk and remove them; return the error, if any. A quota shows up in no other way."""
    file = folder / f".jaxdp-doctor-{secrets.token_hex(4)}"
    try:
        with file.open("wb", buffering=0) as out:
            rest = secrets.token_bytes(1 << 16) * (TRIAL >> 16)
            while rest:
                rest = rest[out.write(rest) :]
            os.fsync(out.fileno())
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
    return None
