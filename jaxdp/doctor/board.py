"""Collect what ranks report on rank 0, over XML-RPC: without JAX or MPI, either of which may be the problem.

Ranks find the board at the coordinator's address, at one that MPI carried to them or, on one host, in a file.
"""

import contextlib
import http.client
import json
import os
import pathlib
import socket
import socketserver
import tempfile
import threading
import time
import xmlrpc.client
import xmlrpc.server
from collections.abc import Callable
from typing import Any

from jaxdp.distributed import mpi
from jaxdp.distributed.listening import any_address, bind_everywhere
from jaxdp.errors import UsageError

BROKEN = (OSError, http.client.HTTPException, xmlrpc.client.Error, ValueError)


class _Server(socketserver.ThreadingMixIn, xmlrpc.server.SimpleXMLRPCServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int, family: socket.AddressFamily):
        self.address_family = family
        super().__init__((any_address(family), port), logRequests=False, bind_and_activate=False)
        bind_everywhere(self)


class Board:
    """Texts by name and rank, of a job of `size` processes, served at `port`; 0: any. Raises OSError if it is taken."""

    def __init__(self, size: int, port: int = 0):
        self.size, self.texts = size, dict[str, dict[str, str]]()
        self.changed = threading.Condition()
        try:
            server = _Server(port, socket.AF_INET6)
        except OSError:  # taken, or no IPv6 here
            server = _Server(port, socket.AF_INET)
        self.port: int = server.server_address[1]
        for method in (self.put, self.get):
            server.register_function(method)  # type: ignore[arg-type]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def put(self, name: str, rank: int, text: str) -> int:
        with self.changed:
            self.texts.setdefault(name, {})[str(rank)] = text
            self.changed.notify_all()
        return self.size

    def get(self, name: str, timeout: float) -> str:
        """Return {rank: text} under that name as JSON, once every rank has put one or the timeout is over."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.texts.get(name, {})) == self.size, timeout)
            return json.dumps(self.texts.get(name, {}))


class Member:
    """The connection of one rank to the board, given itself on rank 0, else its "host:port"."""

    def __init__(self, rank: int, size: int, board: Board | str):
        self.rank, self.size = rank, size
        self.board: Any = xmlrpc.client.ServerProxy(f"http://{board}/") if isinstance(board, str) else board

    def put(self, name: str, value: Any) -> None:
        self.board.put(name, self.rank, json.dumps(value))

    def read(self, name: str, timeout: float) -> dict[int, Any]:
        """Return {rank: value} of all ranks, or of those that put one in time."""
        deadline = time.monotonic() + timeout
        while True:
            rest = deadline - time.monotonic()
            texts = json.loads(self.board.get(name, max(0.0, min(1.0, rest))))
            if len(texts) == self.size or rest <= 0:
                return {int(rank): json.loads(texts[rank]) for rank in sorted(texts, key=int)}

    def outlive(self, timeout: float) -> None:
        """Wait until rank 0 has ended: mpirun may end the others as soon as one has."""
        deadline = time.monotonic() + timeout
        with contextlib.suppress(*BROKEN):
            while time.monotonic() < deadline:
                self.board.get("", 0.0)
                time.sleep(0.1)


def reach(rank: int, size: int, addresses: Callable[[], list[str]], timeout: float) -> Member | None:
    """Connect to the board at one of the addresses; None if there is none within `timeout` seconds.

    Raises UsageError if rank 0 is of a job of another size.
    """
    socket.setdefaulttimeout(5.0)
    deadline, sizes = time.monotonic() + timeout, set[int]()
    while time.monotonic() < deadline:
        for address in addresses():
            with contextlib.suppress(*BROKEN):
                member = Member(rank, size, address)
                if (others := member.board.put("here", rank, "0")) == size:
                    return member
                sizes.add(others)
        if sizes:
            raise UsageError(f"rank {rank} is told of {size} processes, rank 0 of {sizes.pop()}: start all alike")
        time.sleep(0.05)
    return None


class AddressFile:
    """A file on this host with the board's address, for the processes of one job: those with one launcher above."""

    def __init__(self, coordinator: str | None):
        above = [pid for pid, exe in mpi.ancestors() if exe.name in mpi.STARTERS]
        job = os.environ.get("PMIX_NAMESPACE") or coordinator or (above or [os.getppid()])[0]
        name = "".join(c if c.isalnum() else "-" for c in f"jaxdp-doctor-{os.getuid()}-{job}")
        self.path = pathlib.Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()) / name

    def write(self, address: str) -> None:
        with contextlib.suppress(OSError):  # then the ranks meet in the job's own way, or not
            new = self.path.with_suffix(f".{os.getpid()}")
            new.write_text(address)
            new.replace(self.path)

    def read(self) -> list[str]:
        with contextlib.suppress(OSError):
            return [self.path.read_text()]
        return []
