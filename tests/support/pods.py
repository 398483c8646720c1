"""Processes in namespaces of their own: with the host name of a pod, or as a user without a name."""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from launch import ROOT, environment


def run_in(namespace: Sequence[str], code: str, env: Mapping[str, str | None] | None = None) -> str:
    """Run Python code in a namespace that `namespace` makes; return what it printed. Skip the test
    where there are no such namespaces."""
    if (
        shutil.which(namespace[0]) is None
        or subprocess.run([*namespace, "true"], capture_output=True).returncode
    ):
        pytest.skip(f"not permitted here: {' '.join(namespace[:3])}")
    done = subprocess.run(
        [*namespace, sys.executable, "-c", code],
        env=environment(env, 1) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_in_pod(folder: Path, name: str, hosts: str, code: str) -> str:
    """Run Python code on a host of this name, whose /etc/hosts has these lines."""
    (folder / "hosts").write_text(f"{hosts}\n")
    words = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
    new = ["unshare", "--map-root-user", "--uts", "--mount"]
    return run_in([*new, "sh", "-c", words, name, str(folder / "hosts")], code)
