"""Run something once for each generation of an elastic job, until it returns."""

import contextlib
import gc
from collections.abc import Callable
from typing import TypeVar

from jaxdp.distributed import faults, membership
from jaxdp.distributed.context import Context, regroup
from jaxdp.distributed.enter import VERDICT
from jaxdp.errors import DistributedError
from jaxdp.supervise.monitor import Stopped

T = TypeVar("T")


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
        ended()
        gc.collect()
        context, regrouped = regroup(), True


def has_ended(error: BaseException) -> bool:
    """Return whether an error is a consequence of the end of this generation."""
    if isinstance(error, Stopped):
        return error.kind == "regroup"
    member = membership.current()
    return member is not None and member.has_ended(VERDICT if faults.is_consequence(error) else 0.5)
