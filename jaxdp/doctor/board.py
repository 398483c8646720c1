"""Rank 0 keeps a board on which ranks pin what they found: it needs neither JAX nor MPI, which may be what is wrong.

It is the standard library's XML-RPC server. The others find it at the coordinator's address, at the one that MPI
carried to them, or, on one host, in a file: a job is examined as a whole even where its own way to meet does not work.
"""

from __future__ import annotations

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

Found = dict[int, Any]  # what ranks brought, by rank
BROKEN = (OSError, http.client.HTTPException, xmlrpc.client.Error, ValueError)


class _Server(socketserver.ThreadingMixIn, xmlrpc.server.SimpleXMLRPCServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int, family: socket.AddressFamily):
        self.address_family = family
        super().__init__((any_address(family), port), logRequests=False, bind_and_activate=False)
        bind_everywhere(self)


class Board:
    """Texts by name and rank, of a job of `size` processes. port: where it is served."""

    def __init__(self, size: int, port: int = 0):
        """port: 0 for any that is free. OSError where it cannot be had."""
        self.size, self.texts = size, dict[str, dict[str, str]]()
        self.changed = threading.Condition()
        try:
            self.server = _Server(port, socket.AF_INET6)
        except OSError:  # taken, or no IPv6 here
            self.server = _Server(port, socket.AF_INET)
        self.port: int = self.server.server_address[1]
        register: Any = self.server.register_function
        for method in (self.put, self.get, self.clock):
            register(method)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def put(self, name: str, rank: int, text: str) -> int:
        with self.changed:
            self.texts.setdefault(name, {})[str(rank)] = text
            self.changed.notify_all()
        return self.size

    def get(self, name: str, patience: float) -> str:
        """What there is under that name, as JSON: as soon as all have brought it, or after `patience` seconds."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.texts.get(name, {})) == self.size, patience)
            return json.dumps(self.texts.get(name, {}))

    def clock(self) -> float:
        return time.time()


class Member:
    """One rank's way to the board. address: "host:port"; None on rank 0, where the board itself is."""

    def __init__(self, rank: int, size: int, board: Board | None, address: str | None = None):
        self.rank, self.size, self.address, self.board = rank, size, address, board
        self.line: Any = board or xmlrpc.client.ServerProxy(f"http://{address}/")

    def pin(self, name: str, value: Any) -> None:
        self.line.put(name, self.rank, json.dumps(value))

    def read(self, name: str, timeout: float) -> Found:
        """What ranks brought under that name, as soon as all did, or as many as did within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            texts = json.loads(self.line.get(name, max(0.0, min(1.0, left))))
            if len(texts) == self.size or left <= 0:
                return {int(rank): json.loads(texts[rank]) for rank in sorted(texts, key=int)}

    def exchange(self, name: str, value: Any, timeout: float) -> Found:
        self.pin(name, value)
        return self.read(name, timeout)

    def outlive(self, timeout: float) -> None:
        """Waits until rank 0 has gone: mpirun may end the others as soon as one has."""
        deadline = time.monotonic() + timeout
        with contextlib.suppress(*BROKEN):
            while time.monotonic() < deadline:
                self.line.clock()
                time.sleep(0.1)

    def skew(self) -> float:
        """Seconds that this host's clock is ahead of rank 0's; what may be the way's delay counts as none."""
        before = time.time()
        there = self.line.clock()
        after = time.time()
        return max(before - there, 0.0) or min(after - there, 0.0)


def reach(rank: int, size: int, where: Callable[[], list[str]], timeout: float) -> Member | None:
    """The board, at the first address of `where` that has one; None where there is none within `timeout` seconds.

    UsageError where rank 0 is of a job of another size.
    """
    socket.setdefaulttimeout(5.0)
    deadline, sizes = time.monotonic() + timeout, set[int]()
    while time.monotonic() < deadline:
        for address in where():
            with contextlib.suppress(*BROKEN):
                member = Member(rank, size, None, address)
                there = member.line.put("here", rank, "0")
                if there == size:
                    return member
                sizes.add(there)
        if sizes:
            raise UsageError(
                f"this rank, {rank}, is told of {size} processes, rank 0 of {sizes.pop()}: start all alike"
            )
        time.sleep(0.05)
    return None


class Note:
    """A file on this host that says where the board is, for the processes of one job: those with one launcher above."""

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

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
