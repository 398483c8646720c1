"""What one process sees by itself: its packages, its host, its devices; each look is a check of its own."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Iterator

from jaxdp.distributed import hosts
from jaxdp.distributed.world import World
from jaxdp.doctor import bindings, collective, devices, mpi, names, network, ports, resources, settings
from jaxdp.doctor.check import FAILURE, Check, Checker, failure, of_error, ok, run_checks
from jaxdp.doctor.probe import Ended, Probe
from jaxdp.errors import Said

LOCAL = 8.0  # seconds for a check of this machine
START = 20.0  # seconds for importing JAX, and for opening its devices
Needed = Callable[[], int]


def alone(
    world: World | None, directory: pathlib.Path, needed: Needed | None, cache: str | None, probe: Probe
) -> list[Check]:
    """Everything that one process can see; lines in the order in which they are shown."""
    own = {0: bindings.own_cores() | {"host": hosts.hostname(), "boot": ""}}
    checks = local_checks(world, directory, needed, cache) | {
        "port": functools.partial(ports.check_port, world),
        "host name": names.check_name,
        "mpirun": mpi.check_mpirun,
        "bindings": functools.partial(bindings.check_bindings, own),
        "network": check_listening,
    }
    lines = run_checks(checks, LOCAL, {"mpirun": START, "run_dir": START})
    return [*lines, *run_checks({"devices": functools.partial(with_devices, probe)}, 3 * START)]


def local_checks(
    world: World | None, directory: pathlib.Path, needed: Needed | None, cache: str | None
) -> dict[str, Checker]:
    """What needs no other process."""
    size = 1 if world is None else world.size
    return {
        "versions": check_versions,
        "environment": functools.partial(settings.check_settings, size),
        "gpu": devices.check_gpus,
        "open files": functools.partial(resources.check_limits, size),
        "memory": resources.check_memory,
        "shared memory": functools.partial(
            resources.check_shared_memory, 1 if world is None else world.local_size or 1
        ),
        "run_dir": functools.partial(resources.check_run_dir, directory, needed),
        "temporary files": resources.check_temporary,
        "compilation cache": functools.partial(resources.check_cache, cache),
    }


def check_versions() -> Iterator[Check]:
    from jaxdp.doctor import versions  # it needs a package, and that one may be missing

    yield from versions.check_versions()


def check_listening() -> Iterator[Check]:
    """Whether a socket that listens here is reached at this host's addresses."""
    port, fix = network.Listener().port, "see the host's firewall, and ip addr"
    addresses = ["127.0.0.1", *filter(None, [hosts.outward()])]
    for address in addresses:
        try:
            network.speed(address, port, 2.0)
        except OSError as error:
            yield failure("network", f"a port of this host is not reached at {address}, from itself: {error}", fix)
            return
    yield ok("network", f"a port that listens here is reached at {' and '.join(addresses)}")


def with_devices(probe: Probe) -> list[Check]:
    """Imports, devices, and the all-reduce over them where there are several."""
    lines = begin(probe)
    if lines[-1].status == FAILURE:
        return lines
    try:
        found = probe.ask("devices", START)
        lines += devices.check_devices(found)
        if found["count"] > 1:
            timed = probe.ask("all_reduce", START, elements=collective.elements(found["platform"]), times=5)
            lines += collective.check_collective(timed, found["platform"], found["kind"], 1, None, 1)
    except Ended as error:
        lines.append(of_devices("devices", error))
    return lines


def begin(probe: Probe) -> list[Check]:
    """Imports what a run imports; the last line says whether that works."""
    try:
        imported = probe.receive(START)
    except Said as error:
        return [of_error("imports", error)]
    except Ended as error:
        fix = "see the lines on versions; pip install -U jaxdp, in a fresh environment"
        return [failure("imports", str(error), fix)]
    from jaxdp.doctor.versions import check_imports

    return [*check_imports(imported), ok("imports", ", ".join(f"{n} {v}" for n, v in imported.items()))]


def of_devices(name: str, error: Ended) -> Check:
    """Why JAX did not open its devices, with the fix for what is known."""
    text = str(error)
    if "XLA_FLAGS" in text:
        return failure(
            "environment",
            f"XLA_FLAGS={os.environ.get('XLA_FLAGS')}: {text}",
            "remove the flag: this jaxlib does not know it",
        )
    if wanted := os.environ.get("JAX_PLATFORMS", "").replace("cpu", ""):
        found = f"JAX_PLATFORMS={wanted}, and JAX opens no such device: {text[:300]}"
        return failure(name, found, "pip install 'jaxdp[cuda12]' for an NVIDIA GPU; or unset it")
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return failure(name, text[:300], "see nvidia-smi for programs that hold the GPU's memory, and end them")
    fix = "versions, driver and plug-in" if name == "devices" else "host name, network and bindings"
    return failure(name, text[:300], f"see the lines on {fix}")
