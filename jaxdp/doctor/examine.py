"""Examine a machine or a job: start a process that joins the job and checks it, and follow that
process to its end.
"""

import functools
import multiprocessing
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable

from jaxdp.doctor import job
from jaxdp.doctor.findings import LIMIT, OK, Check, Stage, as_text, failure, of_text
from jaxdp.errors import install
from jaxdp.process import hosts, launchers
from jaxdp.process.mpi import waits_until_every_rank_calls_mpi_init

SILENT = "it ended by itself"
MPI_INIT = failure(
    "ranks",
    "MPI_Init waits until every rank calls it",
    "see what every rank printed: one that does not print this line was not started, or hangs",
)
# The last line of a run, but not of a traceback.
ENDS = r"^jaxdp: (?:rank \d+ \(host \S+\) ends: )?((?!.* failed: ).+)"
# The most useful line of others: XLA's fatal one, or an exception's.
FAILS = r"^(?:F\d{4} .*?\] |(?=(?:[\w.]*(?:Error|Exception)|Fatal Python error): ))(.+)"
CAUSES = {  # a pattern in an error, and the fix
    "XLA_FLAGS": "remove the flag: this jaxlib does not know it",
    "RESOURCE_EXHAUSTED|out of memory": (
        "see nvidia-smi for programs that use the GPU's memory, and end them"
    ),
    "JAX_PLATFORMS|initialize backend": (
        f"unset JAX_PLATFORMS; for an NVIDIA GPU: {install('cuda12')}"
    ),
    "": "see the lines on versions, gpu, network and bindings",
}


Send = Callable[[Stage], None]
Work = Callable[[Send], None]
"""What an examination does in its process. It sends each stage before it begins."""


def follow(work: Work) -> tuple[Stage, Check | None]:
    """Run `work` in a process, and follow it to its end: what it opens may block or kill it. Return
    its last stage, and how it failed.
    """
    # A child of fork keeps the file descriptor through which MPICH's mpirun talks to its ranks.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    stage, how = Stage("checks", 2 * LIMIT, [], [hosts.hostname()]), ""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = context.Process(target=run_quietly, args=(work, sender.send, errors.fileno()))
        process.start()
        sender.close()
        try:
            while stage.name and not how:
                if receiver.poll(stage.seconds):
                    stage = receiver.recv()
                else:
                    how = f"no answer within {stage.seconds:g} s"
        except EOFError:
            process.join()
            code = process.exitcode or 0
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else SILENT
        process.join(2.0)
        process.kill()
        errors.seek(0)
        return stage, problem(stage.name, how, errors.read()) if how else None


def run_quietly(work: Work, send: Send, errors: int) -> None:
    """Run `work`. What it and its libraries print, and its exception, go to a file descriptor."""
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    try:
        work(send)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # of a job, once it is joined: its other ranks end, too
        os._exit(1)


def problem(stage: str, how: str, printed: str) -> Check:
    """Return the failure of the process, from what it printed."""
    if waits_until_every_rank_calls_mpi_init.__name__ in printed:  # in the traceback of a deadline
        return MPI_INIT
    if match := re.search(ENDS, printed, re.MULTILINE):
        return of_text(stage, match[1])
    lines = re.findall(FAILS, printed, re.MULTILINE) or printed.strip().splitlines()[-1:]
    error = ": ".join([how, *lines[:1]])[:400]
    fix = next(fix for pattern, fix in CAUSES.items() if re.search(pattern, error))
    return failure(stage, error, fix)


def examine(directory: pathlib.Path) -> tuple[list[Check], list[str]] | None:
    """Run all checks; return all ranks' findings and hosts on rank 0, None on the others. Raises
    UsageError if the launcher's variables, or JAXDP_TIMEOUT, are wrong. directory: of the run.
    """
    world = launchers.discover()
    timeout = launchers.seconds_of("JAXDP_TIMEOUT", 30.0)
    available = len(os.sched_getaffinity(os.getppid()))
    work = functools.partial(job.run, world, timeout, directory, available)
    (name, _, checks, names), failed = follow(work)
    if failed and not (world.rank and failed.found == SILENT):  # rank 0 prints that error
        checks.append(failed)
    if name not in ("all-reduce", ""):  # it has not sent its findings to the others
        checks = [check._replace(ranks=(world.rank,)) for check in checks]
        bad = [check for check in checks if check.status != OK]
        if world.rank and bad:
            sys.stderr.write(f"{as_text(bad, names)}\n")
        if world.size > 1:
            # rank 0, with which mpirun ends the others, lets them print first
            time.sleep(2.0 if world.rank else 1.0)
    return None if world.rank else (checks, names)
