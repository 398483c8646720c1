"""An all-reduce over all devices is timed against what the links should give: far below, something is in its way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxdp.doctor.check import Check, failure, ok, warning

NAME = "all-reduce"
ELEMENTS = {"cpu": 1 << 20}  # float32, per device: 4 MB, so that little memory will do
LARGE = 1 << 24  # on GPUs: 64 MB, or the latency is all that is seen
SLACK = 10.0  # how many times the expected time is taken for normal: machines are shared
PAUSE = 0.05  # seconds that other programs on the processor may take, whatever the links give


def elements(platform: str) -> int:
    return ELEMENTS.get(platform, LARGE)


def check_collective(
    timed: Mapping[str, Any], platform: str, kind: str, hosts: int, link: float | None, processes: int
) -> Iterator[Check]:
    """timed: what `with_jax.all_reduce` gave. link: bytes per second of the slowest link that was tried over TCP.

    Over Gloo, n processes in a ring pass on 2 (n - 1)/n of the bytes each, over the link as it was measured by itself;
    on GPUs the model of `jaxdp.hardware` says what is expected, from the data sheets. Where neither says, nothing is
    judged.
    """
    n, size = timed["devices"], 4 * elements(platform)
    text = f"{size / 1e6:.3g} MB over {n} devices in {1e3 * timed['seconds']:.3g} ms"
    if not timed["right"]:
        yield failure(NAME, f"{text}: the sum is wrong", "see jaxdp verify; a device, a driver or a cable is broken")
        return
    expected, basis = expectation(platform, kind, n, hosts, link, processes, size)
    if expected is None:
        yield ok(NAME, text)
        return
    text += f"; {1e3 * expected:.3g} ms expected ({basis})"
    if timed["seconds"] > SLACK * expected + PAUSE:
        yield warning(NAME, f"{text}: more than {SLACK:g} times that", advice(platform, hosts))
    else:
        yield ok(NAME, text)


def expectation(
    platform: str, kind: str, n: int, hosts: int, link: float | None, processes: int, size: int
) -> tuple[float | None, str]:
    """(seconds of an all-reduce of `size` bytes, what they are derived from)."""
    if platform == "cpu":
        if processes == 1 or not link:
            return None, ""
        share = max(1, -(-processes // hosts)) if hosts > 1 else 1  # of a host's one link
        passed = 2 * (processes - 1) / processes * size * share
        return passed / link, f"TCP {'between hosts' if hosts > 1 else 'on this host'} gave {link / 1e9:.2g} GB/s"
    from jaxdp.hardware import HARDWARE, collective_seconds

    known = next((hw for name, hw in HARDWARE.items() if name.partition("-")[0] in kind.lower()), None)
    if known is None:
        return None, ""
    return collective_seconds(known, "all-reduce", size, n, max(1, n // hosts)), f"the model of {known.name}"


def advice(platform: str, hosts: int) -> str:
    if platform != "cpu":
        return "set NCCL_DEBUG=INFO and see which links it takes: NVLink, InfiniBand, or sockets"
    if hosts > 1:
        return "see what else is on the network, and which of its interfaces the host names resolve to"
    return "see what else runs here, and the line on bindings; mpirun --bind-to none"
