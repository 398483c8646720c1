"""Examine a machine or a job: start a process that joins the job and checks it, and follow that process to its end."""

import contextlib
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

from jaxdp.distributed import hosts
from jaxdp.distributed.mpi import waits_until_every_rank_calls_mpi_init
from jaxdp.doctor.check import LIMIT, OK, Check, Examined, Line, as_text, failure, of_text
from jaxdp.doctor.resources import check_missing, existing, marker

SILENT = "it ended by itself"
MPI_INIT = failure(
    "ranks", "MPI_Init waits until every rank calls it", "see what every rank printed, if it was started"
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
    ("", "see the lines on versions, gpu, host name, network and bindings"),
)


class Job:
    """The process `jaxdp.doctor.job`, in a stage, and its findings before that: what it opens may block or kill it."""

    def __init__(self, directory: pathlib.Path):
        self.stage, self.lines = "checks", list[Line]()
        self.rank, self.size, self.hosts = 0, 1, {0: hosts.hostname()}
        self.printed = deque[str](maxlen=400)  # lines of standard error
        self.messages = queue.Queue[str]()  # lines of standard output; "" at its end
        options = {"directory": str(directory), "launcher": os.getppid()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxdp.doctor.job", json.dumps(options)],
            env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=False,  # MPICH's mpirun talks to its ranks through a file descriptor that they inherit
            text=True,
            errors="replace",
        )
        for stream, use in ((self.process.stdout, self.messages.put), (self.process.stderr, self.printed.append)):
            threading.Thread(target=lambda s=stream, u=use: [*map(u, s), u("")], daemon=True).start()

    def follow(self) -> Check | None:
        """Follow the process to its end, and return how it failed."""
        seconds = 2 * LIMIT
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
                self.stage, seconds, lines, self.rank, self.size, names = json.loads(text)
                self.lines = [(Check(*check), tuple(ranks)) for check, ranks in lines]
                self.hosts = {int(rank): name for rank, name in names.items()}
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        return None

    def problem(self, how: str) -> Check:
        """Return the failure of the process, from what it printed."""
        time.sleep(0.2)  # for the last lines
        text = "".join(self.printed.copy())
        if waits_until_every_rank_calls_mpi_init.__name__ in text:  # in the traceback of a deadline
            return MPI_INIT
        match = next(filter(None, (re.search(pattern, text, re.MULTILINE) for pattern in MESSAGES)), None)
        if match and match[0].startswith("jaxdp: ") and " failed: " not in match[1]:  # no traceback's last line
            return of_text(self.stage, match[1])
        error = f"{how}: {match[1][:400]}" if match else how
        return failure(self.stage, error, next(fix for p, fix in CAUSES if re.search(p, f"{self.stage}: {error}")))


def examine(directory: pathlib.Path) -> Examined | None:
    """Run all checks, and return the findings of all ranks on rank 0, None on the others. directory: of the run."""
    job = Job(directory)
    problem = job.follow()
    rank, joined = job.rank, job.stage not in ("checks", "imports", "ranks")
    if problem and not (rank and problem.found == SILENT):  # rank 0 prints that error
        job.lines.append((problem, () if joined else (rank,)))
    if rank == 0 and problem is MPI_INIT:
        job.lines += [(check, ()) for check in check_missing(directory, job.size)]
    bad = [line for line in job.lines if line[0].status != OK]
    if rank and bad and not joined:
        sys.stderr.write(f"{as_text(Examined(bad, job.size, job.hosts))}\n")
    if job.size > 1 and not joined:
        time.sleep(2.0 if rank else 1.0)  # rank 0 looks for markers, and ends after the others have printed
    for file in existing(directory).glob(marker(directory, "*" if rank == 0 else str(rank)).name):
        file.unlink(missing_ok=True)
    names = [check.name for check, _ in job.lines]
    job.lines.sort(key=lambda line: names.index(line[0].name))  # those of one name side by side
    return None if rank else Examined(job.lines, job.size, job.hosts)
