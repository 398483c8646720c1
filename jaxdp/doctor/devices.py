"""Check that the host's GPUs, NVIDIA's driver, JAX's plug-in and the devices that JAX opens agree."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdp.distributed import gpus, hosts
from jaxdp.doctor.check import Check, failure, ok, warning
from jaxdp.doctor.versions import PLUGIN
from jaxdp.metrics.numbers import size

# The oldest driver for each CUDA of JAX's wheels: NVIDIA's table of minor version compatibility.
DRIVERS = {"cuda12": (525, 60), "cuda13": (580, 0)}
QUERY = ["--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits"]


def plugins() -> list[str]:
    """Return the kinds of GPU that JAX has a plug-in for: cuda12, cuda13, rocm7."""
    names = [dist.metadata["Name"] or "" for dist in importlib.metadata.distributions()]
    return sorted({kind[1] for name in names if (kind := PLUGIN.fullmatch(name))})


def driver_version(proc: str = "/proc") -> str | None:
    """Return the version of NVIDIA's driver; None if none is loaded."""
    try:
        text = (pathlib.Path(proc) / "driver" / "nvidia" / "version").read_text()
    except OSError:
        return None
    match = re.search(r"\d{3,}\.\d+[.\d]*", text)
    return match[0] if match else ""


def check_gpus(dev: str = "/dev", proc: str = "/proc") -> Iterator[Check]:
    """Check GPUs, their driver and JAX's plug-in: each needs the other two."""
    count, version, kinds = gpus.count({}, dev), driver_version(proc), plugins()
    cudas = [kind for kind in kinds if kind.startswith("cuda")]
    present = f"{count} NVIDIA GPU{'s' * (count > 1)}"
    if count and not kinds:
        kind = "cuda13" if version and version >= "580" else "cuda12"
        text = f"{present}, but JAX has no CUDA plug-in here: it would compute on the CPU"
        yield warning("gpu", text, f"pip install 'jaxdp-trainer[{kind}]'")
    elif count and version is None:
        yield failure("gpu", f"{present}, but no driver is loaded", "install NVIDIA's driver, or reboot")
    elif count:
        numbers = tuple(int(n) for n in (version or "").split(".")[:2] if n)
        old = [kind for kind in kinds if numbers and numbers < DRIVERS.get(kind, (0,))]
        if old:
            least = ".".join(map(str, DRIVERS[old[0]]))
            fix = f"install driver {least} or later{', or jaxdp-trainer[cuda12]' if old[0] == 'cuda13' else ''}"
            yield failure("gpu", f"driver {version} is too old for {old[0]}", fix)
        else:
            yield ok("gpu", f"{present}, driver {version}, plug-in {', '.join(kinds)}")
        yield from check_gpu_memory()
    elif cudas:
        driver = "" if version else ", and no driver"
        text = f"JAX's plug-in for {', '.join(cudas)} is installed, but there is no GPU{driver}"
        fix = "in a container, pass the GPUs on (docker run --gpus all); else install NVIDIA's driver"
        yield warning("gpu", text, fix)
    else:
        yield ok("gpu", "none, and no plug-in for one")
    if len(cudas) > 1:
        fix = f"pip uninstall jax-{cudas[0]}-plugin jax-{cudas[0]}-pjrt"
        yield warning("gpu", f"plug-ins for {' and '.join(cudas)} are installed side by side", fix)


def check_gpu_memory() -> Iterator[Check]:
    """Check that nvidia-smi answers, and that no other program uses the GPUs' memory."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return
    try:
        done = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=7)
    except subprocess.TimeoutExpired:
        yield failure("gpu", "nvidia-smi does not answer: a GPU hangs", "see dmesg for Xid; reset the GPU or the host")
        return
    if done.returncode:
        text = f"nvidia-smi ends with code {done.returncode}: {' '.join(done.stdout.split())[:200]}"
        yield failure("gpu", text, "reload the driver, or reboot")
        return
    rows = [[int(x) for x in re.findall(r"\d+", line)] for line in done.stdout.splitlines()]
    for index, used, total in (row for row in rows if len(row) == 3):
        if used > 0.1 * total:
            text = f"GPU {index}: {used:,} of {total:,} MB are in use by other programs"
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


def check_devices(opened: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Check the result of `open_devices`."""
    text = f"{opened['count']} x {opened['kind']} ({opened['platform']})"
    if opened["memory"]:
        text += f", {size(opened['memory'])} each for JAX"
    if opened["platform"] == "cpu" and gpus.count(env) and plugins() and not env.get("JAX_PLATFORMS"):
        fix = "run python -c 'import jax; jax.devices(\"cuda\")'"
        yield failure("devices", f"{text}: JAX does not open the GPU", fix)
    else:
        yield ok("devices", text)


def check_sharing(facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Check]:
    """Check that no two processes of a host opened one GPU."""
    on_gpu = [fact for fact in facts.values() if fact["platform"] != "cpu"]
    users = Counter((hosts.key(fact), fact["host"], uuid) for fact in on_gpu for uuid in fact["uuids"])
    for (_, host, _), most in users.most_common(1):
        if most > 1:
            text = f"{most} processes use one GPU of host {host}: each gets 1/{most} of its memory and its time"
            yield warning("gpu sharing", text, "start as many processes on a host as it has GPUs")
        else:
            yield ok("gpu sharing", f"{len(users)} GPUs, each of one process")
