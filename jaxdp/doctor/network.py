"""The ways between hosts are tried: each listens on a port of its own, the others connect and see how fast it is."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from jaxdp.distributed import hosts
from jaxdp.doctor.check import Check, failure, ok

SAMPLE = 8 << 20  # bytes sent to see how fast a link is


class Listener:
    """A socket that others try to reach; it answers each with SAMPLE bytes, to show how fast the link is."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("", 0), backlog=128)
        self.port: int = self.socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = self.socket.accept()
                threading.Thread(target=self._send, args=(line,), daemon=True).start()

    def _send(self, line: socket.socket) -> None:
        with contextlib.suppress(OSError), line:
            line.sendall(bytes(SAMPLE))


def speed(address: str, port: int, timeout: float = 5.0) -> float:
    """Bytes per second from a Listener there. OSError where it is not reached."""
    with socket.create_connection((address, port), timeout) as line:
        began, received = time.perf_counter(), 0
        buffer = bytearray(1 << 18)
        while count := line.recv_into(buffer):
            received += count
        return received / (time.perf_counter() - began)


def check_reach(own: int, facts: Mapping[int, Mapping[str, Any]]) -> tuple[list[Check], float | None]:
    """(what is wrong with the ways to the other hosts, bytes per second to the slowest of those that were tried).

    Every other host is tried at the address it advertises, by the first rank of this one; of many, the next 16.
    """
    here = hosts.key(facts[own])
    firsts = {hosts.key(fact): rank for rank, fact in reversed(list(facts.items()))}
    others = sorted(rank for key, rank in firsts.items() if key != here)
    if firsts[here] != own:
        return [], None
    lines, speeds = [], []
    for rank in sorted(others, key=lambda rank: (rank - own) % (max(facts) + 1))[:16]:
        fact = facts[rank]
        address = next(
            iter([a for a in hosts.resolve(fact["host"]) or fact["addresses"] if not hosts.is_loopback(a)]), None
        )
        target = address or fact["outward"] or "no address"
        try:
            speeds.append(speed(target, fact["port"]))
        except OSError as error:
            found = f"{hosts.title(rank, fact['host'])} is not reached from {facts[own]['host']} at {target}: {error}"
            fix = "see routes, and whether a firewall lets the job's hosts connect to each other on any port"
            lines.append(failure("network", found, fix))
    if others and not lines:
        found = f"{len(others)} other host{'s' * (len(others) > 1)} reached"
        lines = [ok("network", f"{found}; TCP to the slowest {min(speeds) / 1e9:.2g} GB/s")]
    return lines, min(speeds, default=None)


def loopback_speed() -> float:
    """Bytes per second over TCP on this host, the best of three; both ends are in this process."""
    port = Listener().port
    return max(speed("127.0.0.1", port) for _ in range(3))
