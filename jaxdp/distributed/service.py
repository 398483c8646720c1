"""The coordination service has a process of its own beside rank 0, so that the others can tell of rank 0's death.

JAX runs it inside rank 0: when that is killed, every other process is aborted at once by JAX's C++ client, which names
nobody; when it is stopped, nobody can agree on anything. Here the service outlives rank 0 until the others have left.

    python service.py ADDRESS SIZE HEARTBEAT SHUTDOWN STDERR     says "ready", ends after its standard input
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import select
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
        argv, stderr = [sys.executable, "-P", __file__], os.dup(2)
        self.child = subprocess.Popen(
            [*argv, address, str(size), str(heartbeat_timeout), str(shutdown_timeout), str(stderr)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # of gRPC's log
            text=True,
            pass_fds=[stderr],
            start_new_session=True,  # a launcher kills the process groups of its ranks
        )
        os.close(stderr)
        assert self.child.stdout is not None
        if self.child.stdout.readline() != "ready\n":
            raise RuntimeError(f"the coordination service could not start at {address} (code {self.child.wait()})")

    def tell(self, **message: Any) -> None:
        """See `Witness`."""
        assert self.child.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.child.stdin.write(f"{json.dumps(message)}\n")
            self.child.stdin.flush()

    def shutdown(self) -> None:
        self.tell(over=True, left=True)
        self.child.communicate()


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


def gloo_at(hostname: str) -> None:
    """Make Gloo's collectives listen at this address alone; by itself it takes what the host's name resolves to."""
    from jax._src.lib import _jax

    make = functools.partial(_jax.make_gloo_tcp_collectives, hostname=hostname)
    _jax.make_gloo_tcp_collectives = make


def connections(port: int) -> int:
    """How many TCP connections to a port of this host are open; as Linux tells."""
    count = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in pathlib.Path(table).read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                count += state == ESTABLISHED and int(local.rpartition(":")[2], 16) == port
    return count


class Witness:
    """Reports which rank of rank 0's host ended first, where rank 0 ends without a word, as launchers make it.

    Rank 0 writes lines of JSON to it: `ranks`, process -> title; `log`, the run's events.jsonl; `over`, once rank 0 has
    printed itself why it ends. MPICH kills all ranks some milliseconds after the first has died, and may name another.
    """

    def __init__(self) -> None:
        self.titles: dict[int, str] = {}  # of the processes that live, by a file that is readable once they do not
        self.ended: list[str] = []
        self.message: dict[str, Any] = {}

    def watch(self) -> str | None:
        """Wait for rank 0's end, and return the line that it calls for; None where all is said."""
        unread = b""
        while True:
            ready = select.select([0, *self.titles], [], [])[0]
            if titles := [self.titles.pop(file) for file in ready if file]:
                self.ended.append(" and ".join(titles))
            if 0 in ready:
                part = os.read(0, 65536)
                *lines, unread = (unread + part).split(b"\n")
                for line in lines:
                    self.hear(json.loads(line))
                if not part:
                    break
        if self.message.get("over") or not self.message:
            return None
        ended = self.ended or [self.titles[file] for file in select.select([*self.titles], [], [], 0.1)[0]]
        return f"{ended[0]} ended first, without a word: killed or crashed" if ended else None

    def hear(self, message: dict[str, Any]) -> None:
        self.message |= message
        for process, title in message.get("ranks", {}).items():
            with contextlib.suppress(OSError, AttributeError):  # it has ended already; or this is not Linux
                self.titles[os.pidfd_open(int(process))] = title

    def note(self, reason: str) -> None:
        """Append the event that rank 0 cannot write any more."""
        if log := self.message.get("log"):
            line = json.dumps({"t": round(time.time(), 3), "kind": "failed", "reason": reason})
            with contextlib.suppress(OSError), open(log, "a") as file:
                file.write(f"\n{line}\n" if torn(log) else f"{line}\n")


def torn(file: str) -> bool:
    """Whether the last line of a file has no end."""
    return pathlib.Path(file).read_bytes()[-1:] not in (b"", b"\n")


def main(address: str, size: str, heartbeat: str, shutdown: str, stderr: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the ranks, and sent to all that a launcher knows of
    from jaxlib import _jax

    service = _jax.get_distributed_runtime_service(
        address, int(size), heartbeat_timeout=int(heartbeat), shutdown_timeout=int(shutdown)
    )
    print("ready", flush=True)
    witness, port = Witness(), int(address.rpartition(":")[2])
    if line := witness.watch():
        with contextlib.suppress(OSError):
            os.write(int(stderr), f"jaxdp: {line}\n".encode())
        witness.note(line)
    os.close(int(stderr))  # the launcher waits for whoever holds its pipes
    orderly, deadline = witness.message.get("left"), time.monotonic() + LINGER
    while not orderly and connections(port) and time.monotonic() < deadline:
        time.sleep(0.1)
    del service
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
