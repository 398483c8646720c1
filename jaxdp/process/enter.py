"""Enter a job, or the next generation of an elastic one: its coordinator, then JAX's coordination
service.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

import jax
import jaxlib

import jaxdp
from jaxdp.errors import GenerationEnded, UsageError, explained
from jaxdp.process import (
    caches,
    connection,
    environment,
    hosts,
    joining,
    membership,
    private_jax,
    protocol,
    sockets,
)
from jaxdp.process.connection import Joined
from jaxdp.process.joining import ElasticOptions
from jaxdp.process.world import MPI, World

NO_MPI = (
    "jax_cpu_collectives_implementation: mpi does not work: JAX uses its MPI communicators after MPI_Finalize, so that "
    "Open MPI and MPICH end a finished job with an error, and a process with several devices hangs; use gloo"
)
VERDICT = (
    5.0  # seconds that the coordinator has to report the lost process that something has failed by
)


class Entered(NamedTuple):
    """What a process entered with, to enter the next generation."""

    world: World
    timeout: float
    elastic: ElasticOptions | None
    parent: int | None  # see `Membership`


_entered: Entered | None = None


def join(world: World, timeout: float | None, elastic: ElasticOptions | None) -> dict[str, Any]:
    """Join the job of `world`, and return the fields of this process's `Context`. timeout: see
    `default_timeout`.
    """
    global _entered
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
        "elastic": "on" if elastic else "off",
        "config": elastic.config if elastic else "",
        "problem": problem,
        "prepares": elastic is not None
        and elastic.prepare is not None
        and not environment.gpu_count(),
    }
    parent = (
        os.getppid() if world.launcher in MPI or "JAXDP_RESTARTS" in os.environ else None
    )  # of `jaxdp launch`
    _entered = Entered(world, timeout, elastic, parent)
    return enter_until_formed(joining.meet(world, facts, timeout, elastic))


def regroup() -> dict[str, Any]:
    """Leave the generation that has ended, join the next one, and return the fields of this
    process's `Context`.
    """
    return enter_until_formed(rejoin())


def rejoin() -> Joined:
    """Join the next generation. Raises DistributedError if too few processes are left."""
    assert _entered is not None
    world, timeout, elastic, _ = _entered
    assert elastic is not None
    member = membership.joined()
    job = member.job
    membership.forget()
    private_jax.cancel_calls()
    limit = protocol.LATE + elastic.join_timeout + timeout
    settings = joining.coordinator_settings(world, *job.address, job.secret, timeout, elastic)
    place = joining.Place(settings, member.local_rank)
    joined = connection.join(
        *job.address, job.secret, job.last_facts, limit, place.absent, None, place.silent
    )
    member.close()
    return joined


def enter_until_formed(job: Joined) -> dict[str, Any]:
    """Enter the job; if a process is lost meanwhile, the next generation."""
    while True:
        try:
            return enter(job)
        except GenerationEnded:
            job = rejoin()


def open_devices(member: membership.Membership) -> None:
    """Open the devices of all processes together. Raises GenerationEnded if one is lost meanwhile,
    UsageError if JAX finds none of the platform that JAX_PLATFORMS names.

    Opening waits for the others, JAX for 2 minutes: one that opened them later could wait for one
    that waits for it."""
    member.check_generation()
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        if member.elastic and member.has_ended(VERDICT):
            member.check_generation()
        raise explained(error) or error from None


def enter(job: Joined) -> dict[str, Any]:
    """Start the membership of this process, and connect it to JAX's coordination service."""
    assert _entered is not None
    world, timeout, elastic, parent = _entered
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
    sockets.spare(job.address[1], hosts.split(job.jax_address)[1])
    silence = protocol.silence(timeout)
    if elastic is not None and hosts.is_own(job.address[0]):  # a cut network cannot be the cause
        silence = max(silence, timeout)
    member = membership.Membership(job, local_rank, silence, parent, elastic is not None)
    membership.start(member)
    if hosts.on_one_host(everyone):
        private_jax.bind_gloo("127.0.0.1")
    proceed = member.check_generation if elastic else None
    private_jax.connect(job.jax_address, rank, len(everyone), job.secret, timeout, devices, proceed)
    caches.clear()
    open_devices(member)
    return {
        "rank": rank,
        "size": len(everyone),
        "local_rank": local_rank,
        "local_size": local_size,
        "hosts": tuple(f["host"] for f in everyone),
        "pids": tuple(f["pid"] for f in everyone),
    }
