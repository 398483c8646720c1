"""The kernels of the eager collectives, by MPI: its own operations on buffers in memory.

The buffers[rows, element] are arrays of NumPy; of JAX on a GPU whose memory MPI reads and writes
(`on_device`). That was not tried, since there was no GPU.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from jaxdp.errors import UsageError, one_line
from jaxdp.interop import kernels

Buffer = Any
_library = ctypes.CDLL(os.environ.get("MPI4PY_LIBMPI"))
on_device = getattr(_library, "MPIX_Query_cuda_support", bool)()  # an extension of MPI


def run(
    name: str, argument: Any, buffers: Sequence[Buffer], members: tuple[int, ...]
) -> list[Buffer]:
    """Run a collective on all `members` together; return buffers[rows', element]. The arguments are
    those of `kernels.run`.
    """
    comm = communicator(members)
    if name in kernels.REDUCING:
        reduce = functools.partial(_reduce, comm, name)
        return [kernels.reduced(argument, x, reduce) for x in buffers]
    move = functools.partial(_move, comm, name, argument)
    return [kernels.moved(x, move) for x in buffers]


@functools.cache
def communicator(members: tuple[int, ...]) -> Any:
    """Return the communicator of some ranks, in this order."""
    # Open MPI 4 makes one by messages between its ranks, which only COMM_WORLD expects.
    return MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(members))


def _reduce(comm: Any, name: str, op: str, x: Buffer) -> Buffer:
    """Return the reduction of x[rows, element]: all of it, or this rank's row."""
    call = comm.Allreduce if name == "allreduce" else comm.Reduce_scatter_block

    out = x[:1].copy()
    call(_memory(x), _memory(out), MPI.SUM if op == "avg" else getattr(MPI, op.upper()))
    return out / comm.size if op == "avg" else out


def _move(comm: Any, name: str, root: int, x: Buffer) -> Buffer:
    """Return the bits that this rank gets for its x[rows, element]."""
    if name in ("broadcast", "send"):  # in a pair, which has a communicator, these are the same
        out = x.copy()
        comm.Bcast(_memory(out), root)
        return out
    out = x[:1].repeat(comm.size if name in kernels.JOINED else 1, 0)
    both = _memory(x), _memory(out)
    if name == "scatter":
        comm.Scatter(*both, root)
    else:
        (comm.Allgather if name == "allgather" else comm.Alltoall)(*both)
    return out


def _memory(x: Buffer) -> Any:
    """Return the memory of an array as mpi4py takes it, once it has been computed."""
    if isinstance(x, np.ndarray):
        return x
    pointer = jax.block_until_ready(x).unsafe_buffer_pointer()
    return [MPI.buffer.fromaddress(pointer, x.nbytes), x.dtype.char]


def sums_in_jit(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the sums of traced arrays over all ranks. Raises UsageError without mpi4jax."""
    try:
        from mpi4jax import allreduce
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            "distributed_optimizer: inside jit, MPI needs mpi4jax, built by the mpicc of this "
            f"MPI ({one_line(error)}); install it, or call update outside jit"
        ) from None
    return [allreduce(x, op=MPI.SUM, comm=MPI.COMM_WORLD) for x in arrays]
