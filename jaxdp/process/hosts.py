"""Host names, addresses and memory, and the address at which the processes of a job reach each
other.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import random
import re
import resource
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdp.errors import UsageError

Facts = dict[str, Any]  # of a rank, see `jaxdp.process.protocol.FACTS`
BACKLOG = 4096  # connections that wait to be accepted, as far as net.core.somaxconn allows


def title(rank: int, host: str) -> str:
    """Return the name of a rank in messages."""
    return f"rank {rank} (host {host})"


def listed(names: Iterable[object], most: int = 8) -> str:
    """Return the names for a message: of many, the first, and the number of the others."""
    texts = [*map(str, names)]
    others = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {others} others" if others > 0 else "")


def split(address: str) -> tuple[str, int]:
    """Return ("host", port) of "host:port" or "[v6]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def hostname() -> str:
    """Return the name of this host."""
    return socket.gethostname()


def resolve(name: str) -> list[str]:
    """Return the addresses of `name`, IPv4 first; an empty list if it does not resolve."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return []
    return sorted((str(a).partition("%")[0] for a in addresses), key=lambda a: (":" in a, a))


def is_loopback(addr: str) -> bool:
    return ipaddress.ip_address(addr).is_loopback


def identity() -> Facts:
    """Return what identifies this host (name, addresses, boot id of the kernel) and this process.

    That is its id and its network namespace: containers on one host have different ones.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = ""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return {
        "host": name,
        "addresses": resolve(name),
        "boot": boot.read_text(encoding="utf-8").strip() if boot.exists() else "",
        "pid": os.getpid(),
        "network": network,
    }


def outward() -> str | None:
    """Return the address that this host uses for outgoing traffic; None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a datagram socket sends nothing by connecting
        except OSError:
            return None
        return str(probe.getsockname()[0])


def free_port() -> int:
    """Return an unused port outside the range that the kernel assigns to outgoing connections."""
    try:
        low, high = map(
            int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()
        )
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
    raise UsageError(
        f"rank 0 found no free port among {ports[0]} to {ports[-1]} on {socket.gethostname()}"
    )


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on an address of this host, or on all of them ("::"). Raises
    OSError.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server(
        (address, port), family=family, backlog=BACKLOG, dualstack_ipv6=address == "::"
    )


def own_addresses(host: str) -> list[str]:
    """Return the addresses of `host` that this process can bind, IPv4 first."""
    return [addr for addr in resolve(host) if _can_bind(addr)]


def is_own(host: str) -> bool:
    """Return whether this process can bind an address of `host`."""
    return bool(own_addresses(host))


def _can_bind(addr: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in addr else socket.AF_INET) as probe:
        try:
            probe.bind((addr, 0))
        except OSError:
            return False
        return True


def listening_address(host: str, one_host: bool) -> str | None:
    """Return the address that rank 0 listens on when other ranks connect to `host`; None for all
    addresses.

    It is None if `host` is not an address of rank 0's host (a forwarded port, a Kubernetes
    service), or if it is a name that resolves to the loopback on rank 0 (127.0.1.1, as on Debian)
    and may resolve to another address elsewhere."""
    addresses = own_addresses(host)
    if not addresses:
        return None
    named = host != "localhost" and host not in addresses
    return None if named and is_loopback(addresses[0]) and not one_host else addresses[0]


def key(facts: Mapping[str, Any]) -> tuple[str, str]:
    """Return the identity of a host: name and boot id, since cloned machines share a name and pods
    share a kernel.
    """
    return facts["host"], facts["boot"]


def on_one_host(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all ranks share one host and its network namespace, and so its loopback
    address.
    """
    return len({(key(facts), facts.get("network")) for facts in ranks}) == 1


def meeting_address(ranks: Sequence[Facts], port: int) -> str:
    """Return the "host:port" at which all ranks reach rank 0: the loopback on one host, else an
    address of its name.
    """
    if on_one_host(ranks):
        return f"127.0.0.1:{port}"
    usable = [a for a in ranks[0]["addresses"] if not is_loopback(a)] + [ranks[0].get("outward")]
    if not usable[0]:
        raise UsageError(
            f"rank 0's host {ranks[0]['host']} has no address that the other hosts can reach",
            rank=0,
        )
    return join(usable[0], port)


def check_reachable(ranks: Sequence[Facts]) -> None:
    """Raise UsageError if Gloo (collectives on CPU) would advertise a host name that the other
    ranks cannot use.
    """
    several = not on_one_host(ranks)
    for rank, facts in enumerate(ranks):
        host = facts["host"]
        addresses = facts["addresses"]
        if not facts["gloo"]:
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


def local_ranks(ranks: Sequence[Facts], rank: int) -> tuple[int, int]:
    """Return (local_rank, local_size) of `rank` by counting the ranks on its host. ranks: the facts
    of each rank.
    """
    local = [r for r, facts in enumerate(ranks) if key(facts) == key(ranks[rank])]
    return local.index(rank), len(local)


def raise_open_files() -> None:
    """Let this process open as many files as its hard limit allows, up to 65,536.

    The coordinator has a connection to each process, and Gloo keeps one for each pair of devices
    and each clique."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def free_memory() -> float:
    """Return the bytes that this process can still allocate on its host or in its control groups;
    inf if unknown.
    """
    free = [math.inf]
    with contextlib.suppress(OSError):
        free += [
            1024.0 * int(n)
            for n in re.findall(
                r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8")
            )
        ]
    for folder in control_groups("memory"):
        for most, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):  # ValueError: "max", which is no limit
                free.append(
                    int((folder / most).read_text(encoding="utf-8"))
                    - int((folder / used).read_text(encoding="utf-8"))
                )
    return min(free)


def core_quota() -> float:
    """Return the CPU time, in cores, that this process's control groups allow; inf without a limit."""
    quotas = [math.inf]
    for folder in control_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, (folder / "cpu.max").read_text(encoding="utf-8").split())
            quotas.append(quota / period)
        with contextlib.suppress(OSError, ValueError):
            quota, period = (
                int((folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8"))
                for name in ("quota", "period")
            )
            quotas += [quota / period] if quota > 0 else []
    return min(quotas)


def control_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's control group and of those around it, of version 2 and
    of version 1.

    Inside a container the group's path may be that of the host, which is not mounted: then only the
    top is there. root: see cgroups(7) for the files below it.
    """
    mount = root / "sys/fs/cgroup"
    folders = [mount, mount / controller]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, names, path = line.split(":", 2)
            if not names or controller in names.split(","):
                top = mount / controller if names else mount
                inside = top / path.lstrip("/")
                folders += [folder for folder in (inside, *inside.parents) if top in folder.parents]
    return folders
