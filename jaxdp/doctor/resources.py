"""Check what a run needs of its host, and of others: the devices that JAX opens, an all-reduce over
them, TCP between hosts, open files, memory, space on disks (by a test write), and cores."""

import math
import os
import pathlib
import resource
import secrets
import shutil
import socket
import tempfile
import timeit
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxdp.doctor.findings import Check, failure, graded, ok, warning
from jaxdp.doctor.versions import plugins
from jaxdp.metrics.numbers import size
from jaxdp.process import environment, hosts

SIZE = 1 << 20  # float32 per device in an all-reduce
SLOW = 6e6  # bytes per second that any all-reduce should reach: a twentieth of gigabit Ethernet


def open_devices() -> Check:
    """Open this process's devices."""
    import jax

    devices = jax.local_devices()
    platform = devices[0].platform
    text = f"{len(devices)} x {devices[0].device_kind} ({platform})"
    if platform == "cpu" and environment.gpu_count() and plugins():
        fix = "set JAX_PLATFORMS=cuda to see JAX's error, such as a driver that is too old"
        return failure("devices", f"{text}: JAX does not open the GPU", fix)
    return ok("devices", text)


def all_reduce() -> dict[str, Any]:
    """Return the best seconds of an all-reduce over all devices, their number, and the smallest and
    largest element of each local sum.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("all",))

    def rows():
        return jnp.broadcast_to(jnp.arange(1.0, count + 1)[:, None], (count, SIZE))

    def reduce():
        return add(numbers).block_until_ready()

    numbers = jax.jit(rows, out_shardings=NamedSharding(mesh, PartitionSpec("all")))()
    add = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, PartitionSpec()))
    sums = [np.asarray(shard.data) for shard in reduce().addressable_shards]
    return {
        "seconds": min(timeit.repeat(reduce, number=1)),
        "devices": count,
        "sums": [float(total) for local in sums for total in (local.min(), local.max())],
    }


def check_all_reduce(seconds: float, devices: int, sums: list[float]) -> Check:
    """Check what `all_reduce` measured; a sum over devices that add 1, 2, ... is known."""
    text = f"{4e-6 * SIZE:.3g} MB over {devices} devices"
    if {*sums} != {sum(range(devices + 1))}:
        fix = "see jaxdp verify; a device or a cable is broken"
        return failure("all-reduce", f"{text}: the sum is wrong", fix)
    if 4 * SIZE / seconds < SLOW:
        fix = "see the line on bindings, what else uses the hosts and the network; on GPU, what NCCL_DEBUG=INFO prints"
        return warning("all-reduce", f"{text}: less than {SLOW / 1e6:g} MB/s", fix)
    return ok("all-reduce", f"{text} in {1e3 * seconds:.3g} ms")


HOSTS = 16  # other hosts that each host connects to, at most
SECONDS = 3.0  # for each connection


def check_reach(rank: int, facts: Sequence[dict[str, Any]]) -> Iterator[Check]:
    """Check TCP to the next HOSTS other hosts, to the next rank of each. facts: of each rank, with a
    `port`.
    """
    following = [*range(rank + 1, len(facts)), *range(rank)]
    nearest = {hosts.key(facts[other]): other for other in reversed(following)}
    nearest.pop(hosts.key(facts[rank]), None)
    reached = 0
    for other in [*nearest.values()][-HOSTS:]:
        fact = facts[other]
        address = hosts.meeting_address([fact, facts[rank]], fact["port"])
        try:
            socket.create_connection(hosts.split(address), SECONDS).close()
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
    need, hard = 512 + 4 * ranks, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY:  # a run raises its soft limit to this one
        fix = "raise the hard limit (limits.conf, LimitNOFILE=, docker run --ulimit nofile=65536)"
        text = f"{hard} at most{f'; a run may need {need}' * (hard < need)}"
        yield graded("open files", hard, 128, need, text, fix)
    if (free := hosts.free_memory()) < math.inf:
        fix = "end other programs, or raise the container's memory limit"
        yield graded("memory", free, 256 * MB, GB, f"{size(free)} free", fix)
    total, _, free = shutil.disk_usage("/dev/shm")
    # 64 MB is a container's default
    enough = 64 * MB * min(local_size, 4) if total > 64 * MB else math.inf
    text = f"/dev/shm has {size(free)} free of {size(total)}"
    fix = "mount a larger /dev/shm: docker run --shm-size=8g, or an emptyDir of medium Memory in Kubernetes"
    yield graded("shared memory", free, 16 * MB, enough, text, fix)


def check_run_dir(directory: pathlib.Path) -> Iterator[Check]:
    """Check space and permission for checkpoints, in the run directory or the folder that it would
    be made in.
    """
    directory = directory.expanduser().absolute()
    folder = next(path for path in (directory, *directory.parents) if path.exists())
    free, fix = shutil.disk_usage(folder).free, "make room there, or choose another --run_dir"
    try:  # a quota shows up in no other way
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".jaxdp-doctor-") as out:
            out.write(secrets.token_bytes(4 * MB))
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        text = f"{directory} cannot be written to: {error.strerror or error} ({size(free)} free)"
        yield failure("run_dir", text, fix)
    else:
        text = f"{directory} has {size(free)} free"
        yield graded("run_dir", free, 256 * MB, 2 * GB, text, fix)


def check_bindings(rank: int, facts: Sequence[Mapping[str, Any]]) -> Check:
    """Check that the ranks of this host have enough cores, and that bindings leave none idle.
    facts: of each rank.
    """
    own = facts[rank]
    cores = {
        r: {*fact["cores"]} for r, fact in enumerate(facts) if hosts.key(fact) == hosts.key(own)
    }
    for few in sorted(cores.values(), key=len):
        sharers = [r for r, others in cores.items() if others <= few]
        if len(sharers) > len(few):
            shared = f"core {min(few)}" if len(few) == 1 else f"{len(few)} cores"
            found = f"ranks {hosts.listed(sharers)} share {shared}: each waits for the other"
            fix = f"{BIND}; or start at most {len(few)} on that host, or request more cores"
            return warning("bindings", found, fix)
    used, count = len(set().union(*cores.values())), len(cores)
    text = f"{count} rank{'s' * (count > 1)} with {used} core{'s' * (used > 1)}"
    if used * 2 <= own["available"]:
        return warning("bindings", f"{text} of the host's {own['available']}", BIND)
    if own["limit"] < 0.75 * used:
        fix = "raise the container's CPU limit, or start fewer ranks or threads"
        text += f", but the control group allows {own['limit']:g} processors' worth of time"
        return warning("bindings", text, fix)
    return ok("bindings", text)
