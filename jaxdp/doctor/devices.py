"""The devices that JAX sees are compared with those of the host: where one is missing, so is its driver or plug-in."""

from __future__ import annotations

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

# The least driver for each CUDA of JAX's wheels: NVIDIA's table of minor version compatibility.
DRIVERS = {"cuda12": (525, 60), "cuda13": (580, 0)}


def plugins() -> list[str]:
    """The kinds of GPU that JAX has a plug-in for: cuda12, cuda13, rocm7."""
    names = [dist.metadata["Name"] or "" for dist in importlib.metadata.distributions()]
    return sorted({kind[1] for name in names if (kind := PLUGIN.fullmatch(name))})


def driver(proc: str = "/proc") -> str | None:
    """The version of NVIDIA's driver; None where none is loaded."""
    file = pathlib.Path(proc) / "driver" / "nvidia" / "version"
    try:
        found = re.search(r"(\d{3,}\.\d+[.\d]*)", file.read_text())
    except OSError:
        return None
    return found[1] if found else ""


def check_gpus(dev: str = "/dev", proc: str = "/proc") -> Iterator[Check]:
    """GPUs, their driver and JAX's plug-in: each needs the other two."""
    count, version, kinds = gpus.count({}, dev), driver(proc), plugins()
    there = f"{count} NVIDIA GPU{'s' * (count > 1)}"
    kind = "cuda13" if version and version >= "580" else "cuda12"
    if count and not kinds:
        fix = f"pip install 'jaxdp[{kind}]'"
        yield warning(
            "gpu",
            f"{there}, but JAX has no CUDA plug-in here: it would compute on the CPU",
            fix,
        )
    elif kinds and not count and any(k.startswith("cuda") for k in kinds):
        found = f"JAX's plug-in for {', '.join(kinds)} is installed, but there is no GPU" + (
            ", and no driver" * (version is None)
        )
        yield warning(
            "gpu", found, "in a container, pass the GPUs on (docker run --gpus all); else install NVIDIA's driver"
        )
    elif count:
        yield from _of_driver(there, version, kinds)
    else:
        yield ok("gpu", "none, and no plug-in for one")
    if len(cudas := [k for k in kinds if k.startswith("cuda")]) > 1:
        fix = f"pip uninstall jax-{cudas[0]}-plugin jax-{cudas[0]}-pjrt"
        yield warning("gpu", f"plug-ins for {' and '.join(cudas)} are installed side by side", fix)


def _of_driver(there: str, version: str | None, kinds: list[str]) -> Iterator[Check]:
    if version is None:
        yield failure(
            "gpu",
            f"{there}, but no driver is loaded",
            "install NVIDIA's driver, or reboot",
        )
        return
    numbers = tuple(int(n) for n in version.split(".")[:2] if n)
    old = [k for k in kinds if numbers and numbers < DRIVERS.get(k, (0,))]
    if old:
        least = ".".join(map(str, DRIVERS[old[0]]))
        fix = f"install driver {least} or later{', or jaxdp[cuda12]' if old[0] == 'cuda13' else ''}"
        yield failure("gpu", f"driver {version} is too old for {old[0]}", fix)
    else:
        yield ok("gpu", f"{there}, driver {version}, plug-in {', '.join(kinds)}")
    yield from _used()


def _used() -> Iterator[Check]:
    """Memory that other programs hold."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return
    query = ["--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([program, *query], capture_output=True, text=True, timeout=8)
    except subprocess.TimeoutExpired:
        yield failure("gpu", "nvidia-smi does not answer: a GPU hangs", "see dmesg for Xid; reset the GPU or the host")
        return
    if done.returncode:
        text = " ".join(done.stdout.split())[:200]
        yield failure("gpu", f"nvidia-smi ends with code {done.returncode}: {text}", "reload the driver, or reboot")
        return
    rows = [[int(x) for x in re.findall(r"\d+", line)] for line in done.stdout.splitlines()]
    for index, used, total in (row for row in rows if len(row) == 3):
        if used > 0.1 * total:
            found = f"GPU {index}: {used:,} of {total:,} MB are in use by other programs"
            yield warning("gpu", found, "see nvidia-smi; end them, or hide it by CUDA_VISIBLE_DEVICES")


def check_devices(found: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """found: what `with_jax.devices` gave."""
    text = f"{found['count']} x {found['kind']} ({found['platform']})"
    if found["memory"]:
        text += f", {size(found['memory'])} each for JAX"
    wants = env.get("JAX_PLATFORMS", "")
    if found["platform"] == "cpu" and gpus.count(env) and plugins() and not wants:
        yield failure(
            "devices", f"{text}: JAX does not open the GPU", "run python -c 'import jax; jax.devices(\"cuda\")'"
        )
    else:
        yield ok("devices", text)


def check_sharing(facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Check]:
    """Processes of one host on one GPU, from what every rank opened."""
    users: Counter[tuple[Any, str]] = Counter()
    for fact in facts.values():
        if fact.get("platform") not in (None, "cpu"):
            users.update((hosts.key(fact), uuid) for uuid in fact["uuids"])
    for (host, _), count in sorted(users.items(), key=str)[:1]:
        most = max(users.values())
        if most > 1:
            found = (
                f"up to {most} processes on one GPU of host {host[0]}: each gets 1/{most} of its memory and its time"
            )
            yield warning("gpu sharing", found, "start as many processes on a host as it has GPUs")
        else:
            yield ok("gpu sharing", f"{len(users)} GPUs, each of one process, {count * len(users)} in all")
