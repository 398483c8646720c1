"""mpirun and mpi4py must be of one MPI, or each rank believes that it is alone."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxdp.distributed import hosts, mpi
from jaxdp.distributed.world import MPI, World
from jaxdp.doctor.check import OK, Check, failure, of_error, ok, warning
from jaxdp.doctor.probe import Ended, Probe
from jaxdp.doctor.versions import installed
from jaxdp.errors import Said

ALLOW_ROOT = [f"{prefix}_ALLOW_RUN_AS_ROOT{end}" for prefix in ("OMPI", "PRTE") for end in ("", "_CONFIRM")]
INSTALL = "pip install 'jaxdp[mpi]'"


def flavour(text: str) -> tuple[str, str]:
    """(launcher, version) of what `mpirun --version`, or a library, says of itself; ("", "") of another MPI."""
    for launcher, pattern in (
        ("openmpi", r"(?:Open MPI\)?|OpenRTE\)|prte|PRRTE\)?)[ :v]*(\d+\.\d+[.\w]*)"),
        ("hydra", r"HYDRA build details:\s+Version:\s*(\d+\.\d+[.\w]*)"),
        ("hydra", r"MPICH Version:\s*(\d+\.\d+[.\w]*)"),
        ("hydra", r"Intel\(R\) MPI Library.*?(\d{4}[.\w]*)"),
    ):
        if found := re.search(pattern, text, re.DOTALL):
            return launcher, found[1]
    return "", ""


def version_of(mpirun: str) -> str:
    """What `mpirun --version` prints; OSError or SubprocessError where it does not run."""
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=8, stdin=subprocess.DEVNULL)
    return f"{done.stdout}{done.stderr}"


def check_mpirun(env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """The mpirun on PATH, and whether mpi4py loads a library that belongs to it. For a process without a launcher."""
    path, package = shutil.which("mpirun") or shutil.which("mpiexec"), installed("mpi4py")
    if path is None and package is None:
        yield ok("mpirun", "no MPI here; several processes need mpirun, srun, torchrun or JAXDP_COORDINATOR")
        return
    if path is None:
        yield warning("mpirun", "mpi4py is installed, but there is no mpirun on PATH", f"{INSTALL}, or set PATH")
        return
    try:
        text = version_of(path)
    except (OSError, subprocess.SubprocessError) as error:
        yield failure("mpirun", f"{path} does not run: {error}", f"{INSTALL}, or put another mpirun first on PATH")
        return
    launcher, version = flavour(text)
    if not launcher:
        found = f"{path} is neither Open MPI nor MPICH: {text.strip().splitlines()[:1]}"
        yield warning("mpirun", found, "give ranks by JAXDP_COORDINATOR, JAXDP_NUM_PROCESSES and JAXDP_PROCESS_ID")
        return
    yield ok("mpirun", f"{title(launcher)} {version}, {path}")
    if launcher == "openmpi" and os.geteuid() == 0:
        major = "PRTE" if int(version.split(".")[0]) >= 5 else "OMPI"
        if not all(env.get(name) for name in ALLOW_ROOT if name.startswith(major)):
            fix = f"--allow-run-as-root, or set {major}_ALLOW_RUN_AS_ROOT=1 {major}_ALLOW_RUN_AS_ROOT_CONFIRM=1"
            yield warning("mpirun", "Open MPI's mpirun refuses to be started by root, which this is", fix)
    if package is None:
        yield warning("mpi4py", "not installed: ranks under mpirun could not meet", INSTALL)
        return
    probe = Probe("mpi")
    try:
        library = probe.ask("library", 10, launcher=launcher)
    except (Ended, Said) as error:
        own = f"set MPI4PY_LIBMPI to the {mpi.LIBRARY[launcher]} that belongs to {path}"
        yield failure("mpi4py", str(error), INSTALL if "ModuleNotFoundError" in str(error) else own)
        return
    finally:
        probe.close()
    yield compare(launcher, version, library, f"{path} is {title(launcher)} {version}")


def title(launcher: str) -> str:
    return mpi.FAMILY[launcher].partition(" or Intel")[0]


def compare(launcher: str, version: str, library: str, mpirun: str) -> Check:
    """Whether the library belongs to that mpirun; releases of one major version work together.

    MPICH's process manager and library speak PMI, which Intel MPI and all of MPICH's releases have in common.
    """
    loaded, number = flavour(library)
    major = lambda text: text.split(".")[0]
    if loaded != launcher or (launcher == "openmpi" and major(number) != major(version)):
        found = f"mpi4py loads {library!r}, but {mpirun}: each rank may believe that it is alone"
        own = mpi.LIBRARY[launcher]
        fix = f"put the mpirun of that library first on PATH, or set MPI4PY_LIBMPI to mpirun's own {own}"
        return failure("mpi4py", found, fix)
    return ok("mpi4py", f"loads {library}")


def beside_this_mpirun() -> str | None:
    """The mpirun that started this process, where it is seen above it."""
    for _, exe in mpi.ancestors():
        if exe.name in mpi.STARTERS:
            path = exe.with_name("mpirun")
            return str(path if path.exists() else exe)
    return None


def meet(world: World, own: dict[str, Any], timeout: float) -> tuple[list[dict[str, Any]], list[Check]]:
    """(what every rank brings, by rank, carried by MPI; empty where that does not work), and what was found of it."""
    starter = beside_this_mpirun() or shutil.which("mpirun")
    version = ""
    if starter and Path(starter).name in ("mpirun", "mpiexec"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            version = flavour(version_of(starter))[1]
    launched = f"{title(world.launcher)} {version}".strip()
    probe = Probe("mpi")
    lines = [ok("mpirun", f"{launched}{f', {starter}' if starter else ''}; it started {world.size} processes")]
    try:
        library = probe.ask("library", timeout, launcher=world.launcher)
        ranks = [world.rank, world.size, world.local_rank, world.local_size, world.launcher]
        hellos = probe.ask("exchange", timeout + 5, world=ranks, own=own, timeout=timeout)
    except Ended as error:
        fix = "put the mpirun that belongs to mpi4py's library first on PATH, or set MPI4PY_LIBMPI to mpirun's own"
        if "waits until" in str(error):
            fix = "see whether every rank was started, and what it printed"
        elif "ModuleNotFoundError" in str(error):
            fix = INSTALL
        return [], [*lines, failure("mpi4py", str(error), fix)]
    except Said as error:
        return [], [*lines, of_error("mpi4py", error)]
    finally:
        probe.close()
    if version and compare(world.launcher, version, library, launched).status != OK:
        found = f"loads {library!r} under {launched}: they see each other, but it is not what mpirun came with"
        fix = f"unset MPI4PY_LIBMPI, or set it to mpirun's own {mpi.LIBRARY[world.launcher]}"
        return hellos, [*lines, warning("mpi4py", found, fix)]
    return hellos, [*lines, ok("mpi4py", f"loads {library}; it sees {world.size} processes")]


def identity(port: int) -> dict[str, Any]:
    """What a rank brings to `meet`: who its host is, and the board's port there, of rank 0."""
    return {**hosts.identity(), "port": port, "outward": hosts.outward()}


def is_mpi(world: World) -> bool:
    return world.launcher in MPI and world.coordinator is None
