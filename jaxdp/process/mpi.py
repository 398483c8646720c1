"""One exchange over MPI, by which the ranks of mpirun agree on a coordinator address; MPI is
finalized afterwards.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxdp.errors import DistributedError, UsageError, install
from jaxdp.process.hosts import Facts
from jaxdp.process.launchers import World

# The programs that start ranks, and the MPI library of each family; mpi4py loads one of them at run
# time.
STARTERS = {
    "hydra_pmi_proxy",
    "mpiexec.hydra",
    "mpirun",
    "mpiexec",
    "mpispawn",
    "prterun",
    "prted",
    "orterun",
    "orted",
}
LIBRARY = {"openmpi": "libmpi.so.40", "mvapich": "libmpi.so.12", "hydra": "libmpi.so.12"}
FAMILY = {"openmpi": "Open MPI", "mvapich": "MVAPICH", "hydra": "MPICH or Intel MPI"}
SLOT = 2048  # bytes that each rank contributes to the exchange


def ancestors() -> Iterator[tuple[int, Path]]:
    """Yield (process id, executable) of this process's ancestors, nearest first, as far as /proc
    shows them.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            yield pid, Path(f"/proc/{pid}/exe").resolve()
            pid = int(
                Path(f"/proc/{pid}/stat")
                .read_text(encoding="utf-8", errors="replace")
                .rpartition(")")[2]
                .split()[1]
            )
        except (OSError, ValueError, IndexError):
            return


def is_starter(pid: int) -> bool:
    """Return whether `pid` is a running process of this host that starts ranks, such as mpirun."""
    return Path(f"/proc/{pid}/exe").resolve().name in STARTERS


def beside_mpirun(soname: str) -> Path | None:
    """Return the MPI library installed next to the mpirun that started this process; None if there
    is none.
    """
    starters = [p for _, p in ancestors() if p.name in STARTERS]
    starters += [Path(p).resolve() for name in ("mpirun", "mpiexec") if (p := shutil.which(name))]
    for starter in starters:
        lib = starter.parent.parent / "lib"
        for folder in (
            lib,
            lib / "release",
            lib.with_name("lib64"),
            *sorted(lib.glob("*-linux-gnu")),
        ):
            if (folder / soname).exists():
                return folder / soname
    return None


def load(world: World) -> Any:
    """Import mpi4py.MPI with the library of this mpirun. Raises UsageError if either cannot be
    loaded.
    """
    # One process per host prints an error, since all of them have the same installation.
    soname = LIBRARY[world.launcher]
    if "MPI4PY_LIBMPI" not in os.environ and (path := beside_mpirun(soname)):
        os.environ["MPI4PY_LIBMPI"] = str(path)
    try:
        if "mpi4py.MPI" not in sys.modules:
            # `exchange` initializes MPI, under a deadline, and finalizes it: at exit that could
            # hang.
            rc = importlib.import_module("mpi4py").rc
            rc.initialize = rc.finalize = False
        return importlib.import_module("mpi4py.MPI")
    except ModuleNotFoundError:
        raise UsageError(
            f"mpirun started {world.size} processes but mpi4py is not installed: {install('mpi')}",
            world.speaker,
        ) from None
    except (ImportError, RuntimeError) as error:
        line = str(error).splitlines()[0]
        raise UsageError(
            f"mpi4py cannot load an MPI library ({line}): set MPI4PY_LIBMPI to the {soname} that belongs to this "
            f"mpirun ({FAMILY[world.launcher]})",
            world.speaker,
        ) from None


def exchange(world: World, facts: Facts, timeout: float, finalize: bool = True) -> list[Facts]:
    """Return every rank's `facts`, by rank. finalize: finalize MPI afterwards, unless the program
    had initialized it.

    Raises UsageError if mpi4py is missing or loads another MPI than mpirun's, DistributedError
    after `timeout` seconds."""
    # Loading and MPI_Init are C code that may block for ever: this timer ends the process without
    # the interpreter.
    faulthandler.dump_traceback_later(timeout + 2.0, exit=True)
    try:
        mpi = load(world)
        initialize = not mpi.Is_initialized()
        if initialize:
            waits_until_every_rank_calls_mpi_init(mpi)
        try:
            return _allgather(mpi, world, facts, timeout)
        finally:
            if initialize and finalize:
                mpi.Finalize()
    finally:
        faulthandler.cancel_dump_traceback_later()


def waits_until_every_rank_calls_mpi_init(mpi: Any) -> None:
    """Call MPI_Init. If the deadline passes, the timer's traceback shows this function's name to
    the user.
    """
    # Open MPI's component for one-sided access takes 1 s to start, and is not used here.
    os.environ.setdefault("OMPI_MCA_btl", "^ofi")
    with (
        warnings.catch_warnings()
    ):  # about another MPI's variables: `_allgather` has a better message
        warnings.simplefilter("ignore", RuntimeWarning)
        mpi.Init_thread(mpi.THREAD_SERIALIZED)


def _allgather(mpi: Any, world: World, facts: Facts, timeout: float) -> list[Facts]:
    everyone = mpi.COMM_WORLD
    if everyone.size != world.size:
        library = mpi.Get_library_version().splitlines()[0].strip(" \0")
        raise UsageError(
            f"mpirun ({FAMILY[world.launcher]}) started {world.size} processes, but mpi4py sees {everyone.size}, since "
            f"it loaded {library!r}: set MPI4PY_LIBMPI to the {LIBRARY[world.launcher]} that belongs to this mpirun",
            world.speaker,
        )
    text = json.dumps(facts).encode()
    if len(text) > SLOT:
        text = json.dumps({**facts, "addresses": facts["addresses"][:4]}).encode()
    received = bytearray(SLOT * everyone.size)
    request = everyone.Iallgather(text.ljust(SLOT), [received, mpi.BYTE])
    deadline = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > deadline:
            raise DistributedError(
                f"rank {world.rank}: some rank of mpirun's {world.size} did not come in {timeout:g} s"
            )
        time.sleep(0.001)
    return [json.loads(received[r * SLOT : (r + 1) * SLOT]) for r in range(everyone.size)]
