"""The strategies to try: few rows in which every two values of two factors meet, where a strategy can have them."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.errors import UsageError
from jaxdp.parallel import STAGES, STRATEGIES
from jaxdp.parallel.layout import ZERO
from jaxdp.parallel.reduction import REDUCTIONS, make_reduction
from jaxdp.step import TrainState
from jaxdp.verify.subject import Row

ODD = 3  # a number of devices that divides neither the microbatches nor most dims


def cover(own: Row, devices: Sequence[jax.Device]) -> list[Row]:
    """`own` and what else it takes, in a fixed order."""
    number = len(devices)
    counts = [number, ODD] if number > ODD else [number]
    groups = [None, number // 2] if number % 2 == 0 and number > 2 else [None]
    factors: list[Sequence[Any]] = [
        counts,
        [(name, zero) for name, stages in STAGES.items() for zero in stages],
        [name for name in REDUCTIONS if name != "exact" or own.reduction == "exact"],
        ("vmap", "loop", "one"),
        ("split", "whole"),
        groups,
    ]
    every = [Row(n, *stage, *rest) for n, stage, *rest in itertools.product(*factors)]
    possible = [row for row in every if means_something(row) and can_be(row, devices)]
    rows, left = [own], set().union(*map(pairs, possible)) - pairs(own)
    while left:
        best = max(possible, key=lambda row: len(pairs(row) & left))
        rows.append(best)
        left -= pairs(best)
    return rows


def pairs(row: Row) -> set[tuple[Any, ...]]:
    """Every two factors of a row with their values; backend and stage are one."""
    values = {"stage": (row.backend, row.zero), **row._asdict()}
    return set(itertools.combinations([(k, v) for k, v in values.items() if k not in ("backend", "zero")], 2))


def means_something(row: Row) -> bool:
    """Whether each factor that is set decides anything."""
    layout = ZERO[row.zero]
    if (row.accumulate == "one") != (row.reduction == "exact"):
        return False
    return (row.accumulator == "split" or layout.grads) and (row.shard_size is None or layout.opt_state)


def can_be(row: Row, devices: Sequence[jax.Device]) -> bool:
    """Whether there is such a strategy."""
    try:
        require(row, devices)
    except UsageError:
        return False
    return True


def require(row: Row, devices: Sequence[jax.Device]) -> None:
    """UsageError where there is no such strategy on these devices."""
    place(row, lambda: TrainState(jnp.zeros((), jnp.int32), {}, {}, {}), row.devices, devices, 1.0)


def place(row: Row, make_state: Any, microbatches: int, devices: Sequence[jax.Device], bucket_mb: float, **more: Any):
    """The strategy of a row; raises UsageError where there is none."""
    return STRATEGIES[row.backend](
        make_state,
        microbatches,
        make_reduction(row.reduction, bucket_mb),
        None,
        devices[: row.devices],
        zero=row.zero,
        shard_size=row.shard_size,
        accumulator=row.accumulator,
        **more,
    )
