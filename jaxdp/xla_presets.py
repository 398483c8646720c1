"""Presets of XLA flags, without those that this XLA does not have: it aborts at a flag that it does not know."""

import contextlib
import importlib.util
import mmap
import pathlib
from collections.abc import Iterable

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


def use(preset: str, devices: int | None = None, local_gpus: int | None = None) -> str | None:
    """Set the flags of a preset that XLA knows, before JAX starts; flags that are already in XLA_FLAGS are kept.

    devices: as in `parallel.devices`; local_gpus: GPUs of this host, counted if None. Sets nothing for one device, or
    without a GPU. Returns a line about flags that are left out, or None.
    """
    flags = PRESETS[preset]
    if not flags or not several(devices, gpus.count() if local_gpus is None else local_gpus):
        return None
    missing = unknown(flags)
    for name, value in flags.items():
        if name not in missing:
            environment.add_flag(f"{name}={value}")
    if missing:
        return f"parallel.xla_preset: {preset} without {', '.join(sorted(missing))}, which this XLA does not know"
    return None


def several(devices: int | None, local_gpus: int) -> bool:
    """Return True if there is more than one GPU to train on, as far as is known before any is opened."""
    visible = gpus.visible_devices()
    if visible is not None:
        local_gpus = min(local_gpus, len([d for d in visible.split(",") if d.strip() not in ("", "-1")]))
    return local_gpus > 0 and (launchers.discover().size > 1 or min(local_gpus, devices or local_gpus) > 1)


def unknown(names: Iterable[str]) -> set[str]:
    """Return the flags that a library of XLA does not have: a registered flag's name is a string in the library."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(library.open("rb")) for library in libraries()]
        contents = [stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) for file in files]
        literal = lambda name: b"\0" + name.removeprefix("--").encode() + b"\0"
        return {name for name in names if any(content.find(literal(name)) < 0 for content in contents)}


def libraries() -> list[pathlib.Path]:
    """Return the files of jaxlib and of JAX's GPU plug-ins that read XLA_FLAGS. Does not import them."""
    files: list[pathlib.Path] = []
    for package, pattern in {"jaxlib": "libjax_common*", "jax_plugins": "xla_*/xla_*_plugin*.so"}.items():
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            files += sorted(pathlib.Path(folder).glob(pattern))
    return files
