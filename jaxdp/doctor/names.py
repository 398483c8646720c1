"""A host is known by its own name, and reached by what that resolves to."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdp.distributed import hosts
from jaxdp.doctor.check import Check, failure, ok, warning


def check_name(processes: int = 1, several: bool = False) -> Iterator[Check]:
    """This host's own name, which Gloo and MPI advertise to other processes. several: the job spans hosts."""
    name = hosts.hostname()
    addresses = hosts.resolve(name)
    network = f" ({outward})" if (outward := hosts.outward()) else ""
    bad = failure if several else warning
    when = "" if several else "; it matters when a job spans hosts"
    if not addresses:
        line = f"{outward or '127.0.0.1'} {name}"
        fix = f"add the line '{line}' to /etc/hosts, or mend the name server"
        bad = failure if processes > 1 else warning
        yield bad("host name", f"{name} does not resolve, and collectives on CPU advertise it", fix)
    elif all(hosts.is_loopback(a) for a in addresses):
        found = f"{name} resolves to {', '.join(addresses)}, and collectives on CPU would advertise that{when}"
        yield bad("host name", found, f"in /etc/hosts, give {name} its network address{network}")
    elif not hosts.is_own(name):
        found = f"{name} resolves to {', '.join(addresses)}, which is no address of this host{when}"
        yield bad("host name", found, f"in /etc/hosts or the name server, give {name} its address{network}")
    else:
        yield ok("host name", f"{name} resolves to {', '.join(addresses)}")
