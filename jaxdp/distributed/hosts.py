"""A host is a name and the addresses it resolves to: others can reach it there, or nowhere."""

from __future__ import annotations

import ipaddress
import os
import random
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdp.errors import UsageError


def title(rank: int, host: str) -> str:
    """How a rank is named to people."""
    return f"rank {rank} (host {host})"


def split(address: str) -> tuple[str, int]:
    """Return ("host", port) of "host:port" or "[v6]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def hostname() -> str:
    """What this host calls itself."""
    return socket.gethostname()


def resolve(name: str) -> list[str]:
    """The addresses of `name`, IPv4 first; empty where it does not resolve."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return []
    return sorted((str(a).partition("%")[0] for a in found), key=lambda a: (":" in a, a))


def is_loopback(addr: str) -> bool:
    return ipaddress.ip_address(addr).is_loopback


def identity() -> dict[str, Any]:
    """What tells this host from the others: its name, its addresses, its kernel's boot id; and the process."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname()
    return {
        "host": name,
        "addresses": resolve(name),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "pid": os.getpid(),
        "spaces": [_namespace("net"), _namespace("pid")],
    }


def _namespace(kind: str) -> str:
    """Which network or process numbers this process shares with others on its host; containers have their own."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def outward() -> str | None:
    """The address this host uses towards others, where its own name does not tell; None where it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a datagram socket sends nothing by connecting
        except OSError:
            return None
        return str(probe.getsockname()[0])


def free_port() -> int:
    """A port nobody listens on, outside the range that the kernel hands out to outgoing connections."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    ports = [*range(max(high + 1, 20000), 65536)] or [*range(20000, low)]
    for port in random.SystemRandom().sample(ports, min(len(ports), 200)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise UsageError(f"rank 0 found no free port among {ports[0]} to {ports[-1]} on {socket.gethostname()}")


def own_addresses(host: str) -> list[str]:
    """The addresses of `host` that this process could listen at, IPv4 first."""
    return [addr for addr in resolve(host) if _can_listen(addr)]


def is_own(host: str) -> bool:
    """Whether this process could listen at `host`."""
    return bool(own_addresses(host))


def _can_listen(addr: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in addr else socket.AF_INET) as probe:
        try:
            probe.bind((addr, 0))
        except OSError:
            return False
        return True


def listening_address(host: str, one_host: bool) -> str | None:
    """The address that rank 0 listens at for those who look for it at `host`; None: all of them.

    All of them where `host` is no address of rank 0's own (a forwarded port, a service), and where it is a name that
    means the loopback here while other hosts may take it for another address (127.0.1.1, as on Debian).
    """
    addresses = own_addresses(host)
    if not addresses:
        return None
    named = host != "localhost" and host not in addresses
    return None if named and is_loopback(addresses[0]) and not one_host else addresses[0]


def key(hello: Mapping[str, Any]) -> tuple[str, str]:
    """Equal for two processes on one host. Names alone are not: cloned machines share them, and pods share a kernel."""
    return hello["host"], hello["boot"]


def on_one_host(hellos: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all processes share one host and its network, so that they can meet at its loopback address."""
    return len({(key(h), *h.get("spaces", [])[:1]) for h in hellos}) == 1


def meeting_address(hellos: Sequence[dict[str, Any]], port: int) -> str:
    """Where all of them reach rank 0: the loopback where there is one host, else an address of rank 0's name."""
    if on_one_host(hellos):
        return f"127.0.0.1:{port}"
    usable = [a for a in hellos[0]["addresses"] if not is_loopback(a)] + [hellos[0].get("outward")]
    if not usable[0]:
        raise UsageError(f"rank 0's host {hellos[0]['host']} has no address that the other hosts can reach", rank=0)
    return f"[{usable[0]}]:{port}" if ":" in usable[0] else f"{usable[0]}:{port}"


def check_reachable(hellos: Sequence[dict[str, Any]]) -> None:
    """Gloo (collectives on CPU) advertises whatever the host name resolves to: refuse names that others cannot use."""
    several = not on_one_host(hellos)
    for rank, hello in enumerate(hellos):
        host, addresses = hello["host"], hello["addresses"]
        if not hello["gloo"]:
            continue
        if not addresses:
            raise UsageError(
                f"rank {rank}: its host name {host} does not resolve, and Gloo would advertise it: "
                f"add {host} to /etc/hosts there, with {'its network address' if several else '127.0.0.1'}",
                rank=0,
            )
        if several and all(is_loopback(a) for a in addresses):
            raise UsageError(
                f"rank {rank}: its host name {host} resolves to {', '.join(addresses)}, and Gloo would advertise that "
                f"to the other hosts: in /etc/hosts of {host}, give {host} its network address",
                rank=0,
            )


def local_ranks(hellos: Sequence[dict[str, Any]], rank: int) -> tuple[int, int]:
    """(local_rank, local_size) of `rank`, by counting the processes on its host."""
    here = [r for r, h in enumerate(hellos) if key(h) == key(hellos[rank])]
    return here.index(rank), len(here)
