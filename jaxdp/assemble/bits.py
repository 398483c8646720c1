"""The configurations of `jaxdp verify --exact`: the config's own run, on different numbers of devices."""

import dataclasses
from typing import Any

import jax

from jaxdp.assemble.components import make_parts, set_jax
from jaxdp.assemble.preflight import check_optimizer
from jaxdp.assemble.problem import make_variant, smaller
from jaxdp.config import Config
from jaxdp.config.check import check_exact
from jaxdp.data.prefetch import read_batch
from jaxdp.verify import Configuration
from jaxdp.verify.exact import Make, exact_configurations

__all__ = ["exactly", "make_bits"]


def exactly(config: Config) -> Config:
    """Return the config in exact mode, with the smaller arguments of `verify`. Raises UsageError."""
    parallel = dataclasses.replace(config.parallel, reduction=config.parallel.exact_reduction, accumulate="auto")
    config = dataclasses.replace(smaller(config), parallel=parallel)
    check_exact(config)
    return config


def make_bits(config: Config, devices: int, updates: int) -> tuple[Make, list[Configuration], list[int]]:
    """Return (the function that builds a configuration, the configurations, the numbers of the batches).

    The batches are the first ones and the last of an epoch, which may be incomplete. In a job of several processes the
    configurations are one device of each process, and all devices.
    """
    set_jax(config)
    parts = make_parts(config)
    all_devices, several = jax.devices(), jax.process_count() > 1
    summands = config.microbatches // config.parallel.exact_group
    limit = len(all_devices) if several else min(devices, len(all_devices), summands)

    def make(configuration: Configuration) -> Any:
        strategy, step = make_variant(config, parts, configuration, all_devices)
        check_optimizer(config, strategy, parts.rule.tx, step)
        read = lambda i: read_batch(parts.dataset, parts.cursor, i, strategy.local_slots)
        return strategy, step, lambda i: strategy.shard_batch(read(i))

    last = parts.cursor.steps_per_epoch - 1
    batches = [min(i, last) if i < updates - 1 else last for i in range(updates)]
    return make, exact_configurations(limit, config.parallel.reduction, several), batches
