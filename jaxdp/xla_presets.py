"""Presets of XLA flags, probed before they are set, since XLA aborts at a flag that it does not know."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys

from jaxdp import environment
from jaxdp.distributed import gpus, launchers

COMBINE = str(32 * 2**20)  # bytes: small enough to send while the backward pass continues
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
"""XLA_FLAGS that let collectives overlap with the backward pass on GPUs (docs.jax.dev, "GPU performance tips"), the
most important first."""

PLUGINS = ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")
TIMEOUT = 120.0  # seconds for JAX to open its devices once


def use(preset: str, devices: int | None = None, local_gpus: int | None = None) -> str | None:
    """Set the flags of a preset that XLA knows, before JAX starts; flags that are already in XLA_FLAGS are kept.

    devices: as in `parallel.devices`; local_gpus: GPUs of this host, counted if None. Sets nothing for one device, or
    without a GPU. Returns a line about ignored flags, only when they were probed in this call.
    """
    flags = PRESETS[preset]
    if not flags or not several(devices, gpus.count() if local_gpus is None else local_gpus):
        return None
    unknown, first = probed(flags)
    if unknown is None:
        return f"parallel.xla_preset: {preset} is ignored: a process that tried it could not open the devices"
    for name, value in flags.items():
        if name not in unknown:
            environment.add_flag(f"{name}={value}")
    if unknown and first:
        return f"parallel.xla_preset: {preset} without {', '.join(sorted(unknown))}, which this XLA does not know"
    return None


def several(devices: int | None, local_gpus: int) -> bool:
    """Return True if there is more than one GPU to train on, as far as is known before any is opened."""
    visible = gpus.visible_devices()
    if visible is not None:
        local_gpus = min(local_gpus, len([d for d in visible.split(",") if d.strip() not in ("", "-1")]))
    return local_gpus > 0 and (launchers.discover().size > 1 or min(local_gpus, devices or local_gpus) > 1)


def probed(flags: dict[str, str]) -> tuple[set[str] | None, bool]:
    """Return (the flags that XLA does not know, or None if unknown; True if they were probed in this call).

    The result is cached for each version of JAX's libraries.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        known = json.loads(_cache_file().read_text())
        if isinstance(known, dict) and set(flags) <= set(known):
            return {name for name in flags if not known[name]}, False
    unknown = probe(flags)
    if unknown is None:
        return None, True
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
        file = _cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.write_text(json.dumps({name: name not in unknown for name in flags}))
        new.replace(file)
    return unknown, True


def _cache_file() -> pathlib.Path:
    """Return the file that caches the result of probing."""
    return environment.user_cache() / f"xla_flags-{_versions()}.json"


def probe(flags: dict[str, str]) -> set[str] | None:
    """Return the flags that XLA does not know, by starting JAX with them in a process; None if it fails otherwise."""
    candidates, unknown = dict(flags), set[str]()
    while candidates:
        env = {**os.environ, "XLA_FLAGS": " ".join(f"{name}={value}" for name, value in candidates.items())}
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        command = [sys.executable, "-c", "import jax; jax.devices()"]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return None
        if done.returncode == 0:
            break
        complaint = done.stderr.partition("nknown flag")[2].partition("\n")[0]
        rejected = {name for name in candidates if re.search(rf"{name}\b", complaint)}
        if not rejected:
            return None
        unknown |= rejected
        candidates = {name: value for name, value in candidates.items() if name not in rejected}
    return unknown


def _versions() -> str:
    import importlib.metadata  # takes 20 ms, so import it only when needed

    versions = []
    for name in PLUGINS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(importlib.metadata.version(name))
    return "-".join(versions)
