"""Check what a run needs of its host: GPUs, NVIDIA's driver, JAX's plug-in, the devices that JAX
opens, an all-reduce over them, host names, TCP between hosts, open files, memory, space on disks (by
a test write), and cores."""

import contextlib
import math
import os
import pathlib
import re
import resource
import secrets
import shutil
import socket
import tempfile
import timeit
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packaging.version import Version

from jaxdp.doctor.findings import Check, failure, graded, ok, warning
from jaxdp.doctor.versions import plugins
from jaxdp.errors import install
from jaxdp.metrics.numbers import size
from jaxdp.process import environment, hosts
from jaxdp.run.rundir import sees

# The oldest driver for each CUDA of JAX's wheels: NVIDIA's table of minor version compatibility.
DRIVERS = {"cuda12": Version("525.60"), "cuda13": Version("580.0")}
SMALL, LARGE = 1 << 20, 1 << 24  # float32 per device, on CPU and GPU, where latency would dominate
SLOW = 6e6  # bytes per second that any all-reduce should reach: a twentieth of gigabit Ethernet


def check_gpus(dev: str = "/dev", proc: str = "/proc") -> Iterator[Check]:
    """Check NVIDIA GPUs, their driver and JAX's plug-in, each of which needs the other two."""
    count = environment.gpu_count({}, dev)
    kinds = sorted(DRIVERS.keys() & {kind for kind, _ in plugins().values()})
    file = pathlib.Path(proc, "driver", "nvidia", "version")
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    match = re.search(r"\d{3,}(\.\d+)+", text)
    number = match[0] if match else "0"
    driver = Version(number)
    old = next((kind for kind in kinds if driver < DRIVERS[kind]), "")
    present, names = f"{count} NVIDIA GPU{'s' * (count > 1)}", ", ".join(kinds)
    if not count and not kinds:
        yield ok("gpu", "none, and no plug-in for one")
    elif not count:
        fix = "in a container, pass it on (docker run --gpus all); else install NVIDIA's driver"
        yield warning("gpu", f"JAX's plug-in for {names} is installed, but there is no GPU", fix)
    elif not kinds:
        cuda = "cuda13" if driver >= DRIVERS["cuda13"] else "cuda12"
        text = f"{present}, but JAX has no CUDA plug-in here: it would compute on the CPU"
        yield warning("gpu", text, install(cuda))
    elif old:
        text = f"driver {number} is too old for {old}"
        if match is None:
            text = f"{present}, but no driver is loaded"
        fix = f"install NVIDIA's driver {DRIVERS[old]} or later, or the plug-in of an older CUDA"
        yield failure("gpu", text, fix)
    else:
        yield ok("gpu", f"{present}, driver {number}, plug-in {names}")


def open_devices() -> Check:
    """Open this process's devices."""
    import jax

    devices = jax.local_devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    text = f"{len(devices)} x {kind} ({platform}){f', {size(limit)} each for JAX' if limit else ''}"
    chosen = platform != "cpu" or os.environ.get("JAX_PLATFORMS")
    if environment.gpu_count() and plugins() and not chosen:
        fix = "set JAX_PLATFORMS=cuda to see JAX's error"
        return failure("devices", f"{text}: JAX does not open the GPU", fix)
    return ok("devices", text)


def all_reduce() -> dict[str, Any]:
    """Return the best seconds of an all-reduce over all devices, their number, and the smallest and
    largest element of each local sum.
    """
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    count, size = jax.device_count(), SMALL if jax.default_backend() == "cpu" else LARGE
    mesh, split = jax.make_mesh((count,), ("all",)), PartitionSpec("all")

    def one(index):
        return np.full((1, size), index[0].start + 1, np.float32)

    x = jax.make_array_from_callback((count, size), NamedSharding(mesh, split), one)

    def total(x):
        return jax.lax.psum(x, "all")

    reduce = jax.jit(
        jax.shard_map(total, mesh=mesh, in_specs=split, out_specs=PartitionSpec(), check_vma=False)
    )
    sums = [
        float(extreme(np.asarray(shard.data)))
        for shard in reduce(x).addressable_shards
        for extreme in (np.min, np.max)
    ]
    seconds = min(timeit.repeat(lambda: reduce(x).block_until_ready(), number=1))
    return {"seconds": seconds, "devices": count, "nbytes": 4 * size, "sums": sums}


def check_all_reduce(seconds: float, devices: int, nbytes: int, sums: list[float]) -> Check:
    """Check what `all_reduce` measured; a sum over devices that add 1, 2, ... is known."""
    text = f"{nbytes / 1e6:.3g} MB over {devices} devices in {1e3 * seconds:.3g} ms"
    if {*sums} != {sum(range(devices + 1))}:
        return failure(
            "all-reduce",
            f"{text}: the sum is wrong",
            "see jaxdp verify; a device or a cable is broken",
        )
    if nbytes / seconds < SLOW:
        return warning(
            "all-reduce",
            f"{text}: less than {SLOW / 1e6:g} MB/s",
            "see the line on bindings, what else uses the hosts and the network; on GPU, what NCCL_DEBUG=INFO prints",
        )
    return ok("all-reduce", text)


HOSTS = 16  # other hosts that each host connects to, at most


def check_name() -> Iterator[Check]:
    """Check this host's name, which Gloo and MPI advertise to other hosts. A job that spans hosts
    checks it again.
    """
    name, outward = hosts.hostname(), hosts.outward()
    addresses = hosts.resolve(name)
    text = f"{name} resolves to {', '.join(addresses) or 'no address'}"
    if addresses and hosts.is_own(name) and not all(map(hosts.is_loopback, addresses)):
        yield ok("host name", text)
    else:
        fix = f"in /etc/hosts, give {name} its network address{f' ({outward})' if outward else ''}"
        yield warning(
            "host name", f"{text}, and collectives on CPU would advertise that to other hosts", fix
        )


def check_reach(rank: int, facts: Sequence[dict[str, Any]]) -> Iterator[Check]:
    """Check TCP to the next HOSTS other hosts, to the first rank of each. facts: of each rank, with
    a `port`.
    """
    firsts = {hosts.key(fact): r for r, fact in reversed(list(enumerate(facts)))}
    firsts.pop(hosts.key(facts[rank]))
    others = sorted(firsts.values(), key=lambda other: (other - rank) % len(facts))[:HOSTS]
    reached = 0
    for other in others:
        fact = facts[other]
        address = hosts.meeting_address([fact, facts[rank]], fact["port"])
        try:
            socket.create_connection(hosts.split(address), 5.0).close()
            reached += 1
        except OSError as error:
            text = f"{hosts.title(other, fact['host'])} is not reached from {facts[rank]['host']} at {address}: {error}"
            fix = "see routes, and whether a firewall lets the job's hosts connect to each other on any port"
            yield failure("network", text, fix)
    if reached:
        yield ok("network", f"{reached} other host{'s' * (reached > 1)} reached")


MB, GB = 1 << 20, 1 << 30
BIND = "mpirun --bind-to none (Open MPI), -bind-to none (MPICH), or srun --cpus-per-task"


def check_memory(ranks: int = 1, local_size: int = 1) -> Iterator[Check]:
    """Check open files, free memory (also the control group's), and shared memory for Open MPI,
    NCCL and data workers.

    ranks, local_size: processes of the job, to each of which rank 0 has a connection, and of this
    host."""
    need = 512 + 4 * ranks
    soft, hard = (
        need if limit < 0 else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    fix = "raise the hard limit (limits.conf, LimitNOFILE=, docker run --ulimit nofile=65536)"
    text = f"{soft} at most{f'; a run may need {need}' * (soft < need)}"
    yield graded(
        "open files",
        soft,
        128,
        need,
        text,
        f"ulimit -n {min(65536, hard)}" if hard >= need else fix,
    )
    if (free := hosts.free_memory()) < math.inf:
        fix = "end other programs, or raise the container's memory limit"
        yield graded("memory", free, 256 * MB, GB, f"{size(free)} free", fix)
    if not os.access("/dev/shm", os.W_OK):
        yield warning(
            "shared memory", "/dev/shm cannot be written to", "mount it, or chmod 1777 /dev/shm"
        )
        return
    total, _, free = shutil.disk_usage("/dev/shm")
    enough = (
        64 * MB * min(local_size, 4) if total > 64 * MB else math.inf
    )  # 64 MB is a container's default
    fix = "mount a larger /dev/shm: docker run --shm-size=8g, or an emptyDir of medium Memory in Kubernetes"
    yield graded(
        "shared memory",
        free,
        16 * MB,
        enough,
        f"/dev/shm has {size(free)} free of {size(total)}",
        fix,
    )


def check_run_dir(directory: pathlib.Path) -> Check:
    """Check space and permission for checkpoints, in the run directory or the folder that it would
    be made in.
    """
    name, other, folder = "run_dir", "choose another --run_dir", existing(directory)
    if not folder.is_dir():
        return failure(name, f"{directory}: {folder} is no directory", other)
    free, fix = shutil.disk_usage(folder).free, f"make room there, or {other}"
    try:  # a quota shows up in no other way
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".jaxdp-doctor-") as out:
            out.write(secrets.token_bytes(4 * MB))
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        text = f"{directory} cannot be written to: {error.strerror or error} ({size(free)} free)"
        return failure(name, text, fix)
    return graded(name, free, 256 * MB, 2 * GB, f"{directory} has {size(free)} free", fix)


def existing(directory: pathlib.Path) -> pathlib.Path:
    """Return the folder, or its nearest parent that exists."""
    directory = directory.expanduser().absolute()
    return next(folder for folder in (directory, *directory.parents) if folder.exists())


def marker(directory: pathlib.Path, rank: str) -> pathlib.Path:
    """Return the file that a rank of several keeps in the run directory while it is examined."""
    return existing(directory) / f".jaxdp-doctor-rank-{rank}"


def check_shared(directory: pathlib.Path, text: str) -> Iterator[Check]:
    """Check that this process sees the marker of rank 0, and `text` in it."""
    file = marker(directory, "0")
    if sees(file, text, 5.0):
        yield ok("run_dir", "shared by all ranks")
    else:
        fix = (
            "use a --run_dir on a file system that all hosts share, or set checkpoint.local to true"
        )
        yield failure("run_dir", f"{file.parent} is not the folder that rank 0 writes to", fix)


def check_missing(directory: pathlib.Path, size: int) -> Iterator[Check]:
    """Report the ranks that have no marker."""
    missing = [str(rank) for rank in range(size) if not marker(directory, str(rank)).exists()]
    if 0 < len(missing) < size:
        text = f"rank {hosts.listed(missing)} did not report in {existing(directory)}"
        yield failure(
            "ranks",
            text,
            "see whether it was started, what it printed, and whether it has that folder",
        )


def read_cores(launcher: int) -> dict[str, Any]:
    """Return the cores of this process, the number of its launcher's (a process id), and the
    container's limit.
    """
    cores, launcher_cores = sorted(os.sched_getaffinity(0)), 0
    with contextlib.suppress(OSError):
        launcher_cores = len(os.sched_getaffinity(launcher))
    # an infinite limit is no number of JSON
    limit = hosts.core_quota()
    return {
        "cores": cores,
        "launcher_cores": launcher_cores,
        "limit": limit if limit < math.inf else None,
    }


def check_bindings(facts: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Check on every host that its ranks have enough cores, and that bindings leave none idle.
    facts: of each rank.
    """
    by_host: dict[tuple[str, str], list[int]] = {}
    for rank, fact in enumerate(facts):
        by_host.setdefault(hosts.key(fact), []).append(rank)
    return [check_host(host, ranks, facts) for (host, _), ranks in by_host.items()]


def check_host(host: str, ranks: Sequence[int], facts: Sequence[Mapping[str, Any]]) -> Check:
    """Check the cores of these ranks, which are on one host."""
    sets = {rank: frozenset(facts[rank]["cores"]) for rank in ranks}
    used = len(frozenset().union(*sets.values()))
    available = max(facts[rank]["launcher_cores"] for rank in ranks)
    limit = min(facts[rank]["limit"] or math.inf for rank in ranks)
    text = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on host {host}"
    for cores in sorted(sets.values(), key=len):
        sharers = [rank for rank in ranks if sets[rank] <= cores]
        if len(sharers) > len(cores):
            shared = f"core {min(cores)}" if len(cores) == 1 else f"{len(cores)} cores"
            found = f"ranks {hosts.listed(sharers)} on host {host} share {shared}: each waits for the other"
            fix = f"{BIND}; or start at most {len(cores)} on that host, or request more cores"
            return warning("bindings", found, fix)
    if used * 2 <= available:
        return warning("bindings", f"{text} are bound to {used} of {available} cores", BIND)
    if limit < max(0.75 * used, min(used, len(ranks))):
        text += (
            f" see {used} cores, but the control group allows {limit:g} processors' worth of time"
        )
        fix = "raise the container's CPU limit, or start fewer ranks or threads"
        return warning("bindings", text, fix)
    return ok("bindings", f"{text}, {used} core{'s' * (used > 1)}{' in all' * (len(ranks) > 1)}")
