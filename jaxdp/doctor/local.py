"""The checks of one process: its packages, its host, its devices."""

import functools
import os
import pathlib
from collections.abc import Callable

from jaxdp.distributed import hosts
from jaxdp.distributed.world import World
from jaxdp.doctor import bindings, collective, devices, mpi, network, resources, settings, versions
from jaxdp.doctor.check import FAILURE, Check, Checker, failure, of_error, ok, run_checks
from jaxdp.doctor.probe import Ended, Probe
from jaxdp.errors import ReportedError

LOCAL = 8.0  # seconds for a check of this machine
START = 20.0  # seconds for importing JAX, and for opening its devices
OF_DEVICES = (  # causes of an error of JAX: a text in it, the fix
    ("XLA_FLAGS", "remove the flag: this jaxlib does not know it"),
    ("RESOURCE_EXHAUSTED", "see nvidia-smi for programs that use the GPU's memory, and end them"),
    ("out of memory", "see nvidia-smi for programs that use the GPU's memory, and end them"),
    ("", "see the lines on versions, driver and plug-in; of several processes, on host name, network and bindings"),
)


def local_checks(
    world: World | None, directory: pathlib.Path, needed: Callable[[], int] | None, cache: str | None
) -> dict[str, Checker]:
    """Return the checks that need no other process. needed: returns the bytes of a checkpoint."""
    size, local_size = (1, 1) if world is None else (world.size, world.local_size or 1)
    return {
        "versions": versions.check_versions,
        "environment": functools.partial(settings.check_settings, size),
        "gpu": devices.check_gpus,
        "open files": functools.partial(resources.check_limits, size),
        "memory": resources.check_memory,
        "shared memory": functools.partial(resources.check_shared_memory, local_size),
        "run_dir": functools.partial(resources.check_run_dir, directory, needed),
        "temporary files": resources.check_temporary,
        "compilation cache": functools.partial(resources.check_cache, cache),
    }


def check_alone(world: World | None, checks: dict[str, Checker], probe: Probe) -> list[Check]:
    """Run all checks of a process that is alone."""
    facts = {0: bindings.read_cores() | {"host": hosts.hostname(), "boot": ""}}
    checks = checks | {
        "port": functools.partial(network.check_port, world),
        "host name": network.check_name,
        "mpirun": mpi.check_mpirun,
        "bindings": functools.partial(bindings.check_bindings, facts),
    }
    lines = run_checks(checks, LOCAL, {"mpirun": START, "run_dir": START})
    return [*lines, *run_checks({"devices": functools.partial(open_devices, probe)}, 3 * START)]


def open_devices(probe: Probe) -> list[Check]:
    """Import what a run imports, open the devices, and time an all-reduce over them if there are several."""
    lines = check_begin(probe)
    if lines[-1].status == FAILURE:
        return lines
    try:
        opened = probe.ask("devices", START)
        lines += devices.check_devices(opened)
        if opened["count"] > 1:
            timed = probe.ask("all_reduce", START, elements=collective.elements(opened["platform"]), times=5)
            lines += collective.check_collective(timed, opened["platform"], opened["kind"], 1, None, 1)
    except Ended as error:
        lines.append(of_devices("devices", error))
    return lines


def check_begin(probe: Probe) -> list[Check]:
    """Check what the probe's task `begin` imported; the last line says whether that works."""
    try:
        imported = probe.receive(START)
    except ReportedError as error:
        return [of_error("imports", error)]
    except Ended as error:
        fix = "see the lines on versions; pip install -U jaxdp-trainer, in a fresh environment"
        return [failure("imports", str(error), fix)]
    return [*versions.check_imports(imported), ok("imports", ", ".join(f"{n} {v}" for n, v in imported.items()))]


def of_devices(name: str, error: Ended) -> Check:
    """Return the failure of JAX to open its devices."""
    text = str(error)
    wanted = os.environ.get("JAX_PLATFORMS", "").replace("cpu", "")
    if wanted and "XLA_FLAGS" not in text:
        text = f"JAX_PLATFORMS={wanted}, and JAX opens no such device: {text[:300]}"
        return failure(name, text, "pip install 'jaxdp-trainer[cuda12]' for an NVIDIA GPU; or unset it")
    fix = next(fix for cause, fix in OF_DEVICES if cause.lower() in text.lower())
    if "XLA_FLAGS" in text:
        name, text = "environment", f"XLA_FLAGS={os.environ.get('XLA_FLAGS')}: {text}"
    return failure(name, text[:600], fix)
