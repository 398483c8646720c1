"""The guard decides whether an update is taken, and counts those that are not: scalars that stay on the device.

It sees only what is summed over all devices, so that all decide alike; and it waits for nobody. Once halted, an update
changes nothing of the state any more, so that the host may notice some updates later and finds it as it was.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

NONFINITE, SPIKE = 1, 2  # why it halted; 0 while it did not


def _nothing() -> jax.Array:
    return jnp.zeros((), jnp.int32)


class Spike(NamedTuple):
    """A loss far above the running mean of those before: loss - mean > (factor - 1) x |mean|.

    It is a factor of the mean, and so means little where losses pass through zero. decay: of the mean; after: good
    updates before any loss is a spike. action: 'skip' leaves the update out, 'rollback' halts.
    """

    factor: float
    decay: float = 0.98
    after: int = 100
    action: str = "skip"


class Level(struct.PyTreeNode):
    """mean []: of the losses, decayed, of weights that add up to `weight` []; good []: how many losses are in it."""

    mean: jax.Array = struct.field(default_factory=lambda: jnp.zeros((), jnp.float32))
    weight: jax.Array = struct.field(default_factory=lambda: jnp.zeros((), jnp.float32))
    good: jax.Array = struct.field(default_factory=_nothing)


class Guard(struct.PyTreeNode):
    """Integers []; updates are numbered from 1, and 0 is none.

    in_a_row: updates that were not finite since the last good one, `since` the first of them. skipped: all that were
    not taken; spikes: those of them whose loss was too large. halted: why (NONFINITE, SPIKE), halted_at: where; a spike
    halts with `since` there too. level: None without `Spike`.
    """

    in_a_row: jax.Array = struct.field(default_factory=_nothing)
    since: jax.Array = struct.field(default_factory=_nothing)
    skipped: jax.Array = struct.field(default_factory=_nothing)
    spikes: jax.Array = struct.field(default_factory=_nothing)
    halted: jax.Array = struct.field(default_factory=_nothing)
    halted_at: jax.Array = struct.field(default_factory=_nothing)
    level: Level | None = None


def start(spike: Spike | None = None) -> Guard:
    """Nothing has gone wrong yet."""
    return Guard(level=None if spike is None else Level())


def judge(
    guard: Guard, update: jax.Array, loss: jax.Array, finite: jax.Array, expected: Any, most: int, spike: Spike | None
) -> tuple[jax.Array, Guard]:
    """(whether update number `update` is taken [], the guard after it).

    finite: of the loss and all gradients. expected: one that is not finite is no sign of trouble, and not counted in a
    row. most: so many in a row halt.
    """
    running = guard.halted == 0
    spiked, level = jnp.zeros((), bool), guard.level
    if spike is not None and level is not None:
        spiked, level = _follow(level, spike, loss, finite)
    good = finite & ~spiked
    counted = ~finite & ~jnp.asarray(expected)
    in_a_row = jnp.where(good, 0, guard.in_a_row + counted.astype(jnp.int32))
    since = jnp.where(good, 0, jnp.where(counted & (guard.in_a_row == 0), update, guard.since))
    halted = jnp.where(in_a_row >= most, NONFINITE, 0)
    if spike is not None and spike.action == "rollback":
        halted, since = jnp.where(spiked, SPIKE, halted), jnp.where(spiked, update, since)
    new = Guard(
        in_a_row=in_a_row,
        since=since,
        skipped=guard.skipped + (~good).astype(jnp.int32),
        spikes=guard.spikes + spiked.astype(jnp.int32),
        halted=halted.astype(jnp.int32),
        halted_at=jnp.where(halted != 0, update, 0),
        level=level,
    )
    return running & good, jax.tree.map(lambda after, before: jnp.where(running, after, before), new, guard)


def _follow(level: Level, spike: Spike, loss: jax.Array, finite: jax.Array) -> tuple[jax.Array, Level]:
    """(whether the loss is a spike, the level with it).

    A spike counts as the largest loss that is none: where losses stay higher, the mean gets there, and no run is left
    to skip updates for good.
    """
    loss = loss.astype(jnp.float32)
    above = (spike.factor - 1) * jnp.abs(level.mean)
    spiked = finite & (level.good >= spike.after) & (loss - level.mean > above)
    weight = spike.decay * level.weight + (1 - spike.decay)
    rate = (1 - spike.decay) / weight  # 1 for the first: the mean starts as the first loss
    mean = level.mean + jnp.where(spiked, above, loss - level.mean) * rate
    taken = finite & jnp.isfinite(mean)
    new = Level(mean, weight, level.good + 1)
    return spiked, jax.tree.map(lambda after, before: jnp.where(taken, after, before), new, level)
