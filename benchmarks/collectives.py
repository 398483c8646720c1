"""The collectives between processes, beside those of mpi4py on NumPy arrays: milliseconds of a
call, by bytes.

    mpirun --bind-to none -np 2 python -m benchmarks.collectives [--repeats 15] [--bytes 4096 1048576 16777216]

Every call gets the same float32 values and ends with the result in each process; the two take
turns. jaxdp compares the ranks' arguments before each call. Prints medians, of rank 0.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
from mpi4py import MPI

import jaxdp


def ours(x: jax.Array, rank: int) -> dict[str, Callable[[], object]]:
    return {
        "allreduce": lambda: jaxdp.allreduce(x),
        "reduce": lambda: jaxdp.reduce(x),
        "reduce_scatter": lambda: jaxdp.reduce_scatter(x),
        "allgather": lambda: jaxdp.allgather(x),
        "broadcast": lambda: jaxdp.broadcast(x),
        "all_to_all": lambda: jaxdp.all_to_all(x),
        "send, recv": lambda: (
            jaxdp.send(x, 1) if rank == 0 else jaxdp.recv(0) if rank == 1 else None
        ),
    }


def mpis(x: np.ndarray, comm: MPI.Comm) -> dict[str, Callable[[], object]]:
    whole, gathered = np.empty_like(x), np.empty((comm.size, *x.shape), x.dtype)
    part, copy = np.empty(x.size // comm.size, x.dtype), x.copy()
    return {
        "allreduce": lambda: comm.Allreduce(x, whole),
        "reduce": lambda: comm.Reduce(x, whole),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(x, part),
        "allgather": lambda: comm.Allgather(x, gathered),
        "broadcast": lambda: comm.Bcast(copy),
        "all_to_all": lambda: comm.Alltoall(x, whole),
        "send, recv": lambda: (
            comm.Send(x, 1) if comm.rank == 0 else comm.Recv(whole, 0) if comm.rank == 1 else None
        ),
    }


def seconds(call: Callable[[], object], comm: MPI.Comm) -> float:
    """Return the time until the last rank has its result."""
    comm.Barrier()
    began = time.perf_counter()
    jax.block_until_ready(call())
    comm.Barrier()
    return time.perf_counter() - began


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    sizes = [4 << 10, 1 << 20, 16 << 20]
    parser.add_argument(
        "--bytes", type=int, nargs="+", default=sizes, help="of the argument, of one rank"
    )
    args = parser.parse_args(argv)
    context, comm = jaxdp.init(), MPI.COMM_WORLD
    for size in args.bytes:
        values = np.random.default_rng(comm.rank).normal(size=size // 4).astype(np.float32)
        calls = ours(jax.device_put(values), comm.rank), mpis(values, comm)
        for name in calls[0]:
            times: tuple[list[float], list[float]] = ([], [])
            for repeat in range(args.repeats + 1):
                for i in (0, 1) if repeat % 2 else (1, 0):
                    times[i].append(seconds(calls[i][name], comm))
            # The first call compiles.
            first, second = (1e3 * statistics.median(t[1:]) for t in times)
            if context.is_root:
                row = {
                    "collective": name,
                    "bytes": size,
                    "processes": comm.size,
                    "jaxdp_ms": round(first, 3),
                }
                print(
                    json.dumps(
                        {**row, "mpi_ms": round(second, 3), "ratio": round(first / second, 2)}
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
