"""Check GPUs, NVIDIA's driver, JAX's plug-in, the devices that JAX opens, and an all-reduce over them."""

import contextlib
import os
import pathlib
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdp.distributed import gpus, hosts
from jaxdp.doctor.check import Check, failure, ok, warning
from jaxdp.doctor.versions import plugins
from jaxdp.metrics.numbers import size

# The oldest driver for each CUDA of JAX's wheels: NVIDIA's table of minor version compatibility.
DRIVERS = {"cuda12": (525, 60), "cuda13": (580, 0)}
SMALL, LARGE = 1 << 20, 1 << 24  # float32 per device, on CPU and GPU, where latency would dominate
SLOW = 6e6  # bytes per second that any all-reduce should reach: a twentieth of gigabit Ethernet
QUERY = ["nvidia-smi", "--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits"]


def check_gpus(dev: str = "/dev", proc: str = "/proc") -> Iterator[Check]:
    """Check NVIDIA GPUs, their driver and JAX's plug-in, each of which needs the other two, and free memory."""
    count, kinds = gpus.count({}, dev), sorted({kind for kind, _ in plugins().values() if kind in DRIVERS})
    file = pathlib.Path(proc, "driver", "nvidia", "version")
    match = re.search(r"(\d{3,})\.(\d+)[.\d]*", file.read_text() if file.exists() else "")
    numbers = (int(match[1]), int(match[2])) if match else (0, 0)
    old = next((kind for kind in kinds if numbers < DRIVERS[kind]), "")
    present = f"{count} NVIDIA GPU{'s' * (count > 1)}"
    if not count and not kinds:
        yield ok("gpu", "none, and no plug-in for one")
    elif not count:
        text = f"JAX's plug-in for {', '.join(kinds)} is installed, but there is no GPU"
        yield warning("gpu", text, "in a container, pass it on (docker run --gpus all); else install NVIDIA's driver")
    elif not kinds:
        text = f"{present}, but JAX has no CUDA plug-in here: it would compute on the CPU"
        cuda = "cuda13" if numbers >= DRIVERS["cuda13"] else "cuda12"
        yield warning("gpu", text, f"pip install 'jaxdp-trainer[{cuda}]'")
    elif match is None:
        yield failure("gpu", f"{present}, but no driver is loaded", "install NVIDIA's driver, or reboot")
    elif old:
        fix = f"install driver {'.'.join(map(str, DRIVERS[old]))} or later, or the plug-in of an older CUDA"
        yield failure("gpu", f"driver {match[0]} is too old for {old}", fix)
    else:
        yield ok("gpu", f"{present}, driver {match[0]}, plug-in {', '.join(kinds)}")
    with contextlib.suppress(FileNotFoundError):
        usage = subprocess.run(QUERY, capture_output=True, text=True, timeout=10).stdout if count else ""
        for index, used, total in re.findall(r"^(\d+), (\d+), (\d+)$", usage, re.MULTILINE):
            if int(used) > 0.1 * int(total):
                text = f"GPU {index}: {used} of {total} MB are in use by other programs"
                yield warning("gpu", text, "see nvidia-smi; end them, or hide it by CUDA_VISIBLE_DEVICES")


def open_devices() -> dict[str, Any]:
    """Return this process's devices: platform, kind, count, uuids, and the bytes of memory of each, if JAX knows."""
    import jax

    local = jax.local_devices()
    return {
        "platform": local[0].platform,
        "kind": local[0].device_kind,
        "count": len(local),
        "memory": (local[0].memory_stats() or {}).get("bytes_limit"),
        "uuids": [getattr(d, "uuid", None) or f"{d.device_kind} {d.id}" for d in local],
    }


def check_devices(opened: Mapping[str, Any]) -> Iterator[Check]:
    """Check the result of `open_devices`."""
    memory = f", {size(opened['memory'])} each for JAX" if opened["memory"] else ""
    text = f"{opened['count']} x {opened['kind']} ({opened['platform']}){memory}"
    if opened["platform"] == "cpu" and gpus.count() and plugins() and not os.environ.get("JAX_PLATFORMS"):
        yield failure("devices", f"{text}: JAX does not open the GPU", "set JAX_PLATFORMS=cuda to see JAX's error")
    else:
        yield ok("devices", text)


def check_sharing(facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Check]:
    """Check that no two processes of a host opened one GPU."""
    on_gpu = [fact for fact in facts.values() if fact["platform"] != "cpu"]
    users = Counter((hosts.key(fact), uuid) for fact in on_gpu for uuid in fact["uuids"])
    for ((host, _), _), most in users.most_common(1):
        if most > 1:
            text = f"{most} processes use one GPU of host {host}: each gets 1/{most} of its memory and its time"
            yield warning("gpu sharing", text, "start as many processes on a host as it has GPUs")


def all_reduce(platform: str) -> dict[str, Any]:
    """Return the best seconds of an all-reduce over all devices, their number, and whether the sum is right."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    count, size = jax.device_count(), SMALL if platform == "cpu" else LARGE
    mesh, split = jax.make_mesh((count,), ("all",)), PartitionSpec("all")
    one = lambda index: np.full((1, size), index[0].start + 1, np.float32)
    x = jax.make_array_from_callback((count, size), NamedSharding(mesh, split), one)
    total = lambda x: jax.lax.psum(x, "all")
    reduce = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=split, out_specs=PartitionSpec(), check_vma=False))
    out, seconds = reduce(x).block_until_ready(), []
    for _ in range(5):
        began = time.perf_counter()
        out = reduce(x).block_until_ready()
        seconds.append(time.perf_counter() - began)
    right = (np.asarray(out.addressable_data(0)) == count * (count + 1) / 2).all()
    return {"seconds": min(seconds), "devices": count, "bytes": 4 * size, "right": bool(right)}


def check_all_reduce(opened: Mapping[str, Any]) -> Iterator[Check]:
    """Check what `all_reduce` measured, if it ran."""
    if (timed := opened.get("timed")) is None:
        return
    rate = timed["bytes"] / timed["seconds"]
    text = f"{timed['bytes'] / 1e6:.3g} MB over {timed['devices']} devices in {1e3 * timed['seconds']:.3g} ms"
    if not timed["right"]:
        fix = "see jaxdp verify; a device, a driver or a cable is broken"
        yield failure("all-reduce", f"{text}: the sum is wrong", fix)
    elif rate < SLOW:
        fix = "see the line on bindings, what else uses the hosts and the network; on GPU, what NCCL_DEBUG=INFO prints"
        yield warning("all-reduce", f"{text}: less than {SLOW / 1e6:g} MB/s", fix)
    else:
        yield ok("all-reduce", text)
