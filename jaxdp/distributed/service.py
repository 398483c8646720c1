"""The coordination service has a process of its own beside rank 0, so that the others can tell of rank 0's death.

JAX runs it inside rank 0: when that is killed, every other process is aborted at once by JAX's C++ client, which names
nobody; when it is stopped, nobody can agree on anything. Here the service outlives rank 0 until the others have left.

    python service.py ADDRESS SIZE HEARTBEAT SHUTDOWN     says "ready", ends after its standard input
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

LINGER = 20.0  # seconds that the service outlives rank 0 at most
ESTABLISHED = "01"


class Service:
    """The child process, with the one method of JAX's own service that JAX calls."""

    def __init__(self, address: str, size: int, heartbeat_timeout: int, shutdown_timeout: int):
        argv = [sys.executable, "-P", __file__]
        self.child = subprocess.Popen(
            [*argv, address, str(size), str(heartbeat_timeout), str(shutdown_timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the launcher waits for whoever holds its pipes
            text=True,
        )
        assert self.child.stdout is not None
        if self.child.stdout.readline() != "ready\n":
            raise RuntimeError(f"the coordination service could not start at {address} (code {self.child.wait()})")

    def shutdown(self) -> None:
        self.child.communicate("all have left\n")


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside, JAX's coordination service starts as a process of its own."""
    from jax._src.lib import _jax

    def start(address: str, size: int, heartbeat_timeout: int, shutdown_timeout: int, **other: Any) -> Service:
        return Service(address, size, heartbeat_timeout, shutdown_timeout)

    own = _jax.get_distributed_runtime_service
    _jax.get_distributed_runtime_service = start
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service = own


def connections(port: int) -> int:
    """How many TCP connections to a port of this host are open; as Linux tells."""
    count = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in pathlib.Path(table).read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                count += state == ESTABLISHED and int(local.rpartition(":")[2], 16) == port
    return count


def main(address: str, size: str, heartbeat: str, shutdown: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the ranks, and sent to all that a launcher knows of
    from jaxlib import _jax

    service = _jax.get_distributed_runtime_service(
        address, int(size), heartbeat_timeout=int(heartbeat), shutdown_timeout=int(shutdown)
    )
    print("ready", flush=True)
    port, orderly = int(address.rpartition(":")[2]), sys.stdin.read()  # until rank 0 says so, or is gone
    deadline = time.monotonic() + LINGER
    while not orderly and connections(port) and time.monotonic() < deadline:
        time.sleep(0.1)
    del service
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
