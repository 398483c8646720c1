"""The tasks of a probe that loads MPI."""

import importlib
from typing import Any

from jaxdp.distributed import mpi
from jaxdp.distributed.world import World


def library(launcher: str) -> str:
    """The first line of what the MPI library says of itself, of the one that jaxdp takes under such a launcher."""
    importlib.import_module("mpi4py")  # an error by itself, before that of a library
    loaded = mpi.load(World(0, 1, launcher=launcher))
    return str(loaded.Get_library_version().splitlines()[0].strip(" \0"))


def exchange(world: list[Any], own: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    """What every rank brings, by rank: see `mpi.exchange`."""
    return mpi.exchange(World(*world), own, timeout)
