"""The run directory is shared by all processes and says what ran, with which versions, and how it went."""

import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import secrets
import socket
import sys
import time
from typing import IO, Any

import yaml

PACKAGES = ("jaxdp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "mpi4py")


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

    A POSIX lock: the kernel drops it with the process, NFS passes it on, and a forked child does not inherit it.
    """
    file = (directory / ".lock").open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        return None, f"run_dir: {str(directory)!r} is in use by {owner}; wait for its end, or choose another --run_dir"
    except OSError:  # a file system without locks
        return file, None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file, None


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
    return {"python": platform.python_version(), **{p: _version(p) for p in PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _replace(file: pathlib.Path, text: str) -> None:
    new = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    new.write_text(text)
    new.replace(file)
