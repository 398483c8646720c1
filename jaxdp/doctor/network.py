"""Check the network: what host names resolve to, and TCP between the hosts of a job."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxdp.doctor.findings import Check, failure, ok, warning
from jaxdp.process import hosts

HOSTS = 16  # other hosts that each host connects to, at most


def check_name() -> Iterator[Check]:
    """Check this host's name, which Gloo and MPI advertise to other hosts. A job that spans hosts
    checks it again.
    """
    name, outward = hosts.hostname(), hosts.outward()
    addresses = hosts.resolve(name)
    text = f"{name} resolves to {', '.join(addresses) or 'no address'}"
    if addresses and hosts.is_own(name) and not all(map(hosts.is_loopback, addresses)):
        yield ok("host name", text)
    else:
        fix = f"in /etc/hosts, give {name} its network address{f' ({outward})' if outward else ''}"
        yield warning(
            "host name", f"{text}, and collectives on CPU would advertise that to other hosts", fix
        )


def check_reach(rank: int, facts: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Check TCP to the next HOSTS other hosts, to the first rank of each. facts: of each rank, with
    a `port`.
    """
    firsts = {hosts.key(fact): r for r, fact in reversed(list(enumerate(facts)))}
    firsts.pop(hosts.key(facts[rank]))
    others = sorted(firsts.values(), key=lambda other: (other - rank) % len(facts))[:HOSTS]
    failures = []
    for other in others:
        fact = facts[other]
        addresses = [
            a for a in hosts.resolve(fact["host"]) or fact["addresses"] if not hosts.is_loopback(a)
        ]
        address = (addresses or [fact["outward"] or "no address"])[0]
        try:
            socket.create_connection((address, fact["port"]), 5.0).close()
        except OSError as error:
            text = f"{hosts.title(other, fact['host'])} is not reached from {facts[rank]['host']} at {address}: {error}"
            fix = "see routes, and whether a firewall lets the job's hosts connect to each other on any port"
            failures.append(failure("network", text, fix))
    reached = ok("network", f"{len(others)} other host{'s' * (len(others) > 1)} reached")
    yield from failures or [reached] * bool(others)
