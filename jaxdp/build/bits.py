"""Config -> what `jaxdp verify --exact` trains: the run itself, as any number of devices would."""

import dataclasses
from typing import Any

import jax

from jaxdp.build import check_optimizer
from jaxdp.build.parts import make_parts, make_strategy, make_the_step, set_jax, state_maker
from jaxdp.build.subject import smaller
from jaxdp.config import Config
from jaxdp.config.check import check_exact
from jaxdp.data.prefetch import read_batch
from jaxdp.parallel.exact import largest
from jaxdp.verify import Row
from jaxdp.verify.bits import Make

__all__ = ["exactly", "make_bits"]


def exactly(config: Config) -> Config:
    """The config in exact mode, and with what is smaller while it is verified. Raises UsageError where it cannot be."""
    parallel = dataclasses.replace(config.parallel, reduction="exact", accumulate="auto", accumulator="whole")
    config = dataclasses.replace(smaller(config), parallel=parallel)
    check_exact(config)
    return config


def make_bits(config: Config, devices: int, updates: int) -> tuple[Make, int, list[int]]:
    """(what makes a row, the most devices, the batches: the first ones and, maybe ragged, the last of an epoch)."""
    set_jax(config)
    parts = make_parts(config)
    there = jax.devices()
    most = largest(config.microbatches)
    while most > min(devices, len(there)):
        most //= 2

    def make(row: Row) -> Any:
        parallel: Any = {k: getattr(row, k) for k in ("backend", "zero", "accumulator", "shard_size")}
        here = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **parallel))
        check_exact(here)
        step = make_the_step(here, parts)
        strategy = make_strategy(here, parts, state_maker(here, parts), there[: row.devices])
        check_optimizer(here, strategy, parts.tx, step)
        read = lambda i: read_batch(parts.dataset, parts.cursor, i, strategy.local_slots)
        return strategy, step, lambda i: strategy.put(read(i))

    last = parts.cursor.steps_per_epoch - 1
    return make, most, [min(i, last) if i < updates - 1 else last for i in range(updates)]
