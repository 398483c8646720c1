"""What JAX reads from the environment once, when it starts; nothing here imports it."""

import os
import re

from jaxdp.distributed import gpus
from jaxdp.errors import UsageError

COUNT = "--xla_force_host_platform_device_count"
MOST = 2048  # simulated devices: JAX fails beyond
THREADS = 4  # of the CPU's pool, for each simulated device


def simulate(devices: int) -> None:
    """So many devices for JAX's CPU backend, unless XLA_FLAGS says otherwise."""
    if simulated() is None:
        add_flag(f"{COUNT}={min(devices, MOST)}")  # a plan for more is scaled


def simulated() -> int | None:
    """How many CPU devices XLA_FLAGS asks for."""
    found = re.findall(rf"{COUNT}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else None


def add_flag(flag: str) -> None:
    """To XLA_FLAGS, unless it is set there."""
    flags = os.environ.get("XLA_FLAGS", "")
    if flag.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def exact(microbatches: int) -> None:
    """What must be the same for the same bits, before JAX starts.

    On CPU, the number of threads, over which XLA deals out products and sums; and no algebraic simplification, which
    decides by what else is in a program whether to divide or to multiply by the reciprocal. On a GPU, operations that
    are the same every time, and none chosen by stopwatch.
    """
    for name, value in _exact(microbatches).items():
        os.environ[name] = value


def check_exact(microbatches: int) -> None:
    """Raises `UsageError` where `exact` was not called, or not for so many microbatches."""
    for name, value in _exact(microbatches).items():
        if os.environ.get(name) != value:
            raise UsageError(
                f"parallel.reduction: exact needs {name}={value!r} in the environment, not {os.environ.get(name)!r}; "
                f"call jaxdp.environment.exact({microbatches}) before JAX starts"
            )


def _exact(microbatches: int) -> dict[str, str]:
    """{variable: value}"""
    flags = os.environ.get("XLA_FLAGS", "").split()
    own = {"--xla_gpu_deterministic_ops": "true"} if gpus.count() else {"--xla_disable_hlo_passes": "algsimp"}
    for name, value in own.items():
        given = [flag.partition("=")[2] for flag in flags if flag.partition("=")[0] == name]
        if value not in ",".join(given).split(","):
            flags = [flag for flag in flags if flag.partition("=")[0] != name]
            flags.append(f"{name}={','.join([*given, value]) if name.endswith('passes') else value}")
    return {"XLA_FLAGS": " ".join(flags), "NPROC": threads(microbatches)}


def threads(devices: int) -> str:
    return str(min(THREADS * devices, MOST))


def enough_threads() -> None:
    """A pool of CPU threads in which all simulated devices can wait in several collectives each.

    XLA runs what is independent side by side, in any order, and a collective blocks its thread: with as many threads
    as devices, some devices in one collective and the rest in another wait for each other for ever.
    """
    if simulated() is not None:
        os.environ.setdefault("NPROC", threads(simulated() or 1))
