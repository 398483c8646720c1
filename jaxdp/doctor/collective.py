"""Check an all-reduce over all devices: its result, and its time against what the links should give."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxdp.doctor.check import Check, failure, ok, warning

NAME = "all-reduce"
SMALL, LARGE = 1 << 20, 1 << 24  # float32 per device: 4 MB on CPU; 64 MB on GPU, where latency would dominate
SLACK, PAUSE = 10.0, 0.05  # a normal time on a shared machine: so many times the expected one, and seconds beside
ADVICE = {
    "gpu": "set NCCL_DEBUG=INFO and see which links it takes: NVLink, InfiniBand, or sockets",
    "hosts": "see what else is on the network, and which of its interfaces the host names resolve to",
    "host": "see what else runs here, and the line on bindings; mpirun --bind-to none",
}


def elements(platform: str) -> int:
    return SMALL if platform == "cpu" else LARGE


def check_collective(
    timed: Mapping[str, Any], platform: str, kind: str, hosts: int, link: float | None, processes: int
) -> Iterator[Check]:
    """Check the result of `tasks.all_reduce`.

    link: bytes per second of the slowest TCP link that was measured. On CPU, Gloo's ring of n processes sends
    2 (n - 1)/n of the bytes over it; on GPU the model of `jaxdp.analysis.hardware` gives the expected time.
    """
    n, size = timed["devices"], 4 * elements(platform)
    text = f"{size / 1e6:.3g} MB over {n} devices in {1e3 * timed['seconds']:.3g} ms"
    if not timed["right"]:
        yield failure(NAME, f"{text}: the sum is wrong", "see jaxdp verify; a device, a driver or a cable is broken")
        return
    expected, basis = None, ""
    if platform != "cpu":
        expected, basis = from_data_sheet(kind, size, n, hosts)
    elif processes > 1 and link:
        per_host = max(1, -(-processes // hosts)) if hosts > 1 else 1  # processes share their host's one link
        expected = 2 * (processes - 1) / processes * size * per_host / link
        basis = f"TCP {'between hosts' if hosts > 1 else 'on this host'} gave {link / 1e9:.2g} GB/s"
    if expected is None:
        yield ok(NAME, text)
        return
    text += f"; {1e3 * expected:.3g} ms expected ({basis})"
    if timed["seconds"] > SLACK * expected + PAUSE:
        fix = ADVICE["gpu" if platform != "cpu" else "hosts" if hosts > 1 else "host"]
        yield warning(NAME, f"{text}: more than {SLACK:g} times that", fix)
    else:
        yield ok(NAME, text)


def from_data_sheet(kind: str, size: int, devices: int, hosts: int) -> tuple[float | None, str]:
    """Return (the seconds of an all-reduce on such GPUs, where they come from)."""
    from jaxdp.analysis.hardware import HARDWARE, collective_seconds

    hardware = next((hw for name, hw in HARDWARE.items() if name.partition("-")[0] in kind.lower()), None)
    if hardware is None:
        return None, ""
    seconds = collective_seconds(hardware, "all-reduce", size, devices, max(1, devices // hosts))
    return seconds, f"the model of {hardware.name}"
