"""Run something once for each generation of an elastic job, until it returns."""

import contextlib
import gc
import time
from collections.abc import Callable
from typing import TypeVar

import jax

from jaxdp.distributed import faults, membership
from jaxdp.distributed.context import Context, regroup
from jaxdp.distributed.enter import VERDICT
from jaxdp.errors import DistributedError, UsageError
from jaxdp.supervise.monitor import Stopped

T = TypeVar("T")
STUCK = 60.0  # seconds; healthy programs may compute for long, but the others do not wait longer


def run_generations(train: Callable[[Context], T], context: Context, ended: Callable[[], None]) -> T:
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
                with contextlib.suppress(DistributedError):  # another process has ended the generation already
                    context.barrier("regroup")
                    membership.joined().request("regroup")
            elif not has_ended(error):
                raise
            end_if_stuck()
        ended()
        gc.collect()
        context, regrouped = regroup(), True


def end_if_stuck() -> None:
    """Wait for the programs of an ended generation; end this process if one does not return.

    It may wait for a send that Gloo never completes, and then the devices could not be closed. A launcher starts the
    process again, and it joins the next generation. Call it while the results of all programs are still referenced.
    """
    deadline = time.monotonic() + STUCK
    while any(not x.is_deleted() and not x.is_ready() for x in jax.live_arrays()):
        if time.monotonic() > deadline:
            member = membership.joined()
            text = f"{member.name(member.rank)} ends: a collective of the ended generation does not return"
            member.end_process(text, 1, member.rank)
        time.sleep(0.01)


def has_ended(error: BaseException) -> bool:
    """Return whether an error is a consequence of the end of this generation."""
    if isinstance(error, Stopped):
        return error.kind == "regroup"
    member = membership.current()
    if member is None:
        return False
    if isinstance(error, UsageError) and error.rank is not None and membership.is_new(error.rank):
        return error.rank != member.rank and member.has_ended(VERDICT)
    return member.has_ended(VERDICT if faults.is_consequence(error) else 0.5)
