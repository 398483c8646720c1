"""Time an all-reduce over all devices, and check its result, and its time against what the links should give."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdp.doctor.check import Check, failure, ok, warning

NAME = "all-reduce"
SMALL, LARGE = 1 << 20, 1 << 24  # float32 per device: 4 MB on CPU; 64 MB on GPU, where latency would dominate
SLACK, PAUSE = 10.0, 0.05  # normal on a shared machine: this many times the expected seconds, plus PAUSE
ADVICE = {
    "gpu": "set NCCL_DEBUG=INFO and see which links it takes: NVLink, InfiniBand, or sockets",
    "hosts": "see what else is on the network, and which of its interfaces the host names resolve to",
    "host": "see what else runs on this host, and the line on bindings; mpirun --bind-to none",
}


def all_reduce(platform: str, times: int = 5) -> dict[str, Any]:
    """Return the best seconds of an all-reduce over all devices, their number, and whether the sum is right."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh, count = Mesh(np.array(jax.devices()), ("all",)), jax.device_count()
    split = NamedSharding(mesh, PartitionSpec("all"))
    numbers = np.arange(1, count + 1, dtype=np.float32)[:, None]
    ranks = jax.make_array_from_callback((count, 1), split, lambda index: numbers[index])
    x = jax.jit(lambda r: jnp.broadcast_to(r, (count, elements(platform))), out_shardings=split)(ranks)
    total = lambda x: jax.lax.psum(x, "all")
    mapped = jax.shard_map(total, mesh=mesh, in_specs=PartitionSpec("all"), out_specs=PartitionSpec(), check_vma=False)
    reduce = jax.jit(mapped)
    out, seconds = reduce(x).block_until_ready(), []
    for _ in range(times):
        began = time.perf_counter()
        out = reduce(x).block_until_ready()
        seconds.append(time.perf_counter() - began)
    right = (np.asarray(out.addressable_data(0)) == numbers.sum()).all()
    return {"seconds": min(seconds), "devices": count, "right": bool(right)}


def elements(platform: str) -> int:
    return SMALL if platform == "cpu" else LARGE


def check_collective(
    timed: Mapping[str, Any], platform: str, kind: str, hosts: int, link: float | None, processes: int
) -> Iterator[Check]:
    """Check the result of `all_reduce`.

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
    """Return (the expected seconds of an all-reduce on such GPUs, the name of the model)."""
    from jaxdp.analysis.hardware import HARDWARE, collective_seconds

    hardware = next((hw for name, hw in HARDWARE.items() if name.partition("-")[0] in kind.lower()), None)
    if hardware is None:
        return None, ""
    seconds = collective_seconds(hardware, "all-reduce", size, devices, max(1, devices // hosts))
    return seconds, f"the model of {hardware.name}"
