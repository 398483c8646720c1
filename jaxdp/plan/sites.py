"""Traffic and time of training over a slow network: of an all-reduce between sites, every so many
updates.
"""

import re
from typing import NamedTuple

from jaxdp.errors import UsageError
from jaxdp.metrics.numbers import scaled, size

UNITS = {"KBIT": 1e3, "MBIT": 1e6, "GBIT": 1e9}


class Network(NamedTuple):
    """The network of a site: bits per second, in each direction, and the seconds that a message
    takes.
    """

    rate: float
    latency: float


def read_network(text: str) -> Network:
    """Parse a network such as 100mbit:40ms, or 1gbit."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)([KMG]BIT)(?::(\d+(?:\.\d*)?)MS)?", text.strip().upper())
    if not match or not float(match[1]):
        raise UsageError(f"--network: {text!r} is not a rate and a latency, such as 100mbit:40ms")
    return Network(float(match[1]) * UNITS[match[2]], float(match[3] or 0) / 1e3)


def describe(
    sites: int, data: float, every: int, compute: float | None, network: Network | None
) -> list[str]:
    """Return lines on the traffic of a site and the time that it takes, without overlap.

    The all-reduce is a ring: each site sends 2 (sites - 1) messages, in all 2 (sites - 1) / sites
    of the data.

    Args:
        data: bytes that are summed, once in `every` updates.
        compute: seconds of an update without communication; None if unknown.
    """
    if sites == 1:
        return ["one device computes all replicas: nothing is sent between sites"]
    sent = 2 * (sites - 1) / sites * data
    lines = [
        f"{sites} sites: each sends {size(sent)} once in {every} updates; the rows above count that in each update"
    ]
    if network is not None and compute is not None:
        exchange = 8 * sent / network.rate + 2 * (sites - 1) * network.latency
        update = compute + exchange / every
        lines += [
            f"over {scaled(network.rate)}bit/s with {1e3 * network.latency:g} ms: {exchange:.3g} s an exchange, "
            f"{1 / update:.3g} updates/s, {compute / update:.1%} of the time computing, "
            f"{size(3600 / update * sent / every)} an hour from each site"
        ]
    return lines
