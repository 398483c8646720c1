"""Processes meet in three steps: agree on an address, say hello there, and only then let JAX connect."""

from __future__ import annotations

import time
from collections.abc import Mapping

from jaxdp.distributed import hello, hosts, mpi
from jaxdp.distributed.coordination import split
from jaxdp.distributed.hello import Hello
from jaxdp.distributed.world import MPI, World
from jaxdp.errors import UsageError


def meet(world: World, facts: Mapping[str, object], timeout: float) -> tuple[str, list[Hello]]:
    """The coordinator's "host:port", ready for JAX to connect to, and every rank's hello, by rank.

    facts: what else each rank says of itself; `gloo` tells whether its collectives will run over Gloo. A hello holds
    rank, size, host, addresses, boot, pid and the facts. Nothing here waits longer than about `timeout` seconds.
    Raises UsageError (taken port, wrong address, disagreement, a host name others cannot use) or DistributedError (a
    rank that did not come); with rank=0 where all raise the same.
    """
    began = time.monotonic()
    own: Hello = {"rank": world.rank, "size": world.size, **hosts.identity(), **facts}
    if world.coordinator is not None:
        coordinator = world.coordinator
    elif world.launcher in MPI:
        port = hosts.free_port() if world.rank == 0 else 0
        everyone = mpi.exchange(world, {**own, "port": port, "outward": hosts.outward()}, timeout)
        hosts.check_reachable(everyone)
        coordinator = hosts.meeting_address(everyone, everyone[0]["port"])
    else:
        raise UsageError(f"{world.size} processes have no coordinator: set JAXDP_COORDINATOR to rank 0's host:port")
    host, port = split(coordinator)
    one_host = world.local_size == world.size
    if one_host and hosts.is_own(host):
        host, coordinator = "127.0.0.1", f"127.0.0.1:{port}"
    left = max(1.0, timeout - (time.monotonic() - began))
    if world.rank == 0:
        with hello.listen(hosts.listening_address(host, one_host), port, own) as server:
            if not hosts.is_own(host) and not hello.leads_back(host, port, own):
                raise UsageError(
                    f"the coordinator {coordinator} is not rank 0's host {own['host']} "
                    f"({', '.join(own['addresses']) or 'no address'}): give rank 0's address, or start rank 0 there"
                )
            hellos = hello.gather(server, own, left)
    else:
        hellos = hello.attend(host, port, own, left)
    hosts.check_reachable(hellos)
    return coordinator, hellos


def hand_over(world: World, coordinator: str, timeout: float) -> None:
    """Every rank but 0 waits until rank 0 has given the port to JAX: connecting before that costs a second's pause."""
    if world.rank != 0:
        host, port = split(coordinator)
        hello.await_grpc(host, port, f"rank {world.rank}", timeout)
