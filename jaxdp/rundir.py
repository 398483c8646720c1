"""The run directory is shared by all processes and says what ran, with which versions, and how it went."""

import importlib.metadata
import json
import os
import pathlib
import platform
import secrets
import sys
import time
from typing import Any

import yaml

from jaxdp.errors import UsageError, one_line

PACKAGES = ("jaxdp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "mpi4py")


def make(directory: pathlib.Path) -> str | None:
    """Makes the directory and a nonce in it; returns what is wrong, or None."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "checkpoints").mkdir(exist_ok=True)
        (directory / ".nonce").write_text(secrets.token_hex(16))
    except OSError as error:
        return f"run_dir: cannot write in {str(directory)!r}: {error.strerror}; choose another with --run_dir"
    return None


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


def saved_config(directory: pathlib.Path) -> dict[str, Any]:
    """The config of the run that is there; UsageError where it is missing or no config."""
    file = directory / "config.yaml"
    try:
        saved = yaml.safe_load(file.read_text())
        problem = None if isinstance(saved, dict) else "it is no mapping"
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = one_line(error)
    if problem:
        raise UsageError(
            f"run_dir: {str(directory)!r} has checkpoints, but its config.yaml cannot be read ({problem}), so nobody "
            "can tell whether they are of this config; put it back, or choose another --run_dir"
        )
    return saved


def write_config(directory: pathlib.Path, config: dict[str, Any]) -> None:
    _replace(directory / "config.yaml", yaml.safe_dump(config, sort_keys=False))


def write_env(directory: pathlib.Path, facts: dict[str, Any]) -> None:
    """env.json: versions, and the facts given (devices, topology, launcher)."""
    env = {
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in PACKAGES}},
        "platform": platform.platform(),
        "argv": sys.argv,
        **facts,
    }
    _replace(directory / "env.json", json.dumps(env, indent=2) + "\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _replace(file: pathlib.Path, text: str) -> None:
    new = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    new.write_text(text)
    new.replace(file)
