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
from jaxdp.doctor.resources import check_missing, existing, marker
from jaxdp.errors import install
from jaxdp.process import hosts
from jaxdp.process.mpi import waits_until_every_rank_calls_mpi_init

SILENT = "it ended by itself"
MPI_INIT = failure(
    "ranks", "MPI_Init waits until every rank calls it", "see what every rank printed"
)
# the most useful line of standard error: jaxdp's, XLA's fatal one, an exception's, else the last
MESSAGES = (
    r"^jaxdp: (?:rank \d+ \(host \S+\) ends: )?(.+)",
    r"^F\d{4} .*?\] (.+)",
    r"^((?:[\w.]*(?:Error|Exception)|Fatal Python error): .+)",
    r"(\S.*)\s*\Z",
)
CAUSES = (  # a pattern in "stage: error", and the fix
    ("XLA_FLAGS", "remove the flag: this jaxlib does not know it"),
    (
        "RESOURCE_EXHAUSTED|out of memory",
        "see nvidia-smi for programs that use the GPU's memory, and end them",
    ),
    (
        "JAX_PLATFORMS|initialize backend",
        f"unset JAX_PLATFORMS; for an NVIDIA GPU: {install('cuda12')}",
    ),
    ("", "see the lines on versions, gpu, host name, network and bindings"),
)


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
    stage, how = Stage("checks", 2 * LIMIT, [], 0, [hosts.hostname()]), ""
    with tempfile.TemporaryFile() as errors:
        process = context.Process(target=run_quietly, args=(work, sender.send, errors.fileno()))
        process.start()
        sender.close()
        while stage.name and not how:
            if not receiver.poll(stage.seconds):
                process.kill()
                how = f"no answer within {stage.seconds:g} s"
                break
            try:
                stage = receiver.recv()
            except EOFError:
                process.join()
                code = process.exitcode or 0
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else SILENT
        process.join(2.0)
        process.kill()
        receiver.close()
        errors.seek(0)
        printed = errors.read().decode(errors="replace")
    return stage, problem(stage.name, how, printed) if how else None


def run_quietly(work: Work, send: Send, errors: int) -> None:
    """Run `work`. What it and its libraries print, and its exception, go to a file descriptor."""
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "1"}
    try:
        work(send)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # of a job, once it is joined: its other ranks end, too
        os._exit(1)


def problem(stage: str, how: str, printed: str) -> Check:
    """Return the failure of the process, from what it printed."""
    if waits_until_every_rank_calls_mpi_init.__name__ in printed:  # in the traceback of a deadline
        return MPI_INIT
    error = how
    for pattern in MESSAGES:
        if match := re.search(pattern, printed, re.MULTILINE):
            # no traceback's last line
            if match[0].startswith("jaxdp: ") and " failed: " not in match[1]:
                return of_text(stage, match[1])
            error = f"{how}: {match[1][:400]}"
            break
    fix = next(fix for pattern, fix in CAUSES if re.search(pattern, f"{stage}: {error}"))
    return failure(stage, error, fix)


def examine(directory: pathlib.Path) -> tuple[list[Check], list[str]] | None:
    """Run all checks; return all ranks' findings and hosts on rank 0, None on the others.
    directory: of the run.
    """
    work = functools.partial(job.run, directory, os.getppid())
    (name, _, checks, rank, names), failed = follow(work)
    if failed and not (rank and failed.found == SILENT):  # rank 0 prints that error
        checks.append(failed)
    if name in ("checks", "imports", "ranks"):  # it has not joined the others
        checks = [check._replace(ranks=(rank,)) for check in checks]
        bad = [check for check in checks if check.status != OK]
        if rank and bad:
            sys.stderr.write(f"{as_text(bad, names)}\n")
        if rank == 0 and failed is MPI_INIT:
            checks += check_missing(directory, len(names))
        if len(names) > 1:
            # rank 0 looks for markers, and ends after the others have printed
            time.sleep(2.0 if rank else 1.0)
    for file in existing(directory).glob(marker(directory, "*" if rank == 0 else str(rank)).name):
        file.unlink(missing_ok=True)
    return None if rank else (checks, names)
