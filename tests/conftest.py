"""Eight simulated devices, a persistent compilation cache, warnings as errors: set before JAX
starts.
"""

import collections
import gc
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import hypothesis
import pytest

CACHE = pathlib.Path(
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{tempfile.gettempdir()}/jaxdp-test-cache")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    )
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background jobs and their children ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
CHECKS = (
    "checks",
    "ends",
    "guarding",
    "hiding",
    "judging",
    "masked",
    "sequences",
    "starts",
    "texts",
    "weighing",
)
# A machine that does other work as well is slow, and that is no fault of a test.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")
pytest.register_assert_rewrite(*CHECKS)  # they say which values differ, as assertions of tests do
MAPS = pathlib.Path("/proc/self/maps")
TESTS = itertools.count()
os.environ.setdefault("NPROC", "32")  # threads: see `jaxdp.process.environment.enough_threads`


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the cases beyond the first n of `quick(n)` as slow; count the slow tests before `-m`
    removes them.

    Of the quick ones, jobs of several processes come first, one at a time; one worker runs the
    tests of a file."""
    cases = collections.Counter()
    for item in items:
        if (mark := item.get_closest_marker("quick")) and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            cases[test] += 1
            if cases[test] > mark.args[0]:
                item.add_marker(pytest.mark.slow)
        if not item.get_closest_marker("slow") and not item.get_closest_marker("xdist_group"):
            group = "mpi" if item.get_closest_marker("mpi") else item.nodeid.partition("::")[0]
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("mpi") is None)
    names = [{mark.name for mark in item.iter_markers()} for item in items]
    config.slow_tests = sum("slow" in name and "exhaustive" not in name for name in names)
    if hasattr(config, "workeroutput"):
        config.workeroutput["slow_tests"] = config.slow_tests


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take the count from a worker of pytest-xdist, which collects the tests."""
    output = getattr(node, "workeroutput", {})  # a worker that has crashed has none
    node.config.slow_tests = output.get("slow_tests", getattr(node.config, "slow_tests", 0))


def pytest_terminal_summary(terminalreporter, config):
    """Tell how many tests `make test` leaves to `make test-all`."""
    if "not slow" in config.option.markexpr and getattr(config, "slow_tests", 0):
        passed = len(terminalreporter.stats.get("passed", ()))
        terminalreporter.write_line(
            f"{passed} passed; {config.slow_tests} slow tests are left to `make test-all`"
        )


@pytest.fixture(autouse=True)
def room_for_programs():
    """Each compiled program takes tens of memory maps, and the kernel gives a process 65,530:
    beyond, XLA crashes.
    """
    yield
    if (
        next(TESTS) % 8 or "jax" not in sys.modules or not MAPS.exists()
    ):  # it takes tens of milliseconds to read
        return
    if MAPS.read_bytes().count(b"\n") > 20_000:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def usual_lowering_of_a_module():
    """A fixture may change how this process lowers products from then on; tests of other modules
    follow.
    """
    from jaxdp.process import private_jax

    with private_jax.usual_lowerings():
        yield


@pytest.fixture(autouse=True)
def usual_lowering(usual_lowering_of_a_module):
    """The same for a test."""
    from jaxdp.process import private_jax

    with private_jax.usual_lowerings():
        yield


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("a small file system needs root to be mounted")
    (tmp_path / "disk").mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", tmp_path / "disk"], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.decode().strip()}")
    yield tmp_path / "disk"
    subprocess.run(["umount", "-l", tmp_path / "disk"], check=True)
