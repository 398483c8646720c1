"""Where a verification runs: which devices, with what settings, and whether there is memory for it."""

import contextlib
import math
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

import jax

from jaxdp.errors import UsageError
from jaxdp.verify.rows import make_first
from jaxdp.verify.subject import Subject, Trial


def choose_devices(number: int, microbatches: int) -> list[jax.Device]:
    """So many real devices, or simulated ones where there are not as many; never more than microbatches."""
    wanted, found = min(number, microbatches), jax.devices()
    if len(found) < wanted and jax.default_backend() != "cpu":
        found = jax.devices("cpu")
    return found[:wanted]


@contextlib.contextmanager
def settings(device: jax.Device) -> Iterator[None]:
    """float64 and exact products, on this device where nothing else is said."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"), jax.default_device(device):
        yield


def check_memory(subject: Subject, trial: Trial, devices: Sequence[jax.Device]) -> None:
    """UsageError where what is held at once, of the state alone, is more than there is."""
    shapes = jax.eval_shape(lambda: make_first(subject, trial, subject.make_tx(1.0), subject.frozen))
    size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    params, state = size(shapes.params), size(shapes)
    each = state + 2 * params  # beside the state, gradients and their sum
    simulated = devices[0].platform == "cpu"
    needed = (len(devices) if simulated else 1) * each + 4 * state
    there = available() if simulated else (devices[0].memory_stats() or {}).get("bytes_limit", math.inf)
    if needed > there:
        raise UsageError(
            f"verify.model_args: {params // 8:,} parameters need {needed / 1e9:.0f} GB in float64 on {len(devices)} "
            f"devices, and there are {there / 1e9:.0f}; make the model smaller while it is verified, e.g. "
            "--verify.model_args.layers 2, or use fewer --devices"
        )


def available() -> float:
    """Bytes of memory that this machine has left; infinite where it does not say."""
    with contextlib.suppress(OSError):
        if found := re.search(r"MemAvailable:\s*(\d+) kB", pathlib.Path("/proc/meminfo").read_text()):
            return int(found[1]) * 1024.0
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return math.inf
