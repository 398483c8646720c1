"""A preset is a row of XLA's own switches, probed before they are set: XLA aborts at one that it does not know."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys

from jaxdp import environment
from jaxdp.distributed import gpus, launchers

COMBINE = str(32 * 2**20)  # bytes: pieces that are on their way while the backward pass goes on
OVERLAP = {
    "--xla_gpu_enable_latency_hiding_scheduler": "true",
    "--xla_gpu_enable_pipelined_all_reduce": "true",
    "--xla_gpu_enable_pipelined_all_gather": "true",
    "--xla_gpu_enable_pipelined_reduce_scatter": "true",
    "--xla_gpu_enable_while_loop_double_buffering": "true",
    "--xla_gpu_all_reduce_combine_threshold_bytes": COMBINE,
    "--xla_gpu_all_gather_combine_threshold_bytes": COMBINE,
    "--xla_gpu_reduce_scatter_combine_threshold_bytes": COMBINE,
}
PRESETS: dict[str, dict[str, str]] = {"default": {}, "overlap": OVERLAP}
"""Flags of XLA_FLAGS that let collectives overlap with the backward pass on GPUs (docs.jax.dev, "GPU performance
tips"); their order is that in which they matter."""

PLUGINS = ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")
TIMEOUT = 120.0  # seconds for JAX to open its devices once


def use(preset: str, devices: int | None = None, here: int | None = None) -> str | None:
    """Sets what a preset names and XLA knows, before JAX starts; flags that XLA_FLAGS has already stay.

    devices: as in `parallel.devices`; here: GPUs of this host, else they are counted. Nothing is set for one device, or
    without a GPU. Returns in a line what was left out, the first time that it is found out.
    """
    flags = PRESETS[preset]
    if not flags or not several(devices, gpus.count() if here is None else here):
        return None
    unknown, first = probed(flags)
    if unknown is None:
        return f"parallel.xla_preset: {preset} is left out, since a process that tried it could not open the devices"
    for name, value in flags.items():
        if name not in unknown:
            environment.add_flag(f"{name}={value}")
    if unknown and first:
        return f"parallel.xla_preset: {preset} without {', '.join(sorted(unknown))}, which this XLA does not know"
    return None


def several(devices: int | None, here: int) -> bool:
    """Whether there is more than one GPU to train on, as far as can be told before any is opened."""
    visible = gpus.visible_devices()
    if visible is not None:
        here = min(here, len([d for d in visible.split(",") if d.strip() not in ("", "-1")]))
    return here > 0 and (launchers.discover().size > 1 or min(here, devices or here) > 1)


def probed(flags: dict[str, str]) -> tuple[set[str] | None, bool]:
    """(those that XLA does not know, or None where it cannot be told; whether this was found out now)

    Found out once for each version of JAX's libraries.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        known = json.loads(kept_in().read_text())
        if isinstance(known, dict) and set(flags) <= set(known):
            return {name for name in flags if not known[name]}, False
    unknown = probe(flags)
    if unknown is None:
        return None, True
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
        file = kept_in()
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.write_text(json.dumps({name: name not in unknown for name in flags}))
        new.replace(file)
    return unknown, True


def kept_in() -> pathlib.Path:
    """The file of what was found out."""
    return environment.user_cache() / f"xla_flags-{_versions()}.json"


def probe(flags: dict[str, str]) -> set[str] | None:
    """Those that XLA does not know, by a process that opens JAX's devices with them; None where it fails otherwise."""
    left, unknown = dict(flags), set[str]()
    while left:
        env = {**os.environ, "XLA_FLAGS": " ".join(f"{name}={value}" for name, value in left.items())}
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        command = [sys.executable, "-c", "import jax; jax.devices()"]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return None
        if done.returncode == 0:
            break
        complaint = done.stderr.partition("nknown flag")[2].partition("\n")[0]
        named = {name for name in left if re.search(rf"{name}\b", complaint)}
        if not named:
            return None
        unknown |= named
        left = {name: value for name, value in left.items() if name not in named}
    return unknown


def _versions() -> str:
    import importlib.metadata  # takes 20 ms, which most starts need not spend

    found = []
    for name in PLUGINS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(importlib.metadata.version(name))
    return "-".join(found)
