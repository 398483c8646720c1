"""The devices and the settings of a verification, and whether there is memory for it."""

import contextlib
import math
import pathlib
import re
from collections.abc import Iterator, Sequence

import jax

from jaxdp.errors import UsageError
from jaxdp.verify.problem import Problem, Trial


def choose_devices(number: int, microbatches: int) -> list[jax.Device]:
    """Return this number of real devices, or of simulated ones if there are fewer; at most one per microbatch.

    In a job of several processes: all devices of all processes.
    """
    if jax.process_count() > 1:
        return jax.devices()
    wanted, devices = min(number, microbatches), jax.devices()
    if len(devices) < wanted and jax.default_backend() != "cpu":
        devices = jax.devices("cpu")
    return devices[:wanted]


@contextlib.contextmanager
def settings(device: jax.Device) -> Iterator[None]:
    """Compute in float64 (in the threads of callbacks, too) with exact products, on this device by default."""
    before = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    jax.config.update("jax_enable_x64", True)
    try:
        with jax.enable_x64(True), jax.default_matmul_precision("highest"), jax.default_device(device):
            yield
    finally:
        jax.config.update("jax_enable_x64", before)


def check_memory(problem: Problem, trial: Trial, devices: Sequence[jax.Device]) -> None:
    """Raise UsageError if the states that exist at once do not fit into memory."""
    params, model_state = jax.eval_shape(problem.model.init, jax.random.key(0), trial.example)
    state = (params, model_state, jax.eval_shape(problem.make_tx(1.0).init, params), params)
    size = lambda tree: sum(math.prod(x.shape) * 8 for x in jax.tree.leaves(tree))
    simulated = devices[0].platform == "cpu"
    per_device = size(state) + 2 * size(params)  # beside the state: gradients and their sum
    needed = (len(devices) if simulated else 1) * per_device + 4 * size(state)
    limit = free_memory() if simulated else (devices[0].memory_stats() or {}).get("bytes_limit", math.inf)
    if needed > limit:
        raise UsageError(
            f"verify.model_args: {size(params) // 8:,} parameters need {needed / 1e9:.0f} GB in float64 on "
            f"{len(devices)} devices, and there are {limit / 1e9:.0f}; make the model smaller while it is verified, "
            "e.g. --verify.model_args.layers 2, or use fewer --devices"
        )


def free_memory() -> float:
    """Return the free bytes of this machine; infinity if unknown."""
    with contextlib.suppress(OSError):
        if match := re.search(r"MemAvailable:\s*(\d+) kB", pathlib.Path("/proc/meminfo").read_text()):
            return int(match[1]) * 1024.0
    return math.inf
