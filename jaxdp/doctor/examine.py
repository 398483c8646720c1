"""Examine a machine or a job: start a process that joins the job and checks it, and follow that
process to its end.
"""

import contextlib
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from jaxdp.doctor.findings import LIMIT, OK, Check, as_text, failure, of_text
from jaxdp.doctor.resources import check_missing, existing, marker
from jaxdp.errors import install
from jaxdp.process import hosts, imports
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


class Stage(NamedTuple):
    """What the process `jaxdp.doctor.job` wrote last. name: what it does, for at most `seconds`; ""
    at its end.
    """

    name: str
    seconds: float
    checks: list[Check]
    rank: int
    hosts: list[str]


def follow(command: list[str]) -> tuple[Stage, Check | None]:
    """Follow a process to its end: what it opens may block or kill it. Return its last stage, and
    how it failed.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            env={
                **imports.for_module(),
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                "TF_CPP_MIN_LOG_LEVEL": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            # MPICH's mpirun talks to its ranks through a file descriptor that they inherit
            close_fds=False,
        )
        stages = process.stdout
        assert stages is not None
        stage, how, rest = Stage("checks", 2 * LIMIT, [], 0, [hosts.hostname()]), "", b""
        while stage.name and not how:
            if not select.select([stages], [], [], stage.seconds)[0]:
                process.kill()
                how = f"no answer within {stage.seconds:g} s"
            elif text := os.read(
                stages.fileno(), 1 << 16
            ):  # not a whole line, for the rest of which it might wait
                *lines, rest = (rest + text).split(b"\n")
                for line in lines:
                    with contextlib.suppress(ValueError, TypeError):  # printed by a library
                        name, seconds, checks, *job = json.loads(line)
                        stage = Stage(name, seconds, [Check(*check) for check in checks], *job)
            else:
                code = process.wait()
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else SILENT
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        stages.close()
        errors.seek(0)
        printed = errors.read().decode(errors="replace")
    return stage, problem(stage.name, how, printed) if how else None


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
    command = [sys.executable, "-P", "-m", "jaxdp.doctor.job", str(directory), str(os.getppid())]
    (name, _, checks, rank, names), failed = follow(command)
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
