"""Train in an elastic job: with the processes that are left when one is lost, and with those that join."""

import contextlib
import gc
import hashlib
import json
from collections.abc import Callable
from typing import TypeVar

from jaxdp.config import Config
from jaxdp.config.check import decides, flatten
from jaxdp.distributed import faults, membership
from jaxdp.distributed.context import Context, Elastic, regroup
from jaxdp.errors import DistributedError
from jaxdp.supervise.monitor import Stopped
from jaxdp.training.snapshots import Snapshots

T = TypeVar("T")
VERDICT = 5.0  # seconds that the coordinator has to report the lost process that a collective has failed by


def settings(config: Config | None) -> Elastic | None:
    """Return the argument `elastic` of `jaxdp.init`; None if it is off."""
    if config is None or not config.elastic.enabled:
        return None
    numbers = {key: value for key, value in flatten(config).items() if decides(key) == "numbers"}
    text = json.dumps({**numbers, "run_dir": config.run_dir}, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Elastic(config.elastic.min_processes, config.elastic.join_timeout, digest)


def train_elastic(train: Callable[[Context, Snapshots], T], context: Context, every: int) -> T:
    """Call `train` with the processes of each generation of the job, until it returns.

    Snapshots of the state, `every` so many updates, pass from one generation to the next.
    """
    snapshots = Snapshots(every)
    while True:
        try:
            return train(context, snapshots)
        except Exception as error:
            if isinstance(error, Stopped) and error.kind == "regroup":
                with contextlib.suppress(DistributedError):  # another process has ended the generation already
                    context.barrier("regroup")
                    membership.joined().request("regroup")
            elif not has_ended(error):
                raise
        snapshots.settle()
        gc.collect()
        context = regroup()
        context.agree(None)  # a process that joins tells here if its config is wrong
        snapshots.generations += 1


def has_ended(error: BaseException) -> bool:
    """Return whether an error is a consequence of the end of this generation."""
    if isinstance(error, Stopped):
        return error.kind == "regroup"
    member = membership.current()
    return member is not None and member.has_ended(VERDICT if faults.is_consequence(error) else 0.5)
