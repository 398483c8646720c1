"""Check that mpirun and the library that mpi4py loads are of one MPI: otherwise each rank believes that it is alone."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxdp.distributed import mpi
from jaxdp.distributed.world import World
from jaxdp.doctor.check import Check, failure, of_error, ok, warning
from jaxdp.doctor.probe import Ended, Probe
from jaxdp.doctor.versions import installed
from jaxdp.errors import ReportedError

INSTALL = "pip install 'jaxdp-trainer[mpi]'"
FLAVOURS = (  # what `mpirun --version`, or a library, prints
    ("openmpi", r"(?:Open MPI\)?|OpenRTE\)|prte|PRRTE\)?)[ :v]*(\d+\.\d+[.\w]*)"),
    ("hydra", r"HYDRA build details:\s+Version:\s*(\d+\.\d+[.\w]*)"),
    ("hydra", r"MPICH Version:\s*(\d+\.\d+[.\w]*)"),
    ("hydra", r"Intel\(R\) MPI Library.*?(\d{4}[.\w]*)"),
)
CAUSES = (  # of a probe's error: a text in it, the fix
    ("waits until", "see whether every rank was started, and what it printed"),
    ("ModuleNotFoundError", INSTALL),
    ("", "put the mpirun that belongs to mpi4py's library first on PATH, or set MPI4PY_LIBMPI to mpirun's own"),
)


def flavour(text: str) -> tuple[str, str]:
    """Return (launcher, version) of an MPI from its version text; ("", "") for an unknown one."""
    for launcher, pattern in FLAVOURS:
        if match := re.search(pattern, text, re.DOTALL):
            return launcher, match[1]
    return "", ""


def version_text(mpirun: str) -> str:
    """Return what `mpirun --version` prints. Raises OSError or SubprocessError."""
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=8, stdin=subprocess.DEVNULL)
    return f"{done.stdout}{done.stderr}"


def title(launcher: str) -> str:
    return mpi.FAMILY[launcher].partition(" or Intel")[0]


def fits(launcher: str, version: str, library: str) -> bool:
    """Return whether the library belongs to that mpirun.

    Releases of one major version of Open MPI work together, and so do MPICH, Intel MPI and all of their releases.
    """
    loaded, number = flavour(library)
    return loaded == launcher and (launcher != "openmpi" or number.split(".")[0] == version.split(".")[0])


def check_mpirun(env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Check the mpirun on PATH against mpi4py's library, in a process without a launcher."""
    path, package = shutil.which("mpirun") or shutil.which("mpiexec"), installed("mpi4py")
    if path is None:
        if package is None:
            yield ok("mpirun", "no MPI here; several processes need mpirun, srun, torchrun or JAXDP_COORDINATOR")
        else:
            yield warning("mpirun", "mpi4py is installed, but no mpirun is on PATH", f"{INSTALL}, or set PATH")
        return
    try:
        text = version_text(path)
    except (OSError, subprocess.SubprocessError) as error:
        yield failure("mpirun", f"{path} does not run: {error}", f"{INSTALL}, or put another mpirun first on PATH")
        return
    launcher, version = flavour(text)
    if not launcher:
        text = f"{path} is neither Open MPI nor MPICH: {text.strip().splitlines()[:1]}"
        yield warning("mpirun", text, "give ranks by JAXDP_COORDINATOR, JAXDP_NUM_PROCESSES and JAXDP_PROCESS_ID")
        return
    yield ok("mpirun", f"{title(launcher)} {version}, {path}")
    prefix = "PRTE" if int(version.split(".")[0]) >= 5 else "OMPI"
    allow = [f"{prefix}_ALLOW_RUN_AS_ROOT", f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"]
    if launcher == "openmpi" and os.geteuid() == 0 and not all(map(env.get, allow)):
        fix = f"--allow-run-as-root, or set {' '.join(f'{name}=1' for name in allow)}"
        yield warning("mpirun", "Open MPI's mpirun refuses to be started by root, which this is", fix)
    if package is None:
        yield warning("mpi4py", "not installed: ranks under mpirun could not meet", INSTALL)
    else:
        yield load(World(0, 1, launcher=launcher), path, version)[1]


def meet(world: World, own: dict[str, Any], timeout: float) -> tuple[list[dict[str, Any]], list[Check]]:
    """Exchange facts through MPI: return (those of every rank, or none if that fails, and the findings)."""
    starters = [exe for _, exe in mpi.ancestors() if exe.name in mpi.STARTERS]
    beside = [p for exe in starters[:1] for p in (exe.with_name("mpirun"), exe) if p.exists()]
    path, version = str(beside[0]) if beside else shutil.which("mpirun") or "", ""
    if Path(path).name in ("mpirun", "mpiexec"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            version = flavour(version_text(path))[1]
    launched = f"{title(world.launcher)} {version}".strip()
    facts, check = load(world, path, version, own, timeout)
    return facts, [ok("mpirun", f"{launched}{f', {path}' if path else ''}; it started {world.size} processes"), check]


def load(
    world: World, path: str, version: str, own: dict[str, Any] | None = None, timeout: float = 10.0
) -> tuple[list[dict[str, Any]], Check]:
    """Load MPI as a run does, in a probe: return (the facts of every rank, the finding).

    path, version: of mpirun; "" if not known. own: this rank's facts, to exchange; None: only load the library.
    """
    facts: list[dict[str, Any]] = []
    probe = Probe("mpi")
    try:
        library = probe.ask("library", timeout, launcher=world.launcher)
        if own is not None:
            ranks = [world.rank, world.size, world.local_rank, world.local_size, world.launcher]
            facts = probe.ask("exchange", timeout + 5, world=ranks, own=own, timeout=timeout)
    except ReportedError as error:
        return [], of_error("mpi4py", error)
    except Ended as error:
        return [], failure("mpi4py", str(error), next(fix for cause, fix in CAUSES if cause in str(error)))
    finally:
        probe.close()
    seen = f"; it sees {world.size} processes" if facts else ""
    if not version or fits(world.launcher, version, library):
        return facts, ok("mpi4py", f"loads {library}{seen}")
    text = f"mpi4py loads {library!r}, but {path} is {title(world.launcher)} {version}"
    fix = f"put that library's mpirun first on PATH, or set MPI4PY_LIBMPI to mpirun's own {mpi.LIBRARY[world.launcher]}"
    if facts:
        return facts, warning("mpi4py", f"{text}{seen}", fix)
    return facts, failure("mpi4py", f"{text}: each rank may believe that it is alone", fix)
