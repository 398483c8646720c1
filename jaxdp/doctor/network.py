"""Check the network: what host names resolve to, the coordinator's port, and TCP between the hosts of a job."""

import socket
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdp.distributed import hosts
from jaxdp.distributed.world import World
from jaxdp.doctor.check import Check, failure, ok, warning

HOSTS = 16  # other hosts that each host connects to, at most


def check_name() -> Iterator[Check]:
    """Check this host's name, which Gloo and MPI advertise to other hosts. A job that spans hosts checks it again."""
    name, outward = hosts.hostname(), hosts.outward()
    addresses = hosts.resolve(name)
    text = f"{name} resolves to {', '.join(addresses) or 'no address'}"
    if addresses and hosts.is_own(name) and not all(map(hosts.is_loopback, addresses)):
        yield ok("host name", text)
    else:
        fix = f"in /etc/hosts, give {name} its network address{f' ({outward})' if outward else ''}"
        yield warning("host name", f"{text}, and collectives on CPU would advertise that to other hosts", fix)


def check_reach(rank: int, facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Check]:
    """Check TCP to the next HOSTS other hosts, from the first rank of each host. facts: with a `port` of each rank."""
    firsts = {hosts.key(fact): r for r, fact in reversed(list(facts.items()))}
    others = sorted(set(firsts.values()) - {rank}, key=lambda other: (other - rank) % len(facts))[:HOSTS]
    others = others if rank in firsts.values() else []
    reached = len(others)
    for other in others:
        fact = facts[other]
        addresses = [a for a in hosts.resolve(fact["host"]) or fact["addresses"] if not hosts.is_loopback(a)]
        address = (addresses or [fact["outward"] or "no address"])[0]
        try:
            socket.create_connection((address, fact["port"]), 5.0).close()
        except OSError as error:
            reached -= 1
            text = f"{hosts.title(other, fact['host'])} is not reached from {facts[rank]['host']} at {address}: {error}"
            fix = "see routes, and whether a firewall lets the job's hosts connect to each other on any port"
            yield failure("network", text, fix)
    if others and reached == len(others):
        yield ok("network", f"{reached} other host{'s' * (reached > 1)} reached")


def check_port(world: World | None) -> Iterator[Check]:
    """Check that rank 0 can listen on the coordinator's port, if one is set. `jaxdp.init` checks its address."""
    if world is None or world.coordinator is None or world.rank != 0:
        return
    port = hosts.split(world.coordinator)[1]
    text = f"port {port} of the coordinator, {world.coordinator}, is"
    try:
        socket.create_server(("", port)).close()
        yield ok("port", f"{text} free")
    except OSError as error:
        yield failure("port", f"{text} taken ({error.strerror})", "choose another port, or end its program")
