"""A contender has its place on the machine, and waits, blocked, for what the harness tells it to
do.

    python -m benchmarks.contender MODULE [arguments]

takes the place, and only then runs the module: frameworks size their pools of threads when they are
imported."""

import json
import os
import platform
import resource
import runpy
import socket
import sys
import time
from collections.abc import Callable
from importlib import metadata

ADDRESS = "JAXDP_BENCH_PORT"
CORES = "JAXDP_BENCH_CORES"  # such as 0,1
NAME = "JAXDP_BENCH_NAME"
PROCESSES = "JAXDP_BENCH_PROCESSES"
RANK = "JAXDP_BENCH_RANK"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "numpy")


def rank() -> int:
    return int(os.environ.get(RANK, os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def processes() -> int:
    return int(os.environ.get(PROCESSES, "1"))


def take_place() -> None:
    """Keeps this process to its cores, all of them or one for each rank, and its pools to as many
    threads.
    """
    cores = [int(core) for core in os.environ[CORES].split(",")]
    mine = cores if processes() == 1 else [cores[rank() % len(cores)]]
    os.sched_setaffinity(0, mine)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(len(mine))


def serve(
    losses: Callable[[int], list[float]],
    run: Callable[[int], None],
    memory: Callable[[], dict[str, float]] = dict,
) -> None:
    """Does what the harness asks for until it says stop.

    losses(n): the loss of each of the next n updates. run(n): n updates, all of them done when it
    returns. memory: bytes by name, asked for at the end.
    """
    with (
        socket.create_connection(("127.0.0.1", int(os.environ[ADDRESS]))) as line,
        line.makefile("rw") as file,
    ):

        def tell(**answer: object) -> None:
            file.write(json.dumps(answer) + "\n")
            file.flush()

        tell(
            name=os.environ[NAME],
            rank=rank(),
            pid=os.getpid(),
            versions=versions(),
            cores=sorted(os.sched_getaffinity(0)),
        )
        for text in file:
            command = json.loads(text)
            began = time.perf_counter()
            if command["do"] == "stop":
                break
            if command["do"] == "losses":
                found = losses(command["updates"])
                tell(losses=found, seconds=time.perf_counter() - began)
            elif command["do"] == "memory":
                tell(
                    **memory(),
                    resident_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                )
            else:
                run(command["updates"])
                tell(seconds=time.perf_counter() - began)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    take_place()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
