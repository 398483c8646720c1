"""Examine a machine or a job: check this process's machine, and follow a process that joins the job and checks it."""

import contextlib
import functools
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from jaxdp import rundir
from jaxdp.distributed import hosts, launchers
from jaxdp.distributed.mpi import waits_until_every_rank_calls_mpi_init
from jaxdp.distributed.world import MPI
from jaxdp.doctor import bindings, devices, mpi, network, resources, settings, versions
from jaxdp.doctor.check import LIMIT, OK, Check, Checker, Line, failure, of_text, ok, run_checks
from jaxdp.doctor.report import Examined
from jaxdp.errors import UsageError

# A running job keeps its memory.
QUIET = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "1"}
SILENT = "it ended by itself"
MPI_INIT = failure(
    "ranks",
    "MPI_Init waits until every rank calls it",
    "see whether every rank was started, what it printed, and the line on mpi4py",
)
MESSAGES = (  # the most useful line of standard error: jaxdp's, XLA's fatal one, an exception's, else the last
    r"^jaxdp: (?:rank \d+ \(host \S+\) ends: )?(.+)",
    r"^F\d{4} .*?\] (.+)",
    r"^((?:[\w.]*(?:Error|Exception)|Fatal Python error): .+)",
    r"(\S.*)\s*\Z",
)
CAUSES = (  # a pattern in "stage: error", and the fix
    ("XLA_FLAGS", "remove the flag: this jaxlib does not know it"),
    ("RESOURCE_EXHAUSTED|out of memory", "see nvidia-smi for programs that use the GPU's memory, and end them"),
    ("JAX_PLATFORMS|initialize backend", "unset JAX_PLATFORMS; for an NVIDIA GPU: pip install 'jaxdp-trainer[cuda12]'"),
    ("^imports", "see the lines on versions; pip install -U jaxdp-trainer, in a fresh environment"),
    ("", "see the lines on versions, driver and plug-in; of several processes, on host name, network and bindings"),
)


class Job:
    """The process `jaxdp.doctor.job`: what it may join, open or load can block or kill it.

    stage: the last one it started. lines: its findings before that stage. hosts: the names of the ranks' hosts.
    """

    def __init__(self, directory: pathlib.Path, timeout: float):
        self.stage, self.lines, self.hosts = "imports", list[Line](), list[str]()
        self.printed = deque[str](maxlen=400)  # lines of standard error
        self.messages = queue.Queue[str]()  # lines of standard output; "" at its end
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxdp.doctor.job", str(directory)],
            env={**os.environ, **QUIET, "JAXDP_TIMEOUT": str(timeout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=False,  # MPICH's mpirun talks to its ranks through a file descriptor that they inherit
            text=True,
            errors="replace",
        )
        for stream, use in ((self.process.stdout, self.messages.put), (self.process.stderr, self.printed.append)):
            threading.Thread(target=lambda s=stream, u=use: [*map(u, s), u("")], daemon=True).start()

    def follow(self, report: dict[str, Any]) -> Check | None:
        """Send this rank's findings and facts, and follow the process to its end; return how it failed."""
        with contextlib.suppress(OSError):  # it has ended
            print(json.dumps(report), file=self.process.stdin, flush=True)
        seconds = LIMIT
        while self.stage:
            try:
                text = self.messages.get(timeout=seconds)
            except queue.Empty:
                self.process.kill()
                return self.problem(f"no answer within {seconds:g} s")
            if not text:
                code = self.process.wait()
                return self.problem(f"killed by {signal.Signals(-code).name}" if code < 0 else SILENT)
            with contextlib.suppress(ValueError):  # printed by a library
                self.stage, seconds, lines, self.hosts = json.loads(text)
                self.lines = [(Check(*check), tuple(ranks)) for check, ranks in lines]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        self.process.kill()
        return None

    def problem(self, how: str) -> Check:
        """Return the failure of this process, from what it printed."""
        time.sleep(0.2)  # for the last lines
        text = "".join(self.printed.copy())
        if waits_until_every_rank_calls_mpi_init.__name__ in text:  # in the traceback of a deadline
            return MPI_INIT
        match = next(filter(None, (re.search(pattern, text, re.MULTILINE) for pattern in MESSAGES)), None)
        if match and match[0].startswith("jaxdp: "):
            return of_text(self.stage, match[1])
        error = f"{how}: {match[1][:400]}" if match else how
        return failure(self.stage, error, next(fix for p, fix in CAUSES if re.search(p, f"{self.stage}: {error}")))


def examine(
    directory: pathlib.Path, needed: Callable[[], int] | None = None, cache: str | None = "auto"
) -> Examined | None:
    """Run all checks of every rank; return None on ranks whose findings rank 0 has. Always ends, and never raises.

    directory: where checkpoints would go. needed: returns the bytes of one. cache: `compilation_cache` of the config.
    """
    world, checks, timeout = None, list[Check](), 30.0
    with contextlib.suppress(ValueError):
        timeout = max(1.0, float(os.environ.get("JAXDP_TIMEOUT") or timeout))
    job = Job(directory, timeout)
    try:
        world = launchers.discover()
        text = "a single process" if world.launcher == "none" else f"{world.launcher}, {world.size} processes"
        checks.append(ok("launcher", text))
    except UsageError as error:
        checks.append(of_text("launcher", str(error)))
    rank, size, launcher = (world.rank, world.size, world.launcher) if world else (0, 1, "")
    marker = resources.Marker(directory, rank)
    local: dict[str, Checker] = {
        "versions": versions.check_versions,
        "environment": functools.partial(settings.check_settings, size),
        "gpu": devices.check_gpus,
        "open files": functools.partial(resources.check_limits, size),
        "memory": resources.check_memory,
        "shared memory": functools.partial(resources.check_shared_memory, (world and world.local_size) or 1),
        "run_dir": functools.partial(resources.check_run_dir, directory, needed),
        "temporary files": resources.check_temporary,
        "compilation cache": functools.partial(resources.check_cache, cache),
        "host name": network.check_name,
        "port": functools.partial(network.check_port, world),
    }
    if size > 1:
        local["marker"] = marker.write
    if size == 1 or launcher in MPI:
        local["mpirun"] = functools.partial(mpi.check_mpirun, launcher in MPI)
    checks += run_checks(local)
    facts = {**hosts.identity(), "outward": hosts.outward(), **bindings.read_cores(), "versions": rundir.versions()}
    report = {"rank": rank, "join": world is not None, "timeout": timeout, "checks": checks}
    problem = job.follow({**report, "facts": {**facts, "marker": marker.text}})
    lines = job.lines or [(check, (rank,)) for check in checks]
    names = dict(enumerate(job.hosts)) or {rank: hosts.hostname()}
    joined = job.stage not in ("imports", "ranks")
    if problem and not (rank and problem.found == SILENT):  # rank 0 prints that error
        lines.append((problem, () if joined else (rank,)))
    if rank == 0 and problem is MPI_INIT:
        lines += [(check, ()) for check in marker.check_missing(size)]
    marker.remove(wait=not joined)
    if rank == 0:
        return Examined(lines, size, names)
    lines = [line for line in lines if line[0].status != OK]
    return None if joined or not lines else Examined(lines, size, names, stray=True)
