"""The run directory is shared by all processes and says what ran, with which versions, and how it went."""

import contextlib
import dataclasses
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
from collections.abc import Sequence
from typing import IO, Any

import yaml

from jaxdp import __version__
from jaxdp.distributed import mpi
from jaxdp.distributed.messages import parse
from jaxdp.errors import RunFailed

WAIT = 50.0  # seconds for a process that is ending to let go of the run directory; other ranks wait for 60
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "mpi4py")

# What a run writes, as patterns; env.json, by which the directory is known to be a run's, is last.
WRITTEN = (
    *(
        "checkpoints/[0-9]*",
        "metrics.jsonl",
        "events.jsonl",
        "config.yaml",
        "layout.json",
        "report.html",
        "halted.json",
    ),
    *("wandb_id", "tensorboard/events.out.tfevents.*", "profile/plugins", "stacks/rank_*.txt", "env.json"),
)
# In `checkpoints`, what a user has there by another name is not ours, such as 100-backup.
CHECKPOINT = re.compile(r"\d+(\.(orbax-checkpoint-tmp|pruned|damaged|unfinished).*)?")

_owner: "tuple[IO[str], Owner] | None" = None  # of the lock that this process holds


def make(directory: pathlib.Path) -> tuple[IO[str] | None, str | None]:
    """Makes the directory, takes it for this process, and leaves a nonce in it: (what to hold on to, what is wrong)."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "checkpoints").mkdir(exist_ok=True)
        held, problem = lock(directory)
        if not problem:
            (directory / ".nonce").write_text(secrets.token_hex(16))
    except OSError as error:
        return None, f"run_dir: cannot write in {str(directory)!r}: {error.strerror}; choose another with --run_dir"
    return held, problem


def nonce(directory: pathlib.Path) -> str:
    return (directory / ".nonce").read_text()


def is_shared(directory: pathlib.Path, nonce: str, timeout: float = 10.0) -> str | None:
    """Waits for rank 0's nonce to show up here (network file systems lag); returns what is wrong, or None."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if (directory / ".nonce").read_text() == nonce:
                return None
        except OSError:
            pass
        time.sleep(0.05)
    return (
        f"run_dir: {str(directory)!r} is not the directory that rank 0 writes to; use one on a file system that all "
        "hosts share"
    )


def lock(directory: pathlib.Path) -> tuple[IO[str] | None, str | None]:
    """Takes the directory for this process, as long as it lives: (what to hold on to, None) or (None, what is wrong).

    A POSIX lock: the kernel drops it with the process, NFS passes it on, and a forked child does not inherit it. A
    holder that is ending, or whose launcher has ended, is waited for; any other is refused at once.
    """
    global _owner
    file, deadline, reported = (directory / ".lock").open("a+", errors="replace"), time.monotonic() + WAIT, False
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            owner = Owner.read(file)
            problem = f"run_dir: {str(directory)!r} is in use by {owner.name}"
            if not owner.is_ending() or time.monotonic() > deadline:
                file.close()
                return None, f"{problem}; wait for its end, or choose another --run_dir"
            if not reported:
                sys.stderr.write(f"jaxdp: {problem}, which is ending: waiting for it, {WAIT:g} s at most\n")
            reported = True
            time.sleep(0.2)
        except OSError:  # a file system without locks
            return file, None
    starters = [pid for pid, program in mpi.ancestors() if program.name in mpi.STARTERS]
    name = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    _owner = (file, Owner(name, socket.gethostname(), starters))
    _owner[1].write(file)
    return file, None


def mark_ending() -> None:
    """Write into the run directory's lock, where this process holds one, that it is about to end."""
    if _owner is not None:
        file, owner = _owner
        with contextlib.suppress(OSError, ValueError):  # the directory may be gone, or the file closed
            dataclasses.replace(owner, ending=True).write(file)


@dataclasses.dataclass(frozen=True)
class Owner:
    """The process that holds a run directory, as its lock file tells the next one.

    starters: the processes of mpirun above it, on `host`: without one of them its job is dead.
    """

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
        """Whether it says so, or its mpirun has ended: of another host that cannot be seen from here."""
        return self.ending or (self.host == socket.gethostname() and not all(map(mpi.is_starter, self.starters)))


def require(file: pathlib.Path, stream: IO[Any] | None = None) -> None:
    """Raise RunFailed where a file of the run directory is gone, or is not the one that `stream` writes to."""
    try:
        stat = file.stat()
        if stream is None or os.path.samestat(stat, os.fstat(stream.fileno())):
            return
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:  # a file system that does not answer is no proof
        return
    raise RunFailed(
        f"run_dir: {str(file)!r} was removed or replaced while the run was going on, so what is recorded or saved from "
        "here on would be lost; leave a run's directory alone until its end"
    )


def not_ours(directory: pathlib.Path) -> str | None:
    """Return why the directory may not be overwritten: it has a run's files, but no run of jaxdp wrote them."""
    try:
        if "jaxdp" in json.loads((directory / "env.json").read_text())["versions"]:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if not _written(directory):
        return None
    return (
        f"run_dir: {str(directory)!r} is not the directory of a run of jaxdp (its env.json does not say so), so "
        "overwrite=True leaves it alone; choose another"
    )


def clear(directory: pathlib.Path) -> str | None:
    """Remove what a run wrote in its directory, and nothing else; return what is wrong."""
    try:
        for path in _written(directory):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        return f"run_dir: cannot overwrite {str(error.filename)!r}: {error.strerror}; choose another"
    return None


def _written(directory: pathlib.Path) -> list[pathlib.Path]:
    found = [path for pattern in WRITTEN for path in sorted(directory.glob(pattern))]
    return [path for path in found if path.parent.name != "checkpoints" or CHECKPOINT.fullmatch(path.name)]


def write_config(directory: pathlib.Path, config: dict[str, Any]) -> None:
    _replace(directory / "config.yaml", yaml.safe_dump(config, sort_keys=False))


def write_env(directory: pathlib.Path, facts: dict[str, Any]) -> None:
    """env.json: when the run first began, versions, and the facts given (devices, topology, launcher)."""
    env = {
        "began": began(directory),
        "versions": versions(),
        "platform": platform.platform(),
        "argv": sys.argv,
        **facts,
    }
    _replace(directory / "env.json", json.dumps(env, indent=2) + "\n")


def began(directory: pathlib.Path) -> float:
    """When the run was started for the first time, in seconds since the epoch; now, where that is not known."""
    try:
        return float(json.loads((directory / "env.json").read_text())["began"])
    except (OSError, ValueError, KeyError, TypeError):
        return time.time()


def write_layout(directory: pathlib.Path, facts: dict[str, Any]) -> None:
    """layout.json: what a device holds, and what an update moves between devices."""
    _replace(directory / "layout.json", json.dumps(facts, indent=2) + "\n")


def versions() -> dict[str, str | None]:
    """Of Python and the packages that decide what is computed."""
    return {"python": platform.python_version(), "jaxdp": __version__, **{p: _version(p) for p in PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _replace(file: pathlib.Path, text: str) -> None:
    new = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    new.write_text(text)
    new.replace(file)
