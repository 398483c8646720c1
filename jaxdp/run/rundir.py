"""The run directory, shared by all processes: its lock, and the files that record the config and
the versions.
"""

import contextlib
import dataclasses
import errno
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any, TypeVar

from jaxdp import __version__
from jaxdp.config import Config
from jaxdp.config.values import dump
from jaxdp.errors import RunFailed, UsageError
from jaxdp.process import mpi
from jaxdp.process.channel import parse

T = TypeVar("T")
U = TypeVar("U")

DEPTH = 200  # bytes of the longest path in `checkpoints`
# seconds that an ending process may take to release the run directory; other ranks wait for 60
WAIT = 50.0
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "mpi4py")

REPORT = "report.html"
# Patterns of the files that a run writes; last env.json, which identifies the directory of a run.
WRITTEN = (
    *(
        "checkpoints/[0-9]*",
        "metrics.jsonl",
        "events.jsonl",
        "config.yaml",
        "layout.json",
        "confusion.json",
        REPORT,
        "git.diff",
    ),
    *(
        "halted.json",
        "media/[0-9]*-*",
        "wandb_id",
        "tensorboard/events.out.tfevents.*",
        "profile/plugins",
    ),
    *("stacks/rank_*.txt", "model.txt", "env.json"),
)
# Names of checkpoints; a user's own folders in `checkpoints`, such as 100-backup, do not match.
CHECKPOINT = re.compile(r"\d+(\.(orbax-checkpoint-tmp|pruned|damaged|suspect|unfinished).*)?")

# Names of folders below which Orbax and TensorStore would not use the same files: a backslash
# separates names for TensorStore, gs: is a store for Orbax, and .__lock is TensorStore's own.
NOT_STORED = re.compile(r"gs:/|\\|\.__lock/")

_owner: "tuple[IO[str], Owner] | None" = None  # the open lock file of this process, and its owner
_nonce = (0, "")  # (the process, the nonce) of the run directory that this process has used last


def directory_of(config: Config, path: str | None) -> pathlib.Path:
    """Return the run directory: config.run_dir, else runs/NAME of the config file."""
    return pathlib.Path(config.run_dir or f"runs/{pathlib.Path(path).stem if path else 'run'}")


def make(directory: pathlib.Path) -> tuple[IO[str] | None, str | None]:
    """Create and lock the directory, and write a nonce into it. Return (the lock, the error message
    or None).
    """
    path = os.path.realpath(directory / "checkpoints")
    problem = ""
    if re.search("[\ud800-\udfff]", path):  # bytes that Python could not decode
        problem = " is not UTF-8, so Orbax could not save there; choose another with --run_dir"
    elif NOT_STORED.search(f"{path}/"):
        problem = " has a name below which Orbax cannot save; choose another with --run_dir"
    elif len(path.encode()) + DEPTH > (longest := os.pathconf("/", "PC_PATH_MAX")):
        problem = f"... is too long for its files ({longest} bytes); choose a shorter one"
    if problem:
        return None, f"run_dir: {str(directory.absolute())[:300]!r}{problem}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "checkpoints").mkdir(exist_ok=True)
        file, conflict = lock(directory)
        if not conflict and not _is_of_this_job(directory):
            with replaced(directory / ".nonce") as new:
                new.write_text(secrets.token_hex(16), encoding="utf-8")
    except OSError as error:
        return None, cannot_write(error.filename or directory, error)
    return file, conflict


def cannot_write(path: pathlib.Path | str, error: OSError) -> str:
    if error.errno == errno.ELOOP and os.path.islink(path):
        return f"run_dir: {str(path)!r} is a link, through which a run does not write; remove it, or choose another"
    reason = error.strerror
    if isinstance(error, FileExistsError):
        reason = "it is not a folder"
        try:
            os.stat(path)
        except FileNotFoundError:
            target = os.readlink(path)
            return f"run_dir: {str(path)!r} is a link to {target!r}, which does not exist; create that folder"
        except OSError as other:
            reason = other.strerror
    return f"run_dir: cannot write in {str(path)[:300]!r}: {reason}; choose another with --run_dir"


def no_link(path: str, flags: int) -> int:
    """Open a file, but not through a link, which another user of a shared folder may have made: an
    `opener` of `open`.

    Raises OSError (ELOOP) for a link.
    """
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def nonce(directory: pathlib.Path) -> str:
    return (directory / ".nonce").read_text(encoding="utf-8", errors="replace")


def sees(file: pathlib.Path, text: str, timeout: float) -> bool:
    """Wait until this rank sees a file with this text (network file systems lag); return whether it
    does.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            os.listdir(file.parent)  # makes NFS look again
            if file.read_text(encoding="utf-8", errors="replace") == text:
                return True
        time.sleep(0.05)
    return False


def is_shared(directory: pathlib.Path, nonce: str) -> str | None:
    """Wait until rank 0's nonce is visible to this rank. Return an error message or None."""
    global _nonce
    _nonce = (os.getpid(), nonce)
    if sees(directory / ".nonce", nonce, 10.0):
        return None
    return (
        f"run_dir: {str(directory)!r} is not the directory that rank 0 writes to; use one on a file system that all "
        "hosts share, or set checkpoint.local to true"
    )


def lock(directory: pathlib.Path) -> tuple[IO[str] | None, str | None]:
    """Lock the directory until this process ends. Return (the lock, to keep open, None) or (None,
    the error message).

    It is a POSIX lock: the kernel releases it with the process, NFS supports it, and a forked child
    does not inherit it. Wait for an owner that is ending, or whose launcher has ended; fail at once
    for any other. But take the directory from an owner that led this process's own job in its last
    generation: it is stopped or cut off, and may keep its lock for as long as it lives. That lock
    is then of a file that no longer has the name."""
    global _owner
    path = directory / ".lock"
    deadline = time.monotonic() + WAIT
    reported = False
    while True:
        file = open(path, "a+", encoding="utf-8", errors="replace", opener=no_link)  # noqa: SIM115
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                break
        except FileNotFoundError:  # it has just been replaced
            pass
        except (BlockingIOError, PermissionError):
            if _is_of_this_job(directory):
                file.close()
                with replaced(path) as new:
                    file = new.open("a+", encoding="utf-8", errors="replace")
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            owner = Owner.read(file)
            problem = f"run_dir: {str(directory)!r} is in use by {owner.name}"
            if not owner.is_ending() or time.monotonic() > deadline:
                file.close()
                return None, f"{problem}; wait for its end, or choose another --run_dir"
            if not reported:
                sys.stderr.write(
                    f"jaxdp: {problem}, which is ending: waiting for it, {WAIT:g} s at most\n"
                )
            reported = True
            time.sleep(0.2)
        except OSError:  # a file system without locks
            return file, None
        file.close()
    starters = [pid for pid, program in mpi.ancestors() if program.name in mpi.STARTERS]
    name = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    _owner = (file, Owner(name, socket.gethostname(), starters))
    _owner[1].write(file)
    return file, None


def _is_of_this_job(directory: pathlib.Path) -> bool:
    """Return whether the directory was last used by a job that this process, and not its parent,
    belongs to.
    """
    return (
        _nonce[0] == os.getpid()
        and (directory / ".nonce").exists()
        and nonce(directory) == _nonce[1]
    )


def mark_ending() -> None:
    """Write into the lock file, if this process has locked a run directory, that it is about to
    end.
    """
    if _owner is not None:
        file, owner = _owner
        with contextlib.suppress(
            OSError, ValueError
        ):  # the directory may be gone, or the file closed
            dataclasses.replace(owner, ending=True).write(file)


@dataclasses.dataclass(frozen=True)
class Owner:
    """The process that has locked a run directory, as stored in the lock file.

    starters: ids of its ancestors on `host` that are mpirun's processes; if one has ended, the job
    is dead."""

    name: str = "another process"
    host: str = ""
    starters: Sequence[int] = ()
    ending: bool = False

    def write(self, file: IO[str]) -> None:
        file.truncate(0)
        file.write(json.dumps(dataclasses.asdict(self)) + "\n")
        file.flush()
        os.fsync(file.fileno())  # for readers over a network file system

    @classmethod
    def read(cls, file: IO[str]) -> "Owner":
        file.seek(0)
        shape = {"name": str, "host": str, "starters": [range(1 << 31)], "ending": bool}
        return cls(**parse(file.read(), shape) or {})

    def is_ending(self) -> bool:
        """Return whether the owner is ending, or its mpirun has ended, which is visible on the same
        host only.
        """
        return self.ending or (
            self.host == socket.gethostname() and not all(map(mpi.is_starter, self.starters))
        )


def require(file: pathlib.Path, stream: IO[Any]) -> None:
    """Raise RunFailed if a file of the run directory was removed, or is no longer the one that
    `stream` writes to.
    """
    try:
        if os.path.samestat(file.stat(), os.fstat(stream.fileno())):
            return
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:  # a file system that does not answer proves nothing
        return
    raise RunFailed(
        f"run_dir: {str(file)!r} was removed or replaced while the run was going on, so what is recorded or saved from "
        "here on would be lost; leave a run's directory alone until its end"
    )


def not_ours(directory: pathlib.Path, overwrite: bool) -> str | None:
    """Return an error message if the directory has files that look like a run's, but were not
    written by jaxdp.

    overwrite: a run that ended before it wrote env.json does not count either.
    """
    if not overwrite and (directory / ".nonce").exists():
        return None
    if "jaxdp" in entry(directory / "env.json", "versions", set, ()):
        return None
    if not (files := _written(directory)):
        return None
    return (
        f"run_dir: {str(directory)!r} is not the directory of a run of jaxdp (its env.json does not say so), but has "
        f"{files[0].name!r}, which a run would replace; choose another"
    )


def clear(directory: pathlib.Path) -> str | None:
    """Remove the files that a run wrote, and no others. Return an error message or None."""
    try:
        for path in _written(directory):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        return (
            f"run_dir: cannot overwrite {str(error.filename)!r}: {error.strerror}; choose another"
        )
    return None


def _written(directory: pathlib.Path) -> list[pathlib.Path]:
    paths = [path for pattern in WRITTEN for path in sorted(directory.glob(pattern))]
    return [
        path
        for path in paths
        if path.parent.name != "checkpoints" or CHECKPOINT.fullmatch(path.name)
    ]


def write_config(directory: pathlib.Path, config: dict[str, Any]) -> None:
    write(directory / "config.yaml", dump(config))


def write_env(directory: pathlib.Path, facts: dict[str, Any]) -> None:
    """Write env.json: time of the first start, versions, and `facts` (devices, topology, launcher)."""
    facts = {
        "began": began(directory),
        "versions": versions(),
        "platform": platform.platform(),
        "argv": sys.argv,
        "folder": os.getcwd(),
        **facts,
    }
    write(directory / "env.json", json.dumps(facts, indent=2) + "\n")


def entry(file: pathlib.Path, name: str, kind: Callable[[Any], T], default: U) -> T | U:
    """Return an entry of a JSON file in the type `kind`; `default` if it has none, or cannot be
    read.
    """
    try:
        return kind(json.loads(file.read_text(encoding="utf-8"))[name])
    except (OSError, ValueError, KeyError, TypeError):
        return default


def folder(directory: pathlib.Path) -> str | None:
    """Return the working directory of the run's last start, to which relative paths in its config
    belong; None for a run of an earlier version.
    """
    return entry(directory / "env.json", "folder", str, None)


def inside(folder: str | None) -> AbstractContextManager[None]:
    """Return a context in which `folder` is the working directory; print a line if it does not
    exist here.
    """
    if folder is None or folder == os.getcwd():
        return contextlib.nullcontext()
    if os.path.isdir(folder):
        return contextlib.chdir(folder)
    text = f"the run was started in {folder!r}, which does not exist here: relative paths of its config are taken from"
    sys.stderr.write(f"jaxdp: {text} {os.getcwd()!r}\n")
    return contextlib.nullcontext()


def began(directory: pathlib.Path) -> float:
    """Return the time of the run's first start, in seconds since the epoch; the current time if
    unknown.
    """
    return entry(directory / "env.json", "began", float, time.time())


def write_layout(directory: pathlib.Path, facts: dict[str, Any]) -> None:
    """Write layout.json: memory per device, and the communication of an update."""
    write(directory / "layout.json", json.dumps(facts, indent=2) + "\n")


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that affect the results."""
    return {
        "python": platform.python_version(),
        "jaxdp": __version__,
        **{p: installed(p) for p in PACKAGES},
    }


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def replaced(
    file: pathlib.Path, durable: bool = False, private: bool = False
) -> Iterator[pathlib.Path]:
    """Replace a file atomically: yield a path to write to, which then gets its name; remove it if
    writing fails.

    A link is replaced too, and not followed. durable: flush the new file to disk first. private:
    only this user may read it.
    """
    new = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        new.unlink(missing_ok=True)
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666))
        yield new
        if durable:
            flush(new)
        new.replace(file)
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def flush(path: pathlib.Path) -> None:
    """Flush a file or directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(file: pathlib.Path, text: str) -> None:
    """Replace a file of the run; if the disk is full, keep that of an earlier start, or raise
    UsageError.
    """
    try:
        with replaced(file) as new:
            new.write_text(text, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        if not file.is_file():
            raise UsageError(cannot_write(file.parent, error)) from None
