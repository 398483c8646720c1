"""Check what a run uses up: open files, memory, shared memory, and free space on disks, by a test write."""

import contextlib
import os
import pathlib
import re
import resource
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping

from jaxdp import environment
from jaxdp.doctor.check import OK, WARNING, Check, failure, graded, ok, warning
from jaxdp.errors import one_line
from jaxdp.metrics.numbers import size as shown

MB, GB = 1 << 20, 1 << 30


def check_limits(size: int = 1) -> Iterator[Check]:
    """Check the limits of a process (ulimit). size: processes of the job; rank 0 has a connection to each."""
    need = 512 + 4 * size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = f"ulimit -n {min(65536, hard) if hard >= need else 65536}"
    if 0 <= hard < need:
        fix = "raise the hard limit (limits.conf, LimitNOFILE=, docker run --ulimit nofile=65536)"
    text = "no limit" if soft < 0 else f"{soft} at most{f'; a run may need {need}' * (soft < need)}"
    yield graded("open files", need if soft < 0 else soft, 128, need, text, fix)
    for name, flag, limit in (("file size", "f", resource.RLIMIT_FSIZE), ("address space", "v", resource.RLIMIT_AS)):
        most, _ = resource.getrlimit(limit)
        if most >= 0:
            yield warning(name, f"{shown(most)} at most: a run may need more", f"ulimit -{flag} unlimited")


def check_memory() -> Iterator[Check]:
    """Check the free memory of the machine, and of the control group that this process is in."""
    free: list[int] = []
    with contextlib.suppress(OSError):
        available = re.search(r"MemAvailable:\s*(\d+) kB", pathlib.Path("/proc/meminfo").read_text())
        free += [1024 * int(available[1])] if available else []
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # ValueError: no limit
            limit_bytes, used_bytes = (int(pathlib.Path("/sys/fs/cgroup", file).read_text()) for file in (limit, used))
            free.append(limit_bytes - used_bytes)
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
    size = needed() if needed else 0
    least, enough = (2 * size, 4 * size) if size else (256 * MB, 2 * GB)
    more = f"; a checkpoint takes {shown(size)}, and the next is written before the last is removed" if size else ""
    yield check_folder("run_dir", directory, least, enough, "choose another --run_dir", more)


def check_temporary() -> Iterator[Check]:
    """Check the folder where mpirun and compilers keep files."""
    folder = pathlib.Path(tempfile.gettempdir())
    yield check_folder("temporary files", folder, 16 * MB, 256 * MB, "set TMPDIR to another folder")


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
        check = check_folder(name, folder, 16 * MB, 256 * MB, fix)
    except RuntimeError as error:  # a user without a home directory
        check = warning(name, f"{str(where)!r}: {one_line(error)}", fix)
    if check.status != OK:
        check = check._replace(status=WARNING, found=f"{check.found}; every start compiles again")
    yield check


def check_folder(name: str, directory: pathlib.Path, least: int, enough: int, other: str, more: str = "") -> Check:
    """Check that a folder, or the one in which it would be made, takes files.

    least, enough: free bytes. other: the alternative to making room. more: a text for the finding.
    """
    folder = existing(directory)
    if not folder.is_dir():
        return failure(name, f"{directory}: {folder} is no directory", other)
    free, nodes = shutil.disk_usage(folder).free, os.statvfs(folder)
    fix = f"make room there, or {other}"
    if problem := try_to_write(folder):
        return failure(name, f"{directory} cannot be written to: {problem} ({shown(free)} free)", fix)
    if nodes.f_files and nodes.f_favail < 1000:
        return failure(name, f"{directory} has room for {nodes.f_favail} more files only", f"remove files, or {other}")
    return graded(name, free, least, enough, f"{directory} has {shown(free)} free{more}", fix)


def existing(directory: pathlib.Path) -> pathlib.Path:
    """Return the folder, or its nearest parent that exists."""
    directory = directory.expanduser().absolute()
    return next(folder for folder in (directory, *directory.parents) if folder.exists())


def try_to_write(folder: pathlib.Path) -> str | None:
    """Write 4 MB to the disk and remove them; return the error, if any. A quota shows up in no other way."""
    file = folder / f".jaxdp-doctor-{secrets.token_hex(4)}"
    try:
        with file.open("wb") as out:
            out.write(secrets.token_bytes(4 * MB))
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
    return None


class Marker:
    """A file that a rank of several keeps in the run directory while it is examined. text: its contents, if any."""

    def __init__(self, directory: pathlib.Path, rank: int, text: str = ""):
        self.directory, self.rank, self.text = directory, rank, text

    def file(self, rank: int) -> pathlib.Path:
        return existing(self.directory) / f".jaxdp-doctor-rank-{rank}"

    def write(self) -> Iterator[Check]:
        text = secrets.token_hex(8)
        with contextlib.suppress(OSError):  # `check_run_dir` reports it
            self.file(self.rank).write_text(text)
            self.text = text
        yield from ()

    def check_shared(self, several: bool) -> Iterator[Check]:
        """Check that this rank sees the file of rank 0. several: the job spans hosts; network file systems lag."""
        deadline, file = time.monotonic() + (5.0 if several else 1.0), self.file(0)
        while self.text and not (file.exists() and file.read_text() == self.text):
            if time.monotonic() > deadline:
                text = f"{file.parent} is not the folder that rank 0 writes to"
                yield failure("run_dir", text, "use a --run_dir on a file system that all hosts share")
                return
            os.listdir(file.parent)  # makes NFS look again
            time.sleep(0.05)
        if several and self.text:
            yield ok("run_dir", "shared by all hosts")

    def check_missing(self, size: int) -> Iterator[Check]:
        """Report the ranks that have written no file."""
        missing = [rank for rank in range(size) if self.text and not self.file(rank).exists()]
        if missing:
            names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))}{' ...' * bool(missing[8:])}"
            text = f"{names} did not report in {self.file(0).parent}"
            yield failure("ranks", text, "see whether it was started, what it printed, and whether it has that folder")

    def remove(self, wait: bool) -> None:
        """Remove the file. wait: until rank 0 has removed its own, which it does last."""
        deadline = time.monotonic() + 5.0 * (wait and self.rank > 0 and bool(self.text))
        while time.monotonic() < deadline and self.file(0).exists():
            time.sleep(0.05)
        if self.text:
            self.file(self.rank).unlink(missing_ok=True)
