"""Check GPUs, NVIDIA's driver, JAX's plug-in, the devices that JAX opens, and an all-reduce over
them.
"""

import contextlib
import os
import pathlib
import re
import subprocess
import timeit
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packaging.version import Version

from jaxdp.doctor.findings import Check, failure, ok, warning
from jaxdp.doctor.versions import plugins
from jaxdp.errors import install
from jaxdp.metrics.numbers import size
from jaxdp.process import environment, hosts

# The oldest driver for each CUDA of JAX's wheels: NVIDIA's table of minor version compatibility.
DRIVERS = {"cuda12": Version("525.60"), "cuda13": Version("580.0")}
SMALL, LARGE = 1 << 20, 1 << 24  # float32 per device, on CPU and GPU, where latency would dominate
SLOW = 6e6  # bytes per second that any all-reduce should reach: a twentieth of gigabit Ethernet
QUERY = [
    "nvidia-smi",
    "--query-gpu=index,memory.used,memory.total",
    "--format=csv,noheader,nounits",
]


def check_gpus(dev: str = "/dev", proc: str = "/proc") -> Iterator[Check]:
    """Check NVIDIA GPUs, their driver and JAX's plug-in, each of which needs the other two, and
    free memory.
    """
    count = environment.gpu_count({}, dev)
    kinds = sorted(DRIVERS.keys() & {kind for kind, _ in plugins().values()})
    file = pathlib.Path(proc, "driver", "nvidia", "version")
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    match = re.search(r"\d{3,}(\.\d+)+", text)
    number = match[0] if match else "0"
    driver = Version(number)
    old = next((kind for kind in kinds if driver < DRIVERS[kind]), "")
    present, names = f"{count} NVIDIA GPU{'s' * (count > 1)}", ", ".join(kinds)
    if not count and not kinds:
        yield ok("gpu", "none, and no plug-in for one")
    elif not count:
        fix = "in a container, pass it on (docker run --gpus all); else install NVIDIA's driver"
        yield warning("gpu", f"JAX's plug-in for {names} is installed, but there is no GPU", fix)
    elif not kinds:
        cuda = "cuda13" if driver >= DRIVERS["cuda13"] else "cuda12"
        text = f"{present}, but JAX has no CUDA plug-in here: it would compute on the CPU"
        yield warning("gpu", text, install(cuda))
    elif old:
        text = f"driver {number} is too old for {old}"
        if match is None:
            text = f"{present}, but no driver is loaded"
        fix = f"install NVIDIA's driver {DRIVERS[old]} or later, or the plug-in of an older CUDA"
        yield failure("gpu", text, fix)
    else:
        yield ok("gpu", f"{present}, driver {number}, plug-in {names}")
    with contextlib.suppress(FileNotFoundError):
        if not count:
            return
        usage = subprocess.run(
            QUERY, capture_output=True, encoding="utf-8", errors="replace", timeout=10
        ).stdout
        for index, used, total in re.findall(r"^(\d+), (\d+), (\d+)$", usage, re.MULTILINE):
            if int(used) > 0.1 * int(total):
                text = f"GPU {index}: {used} of {total} MB are in use by other programs"
                yield warning(
                    "gpu", text, "see nvidia-smi; end them, or hide it by CUDA_VISIBLE_DEVICES"
                )


def open_devices() -> tuple[Check, list[str]]:
    """Open this process's devices. Return the finding, and the unique id of each GPU."""
    import jax

    devices = jax.local_devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    text = f"{len(devices)} x {kind} ({platform}){f', {size(limit)} each for JAX' if limit else ''}"
    if platform != "cpu":
        return ok("devices", text), [getattr(d, "uuid", None) or f"{kind} {d.id}" for d in devices]
    if environment.gpu_count() and plugins() and not os.environ.get("JAX_PLATFORMS"):
        fix = "set JAX_PLATFORMS=cuda to see JAX's error"
        return failure("devices", f"{text}: JAX does not open the GPU", fix), []
    return ok("devices", text), []


def check_sharing(
    facts: Sequence[Mapping[str, Any]], opened: Sequence[Sequence[str]]
) -> list[Check]:
    """Check that no two processes of a host opened one GPU. facts, opened: of each rank, and its
    GPUs.
    """
    users = Counter((hosts.key(fact), gpu) for fact, own in zip(facts, opened) for gpu in own)
    for ((host, _), _), count in users.most_common(1):
        if count > 1:
            text = f"{count} processes use one GPU of host {host}: each gets 1/{count} of its memory and its time"
            fix = "start as many processes on a host as it has GPUs"
            return [warning("gpu sharing", text, fix)]
    return []


def all_reduce() -> dict[str, Any]:
    """Return the best seconds of an all-reduce over all devices, their number, and whether each
    local sum is right.
    """
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    count, size = jax.device_count(), SMALL if jax.devices()[0].platform == "cpu" else LARGE
    mesh, split = jax.make_mesh((count,), ("all",)), PartitionSpec("all")

    def one(index):
        return np.full((1, size), index[0].start + 1, np.float32)

    x = jax.make_array_from_callback((count, size), NamedSharding(mesh, split), one)

    def total(x):
        return jax.lax.psum(x, "all")

    reduce = jax.jit(
        jax.shard_map(total, mesh=mesh, in_specs=split, out_specs=PartitionSpec(), check_vma=False)
    )
    right = all(
        (np.asarray(s.data) == count * (count + 1) / 2).all() for s in reduce(x).addressable_shards
    )
    seconds = min(timeit.repeat(lambda: reduce(x).block_until_ready(), number=1, repeat=5))
    return {"seconds": seconds, "devices": count, "nbytes": 4 * size, "right": right}


def check_all_reduce(seconds: float, devices: int, nbytes: int, right: bool) -> Check:
    """Check what `all_reduce` measured."""
    text = f"{nbytes / 1e6:.3g} MB over {devices} devices in {1e3 * seconds:.3g} ms"
    if not right:
        return failure(
            "all-reduce",
            f"{text}: the sum is wrong",
            "see jaxdp verify; a device or a cable is broken",
        )
    if nbytes / seconds < SLOW:
        fix = "see the line on bindings, what else uses the hosts and the network; on GPU, what NCCL_DEBUG=INFO prints"
        return warning("all-reduce", f"{text}: less than {SLOW / 1e6:g} MB/s", fix)
    return ok("all-reduce", text)
