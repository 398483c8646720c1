"""Run something once for each generation of an elastic job, until it returns."""

import collections
import contextlib
import gc
import time
from collections.abc import Callable
from typing import TypeVar

import jax

from jaxdp.elastic import regroup
from jaxdp.errors import DistributedError, TooManyDevices, UsageError, is_consequence
from jaxdp.process import membership
from jaxdp.process.context import Context
from jaxdp.process.enter import VERDICT
from jaxdp.process.monitor import Stopped

T = TypeVar("T")
LOST = 5.0  # seconds until the devices of a program that does not return are left open, on CPU
AGAIN = 600.0  # seconds in which a process may end 3 generations because a connection is broken
STUCK = 60.0  # seconds until its process ends, on GPUs

_failed = collections.deque[float](maxlen=3)  # when this process ended a generation


def run_generations(
    train: Callable[[Context], T], context: Context, ended: Callable[[], None]
) -> T:
    """Call `train` with the processes of each generation of the job, until it returns.

    ended: called after each generation, before the devices are closed.
    """
    regrouped = False
    while True:
        try:
            if regrouped:
                context.agree(None)  # a process that joins tells here if its config is wrong
            return train(context)
        except Exception as error:
            if isinstance(error, Stopped) and error.kind == "regroup":
                with contextlib.suppress(DistributedError):
                    context.barrier("regroup")
                with contextlib.suppress(
                    DistributedError
                ):  # another process has ended the generation already
                    membership.joined().request("regroup", fault="")
            elif not has_ended(error):
                raise
            wait_for_programs()
        ended()
        gc.collect()
        context, regrouped = regroup.regroup(), True


def wait_for_programs() -> None:
    """Wait for the programs of an ended generation, for at most LOST seconds on CPU, and STUCK on
    GPUs.

    One may wait for a message that Gloo has lost, and then the devices cannot be closed. Those of
    CPUs stay open until this process ends, beside those of the next generation. GPUs must be closed
    first: this process ends, and joins the next generation if a launcher starts it again. Call it
    while the results of all programs are still referenced."""
    began, on_cpu = time.monotonic(), jax.default_backend() == "cpu"
    while any(not x.is_deleted() and not x.is_ready() for x in jax.live_arrays()):
        waited = time.monotonic() - began
        if on_cpu and waited > LOST:
            regroup.keep_devices()
            return
        if waited > STUCK:
            member = membership.joined()
            text = f"{member.name(member.rank)} ends: a collective of the ended generation does not return"
            member.end_process(text, 1, member.rank)
        time.sleep(0.01)


def has_ended(error: BaseException) -> bool:
    """Return whether an error is a consequence of the end of this generation."""
    if isinstance(error, Stopped):
        return error.kind == "regroup"
    member = regroup.current()
    if member is None:
        return False
    if isinstance(error, TooManyDevices) and (new := [*filter(member.is_new, range(member.size))]):
        error.rank = member.rank if member.rank in new else new[0]
    if isinstance(error, UsageError) and error.rank is not None:
        return error.rank != member.rank and member.is_new(error.rank) and member.has_ended(VERDICT)
    if not is_consequence(error):
        return member.has_ended(0.5)
    return member.has_ended(VERDICT) or end_generation(member)


def end_generation(member: regroup.ElasticMembership) -> bool:
    """End the generation, since a collective has failed although no process was lost: a connection
    is broken.

    Returns False if this would be the fourth time within ten minutes: then the process ends."""
    now = time.monotonic()
    if len(_failed) == _failed.maxlen and now - _failed[0] < AGAIN:
        return False
    _failed.append(now)
    with contextlib.suppress(DistributedError):
        member.request(
            "regroup",
            fault=f"{member.name(member.rank)} has lost a connection, but no process has ended",
        )
    return member.has_ended(VERDICT)
