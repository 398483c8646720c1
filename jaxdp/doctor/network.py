"""Check the network: what host names resolve to, the coordinator's port, and TCP between the hosts of a job."""

import contextlib
import os
import pathlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdp.distributed import hosts
from jaxdp.distributed.world import World
from jaxdp.doctor.check import Check, failure, ok, warning
from jaxdp.errors import one_line

SAMPLE = 8 << 20  # bytes sent to measure a link
HOSTS = 16  # other hosts that each host connects to, at most


def check_name() -> Iterator[Check]:
    """Check this host's name, which Gloo and MPI advertise to other hosts. A job that spans hosts checks it again."""
    name, outward = hosts.hostname(), hosts.outward()
    addresses = hosts.resolve(name)
    text = f"{name} resolves to {', '.join(addresses)}"
    fix = f"in /etc/hosts, give {name} its network address{f' ({outward})' if outward else ''}"
    if not addresses:
        yield warning("host name", f"{name} does not resolve, and collectives on CPU advertise it", fix)
    elif all(map(hosts.is_loopback, addresses)):
        yield warning("host name", f"{text}, and collectives on CPU would advertise that to other hosts", fix)
    elif not hosts.is_own(name):
        yield warning("host name", f"{text}, which is no address of this host; jobs that span hosts need it", fix)
    else:
        yield ok("host name", text)


class Sender(socketserver.BaseRequestHandler):
    """Send SAMPLE bytes to a client."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self.request.sendall(bytes(SAMPLE))


def listen() -> int:
    """Serve SAMPLE bytes to everyone who connects; return the port."""
    server = socketserver.ThreadingTCPServer(("", 0), Sender)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def speed(address: str, port: int, timeout: float = 5.0) -> float:
    """Return the bytes per second from the server at that address. Raises OSError if it is not reached."""
    with socket.create_connection((address, port), timeout) as connection:
        began, received, buffer = time.perf_counter(), 0, bytearray(1 << 18)
        while count := connection.recv_into(buffer):
            received += count
        return received / (time.perf_counter() - began)


def check_reach(rank: int, facts: Mapping[int, Mapping[str, Any]], speeds: list[float]) -> Iterator[Check]:
    """Check TCP to the next HOSTS other hosts, from the first rank of each host.

    speeds: receives the bytes per second to each.
    """
    firsts = {hosts.key(fact): r for r, fact in reversed(list(facts.items()))}
    others = sorted(set(firsts.values()) - {rank}, key=lambda other: (other - rank) % len(facts))[:HOSTS]
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
    """Check the coordinator's port, if one is set: it must be free on the host of rank 0, which listens on it."""
    if world is None or world.coordinator is None:
        return
    address = world.coordinator
    name = "JAXDP_COORDINATOR" if env.get("JAXDP_COORDINATOR") else f"the coordinator ({world.launcher})"
    host, port = hosts.split(address)
    if not hosts.resolve(host):
        yield failure("port", f"{name}={address}: {host} does not resolve", "use an address of rank 0's host")
    elif world.rank != 0:
        return
    elif not hosts.is_own(host):
        if world.size > 1:
            text = f"{name}={address}: {host} is no address of this host, {hosts.hostname()}"
            yield warning("port", text, "use an address of rank 0's host, or start rank 0 there")
    elif problem := why_taken(port):
        yield failure("port", f"{name}={address}: port {port} {problem}", "choose another port, or end that program")
    else:
        yield ok("port", f"{name}={address}: port {port} is free")


def why_taken(port: int) -> str | None:
    """Return why this process cannot listen on `port`; None if it can."""
    try:
        with socket.create_server(("", port)):
            return None
    except PermissionError:
        return "is for root only"
    except OSError as error:
        return f"is taken{owner(port)} ({error.strerror})"


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
