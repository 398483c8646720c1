"""Enter a job, or its next generation: its coordinator, then JAX's coordination service.

`cached` caches meshes and programs until the devices are closed.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jaxlib

import jaxdp
from jaxdp.errors import UsageError, explained
from jaxdp.process import environment, hosts, joining, membership, private_jax, protocol
from jaxdp.process.connection import Joined
from jaxdp.process.launchers import MPI, World
from jaxdp.process.membership import Group

F = TypeVar("F", bound=Callable[..., Any])
_caches: list[Any] = []


def cached(f: F) -> F:
    """Cache the results of a function, like `functools.cache`, until the devices are closed."""
    wrapped: Any = functools.cache(f)
    _caches.append(wrapped)
    return wrapped


def clear_caches() -> None:
    for wrapped in _caches:
        wrapped.cache_clear()


NO_MPI = (
    "jax_cpu_collectives_implementation: mpi does not work: JAX uses its MPI communicators after MPI_Finalize, so that "
    "Open MPI and MPICH end a finished job with an error, and a process with several devices hangs; use gloo, or in a "
    "loop of your own jaxdp.init(backend='mpi')"
)
VERDICT = (
    5.0  # seconds that the coordinator has to report the lost process that something has failed by
)


class Entry(NamedTuple):
    """What a process enters its job with. parent: see `Membership`."""

    world: World
    timeout: float
    group: Group
    parent: int | None


_entry: Entry | None = None


def entered() -> Entry:
    """Return what this process has entered its job with."""
    assert _entry is not None
    return _entry


def join(world: World, timeout: float | None, group: Group) -> dict[str, Any]:
    """Join the job of `world`, and return the fields of this process's `Context`. timeout: see
    `default_timeout`.
    """
    global _entry
    hosts.raise_open_files()
    problem = ""
    try:
        timeout = protocol.default_timeout(timeout)
        protocol.silence(timeout)
    except UsageError as error:  # this process joins, to tell the others
        problem = str(error)
        timeout = protocol.TIMEOUT
        os.environ.pop("JAXDP_SILENCE", None)
    if (
        jax.config.values.get("jax_cpu_collectives_implementation") == "mpi"
        and not environment.gpu_count()
    ):
        raise UsageError(NO_MPI, world.speaker)
    facts = {
        **{package.__name__: package.__version__ for package in (jaxdp, jax, jaxlib)},
        "python": ".".join(map(str, sys.version_info[:2])),
        "gloo": environment.gpu_count() == 0,
        "tls": "yes" if private_jax.service_has_tls() else "no",
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "problem": problem,
        "prepares": group.prepare is not None and not environment.gpu_count(),
        **group.facts(),
    }
    # The second one is set by `jaxdp launch`.
    parent = os.getppid() if world.launcher in MPI or "JAXDP_RESTARTS" in os.environ else None
    _entry = Entry(world, timeout, group, parent)
    meet = group.meet or joining.meet
    return group.enter(enter, meet(world, facts, timeout, group))


def open_devices(member: membership.Membership) -> None:
    """Open the devices of all processes together. Raises GenerationEnded if one is lost meanwhile,
    UsageError if JAX finds none of the platform that JAX_PLATFORMS names.

    Opening waits for the others, JAX for 2 minutes: one that opened them later could wait for one
    that waits for it."""
    member.check_generation()
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        if member.has_ended(VERDICT):
            member.check_generation()
        raise explained(error) or error from None


def enter(job: Joined) -> dict[str, Any]:
    """Start the membership of this process, connect it to JAX's coordination service, and return
    the fields of its `Context`.
    """
    world, timeout, group, parent = entered()
    everyone, rank = job.facts, job.rank
    local_rank, local_size = hosts.local_ranks(everyone, rank)
    if job.generation == 0:  # in later ones the launcher's numbers no longer hold
        local_rank = local_rank if world.local_rank is None else world.local_rank
        local_size = local_size if world.local_size is None else world.local_size
    count = environment.gpu_count()
    visible = everyone[rank]["visible"]
    neighbours = [f["visible"] for f in everyone if hosts.key(f) == hosts.key(everyone[rank])]
    devices, sharers = environment.assign_gpus(local_rank, local_size, count, visible, neighbours)
    if sharers > 1:  # each would reserve three quarters of the GPU
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.75 / sharers:.3f}")
    member = group.membership(job, local_rank, protocol.silence(timeout), parent, timeout)
    membership.start(member)
    if hosts.on_one_host(everyone):
        private_jax.bind_gloo("127.0.0.1")
    private_jax.use_client(member.connect(), job.jax_address, rank, len(everyone), devices)
    clear_caches()
    open_devices(member)
    return {
        "rank": rank,
        "size": len(everyone),
        "local_rank": local_rank,
        "local_size": local_size,
        "hosts": tuple(f["host"] for f in everyone),
        "pids": tuple(f["pid"] for f in everyone),
    }
