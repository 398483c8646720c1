"""Eight simulated devices, a persistent compilation cache, warnings as errors: set before JAX starts."""

import gc
import os
import pathlib
import sys
import tempfile

import pytest

CACHE = pathlib.Path(os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{tempfile.gettempdir()}/jaxdp-test-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("NPROC", "32")  # threads: see `jaxdp.environment.enough_threads`


@pytest.fixture(autouse=True)
def room_for_programs():
    """Each compiled program takes tens of memory maps, and the kernel gives a process 65,530: beyond, XLA crashes."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        sys.modules["jax"].clear_caches()
        gc.collect()
