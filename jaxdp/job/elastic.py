"""Train in an elastic job: with the processes that are left when one is lost, and with those that join."""

import hashlib
import json
from collections.abc import Callable
from typing import TypeVar

from jaxdp.config import Config
from jaxdp.config.check import decides, flatten
from jaxdp.distributed.context import Context, ElasticOptions
from jaxdp.supervise.generations import run_generations
from jaxdp.training.snapshots import Snapshots

T = TypeVar("T")


def settings(config: Config | None) -> ElasticOptions | None:
    """Return the argument `elastic` of `jaxdp.init`; None if it is off."""
    if config is None or not config.elastic.enabled:
        return None
    numbers = {key: value for key, value in flatten(config).items() if decides(key) == "numbers"}
    text = json.dumps({**numbers, "run_dir": config.run_dir}, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return ElasticOptions(config.elastic.min_processes, config.elastic.join_timeout, digest)


def train_elastic(train: Callable[[Context, Snapshots], T], context: Context, every: int) -> T:
    """Call `train` in each generation of the job, until it returns.

    Snapshots of the state, `every` so many updates, pass from one generation to the next.
    """
    snapshots = Snapshots(every)
    return run_generations(lambda context: train(context, snapshots), context, snapshots.end_generation)
