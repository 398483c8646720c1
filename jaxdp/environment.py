"""What JAX reads from the environment once, when it starts; nothing here imports it."""

import os
import re

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


def enough_threads() -> None:
    """A pool of CPU threads in which all simulated devices can wait in several collectives each.

    XLA runs what is independent side by side, in any order, and a collective blocks its thread: with as many threads
    as devices, some devices in one collective and the rest in another wait for each other for ever.
    """
    if simulated() is not None:
        os.environ.setdefault("NPROC", str(min(THREADS * (simulated() or 1), MOST)))
