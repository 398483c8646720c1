"""Check the network: what host names resolve to, the coordinator's port, and TCP between the hosts of a job."""

import contextlib
import os
import pathlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdp.distributed import hosts, launchers
from jaxdp.distributed.hosts import split
from jaxdp.distributed.world import World
from jaxdp.doctor.check import FAILURE, WARNING, Check, failure, ok, warning
from jaxdp.errors import one_line

SAMPLE = 8 << 20  # bytes sent to measure a link


def check_name(processes: int = 1, several: bool = False) -> Iterator[Check]:
    """Check this host's own name, which Gloo and MPI advertise to other processes. several: the job spans hosts."""
    name, outward = hosts.hostname(), hosts.outward()
    addresses = hosts.resolve(name)
    status, when = (FAILURE, "") if several else (WARNING, "; it matters when a job spans hosts")
    resolved = f"{name} resolves to {', '.join(addresses)}"
    network = f" ({outward})" if outward else ""
    if not addresses:
        fix = f"add the line '{outward or '127.0.0.1'} {name}' to /etc/hosts, or fix the name server"
        status = FAILURE if processes > 1 else WARNING
        yield Check("host name", status, f"{name} does not resolve, and collectives on CPU advertise it", fix)
    elif all(hosts.is_loopback(a) for a in addresses):
        fix = f"in /etc/hosts, give {name} its network address{network}"
        yield Check("host name", status, f"{resolved}, and collectives on CPU would advertise that{when}", fix)
    elif not hosts.is_own(name):
        fix = f"in /etc/hosts or the name server, give {name} its address{network}"
        yield Check("host name", status, f"{resolved}, which is no address of this host{when}", fix)
    else:
        yield ok("host name", resolved)


class Listener:
    """A socket that sends SAMPLE bytes to everyone who connects."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("", 0), backlog=128)
        self.port: int = self.socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                threading.Thread(target=self._send, args=(connection,), daemon=True).start()

    def _send(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.sendall(bytes(SAMPLE))


def speed(address: str, port: int, timeout: float = 5.0) -> float:
    """Return the bytes per second from the Listener at that address. Raises OSError if it is not reached."""
    with socket.create_connection((address, port), timeout) as connection:
        began, received, buffer = time.perf_counter(), 0, bytearray(1 << 18)
        while count := connection.recv_into(buffer):
            received += count
        return received / (time.perf_counter() - began)


def loopback_speed() -> float:
    """Return the bytes per second over TCP on this host, the best of three."""
    port = Listener().port
    return max(speed("127.0.0.1", port) for _ in range(3))


def check_reach(rank: int, facts: Mapping[int, Mapping[str, Any]], speeds: list[float]) -> Iterator[Check]:
    """Check TCP to the other hosts, from one rank of each; of many hosts, to the next 16.

    speeds: gets the bytes per second to each.
    """
    firsts = {hosts.key(fact): r for r, fact in reversed(list(facts.items()))}
    others = sorted(set(firsts.values()) - {rank}, key=lambda other: (other - rank) % (max(facts) + 1))[:16]
    if firsts[hosts.key(facts[rank])] != rank or not others:
        return
    unreached = 0
    for other in others:
        fact = facts[other]
        addresses = [a for a in hosts.resolve(fact["host"]) or fact["addresses"] if not hosts.is_loopback(a)]
        target = next(iter(addresses), None) or fact["outward"] or "no address"
        try:
            speeds.append(speed(target, fact["port"]))
        except OSError as error:
            unreached += 1
            text = f"{hosts.title(other, fact['host'])} is not reached from {facts[rank]['host']} at {target}: {error}"
            fix = "see routes, and whether a firewall lets the job's hosts connect to each other on any port"
            yield failure("network", text, fix)
    if not unreached:
        text = f"{len(others)} other host{'s' * (len(others) > 1)} reached"
        yield ok("network", f"{text}; TCP to the slowest {min(speeds) / 1e9:.2g} GB/s")


def check_port(world: World | None, env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Check the coordinator's port, if one is set: it must be free on the host of rank 0, which is to listen there."""
    if env.get("JAXDP_COORDINATOR"):
        name, address = "JAXDP_COORDINATOR", env["JAXDP_COORDINATOR"]
    elif env.get("MASTER_ADDR") and env.get("MASTER_PORT") and not env.get("TORCHELASTIC_RUN_ID"):
        name, address = "MASTER_ADDR:MASTER_PORT", f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    elif world is not None and world.coordinator:
        name, address = f"the coordinator ({world.launcher})", world.coordinator
    else:
        return
    host, port = split(launchers.address(address, name))
    if not hosts.resolve(host):
        text = f"{name}={address}: {host} does not resolve"
        yield failure("port", text, f"set {name} to an address of rank 0's host")
    elif not hosts.is_own(host):
        if world is None or world.rank == 0 < world.size - 1:
            text = f"{name}={address}: {host} is no address of this host, {hosts.hostname()}"
            yield warning("port", text, f"set {name} to rank 0's host, or start rank 0 there")
    elif world is None or world.rank == 0:
        if problem := why_taken(port):
            fix = "choose another port, or end that program"
            yield failure("port", f"{name}={address}: port {port} {problem}", fix)
        else:
            yield ok("port", f"{name}={address}: port {port} is free")


def why_taken(port: int) -> str | None:
    """Return why this process cannot listen on `port`; None if it can."""
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        with contextlib.suppress(OSError), socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((host, port))
                trial.listen()
            except PermissionError:
                return "is for root only"
            except OSError as error:
                if family == socket.AF_INET:
                    return f"is taken{owner(port)} ({error.strerror})"
                continue
            return None
    return "cannot be listened on"


def owner(port: int) -> str:
    """Return " by process N (its command)", if /proc shows it."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if inodes & {os.readlink(f) for f in (process / "fd").iterdir()}:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f" by process {process.name} ({one_line(command)[:60]})"
    return ""
