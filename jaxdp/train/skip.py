"""Skipped updates: the decision on the device, and its counters.

The decision depends only on sums over all devices, so all devices agree without asking the host.
Once training has halted, further updates leave the state unchanged, so the host may notice the halt
a few updates later."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

Tree = Any
NONFINITE, SPIKE, DISAGREEING = 1, 2, 3  # values of `Guard.halted`; 0 while training runs


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)


class Spike(NamedTuple):
    """A loss far above the running mean of earlier losses: loss - mean > (factor - 1) x |mean|.

    A plain multiple of the mean would fail for losses that pass through zero. decay: of the running
    mean. after: the number of updates before a loss can be a spike. action: 'skip' skips the
    update, 'rollback' halts training."""

    factor: float
    decay: float = 0.98
    after: int = 100
    action: str = "skip"


class Level(struct.PyTreeNode):
    """The running mean of losses. mean []: decayed; weight []: the sum of their weights; good []:
    their number.
    """

    mean: jax.Array = struct.field(default_factory=lambda: jnp.zeros((), jnp.float32))
    weight: jax.Array = struct.field(default_factory=lambda: jnp.zeros((), jnp.float32))
    good: jax.Array = struct.field(default_factory=_zero)


class Guard(struct.PyTreeNode):
    """Counters []; updates are numbered from 1, and 0 means none.

    in_a_row: the number of consecutive non-finite updates; since: the first of them. skipped: all
    skipped updates; spikes: those skipped because the loss was too large. halted: the cause
    (NONFINITE, SPIKE, DISAGREEING); halted_at: the update; except for NONFINITE `since` is that
    update too. Of several replicas, the first and the last of these updates. level: None without
    `Spike`."""

    in_a_row: jax.Array = struct.field(default_factory=_zero)
    since: jax.Array = struct.field(default_factory=_zero)
    skipped: jax.Array = struct.field(default_factory=_zero)
    spikes: jax.Array = struct.field(default_factory=_zero)
    halted: jax.Array = struct.field(default_factory=_zero)
    halted_at: jax.Array = struct.field(default_factory=_zero)
    level: Level | None = None


def start_guard(spike: Spike | None = None) -> Guard:
    """Return the counters before the first update."""
    return Guard(level=None if spike is None else Level())


class Facts(NamedTuple):
    """What the decision depends on, all [].

    Args:
        update: its number, from 1.
        loss: of the batch.
        finite: whether the loss and all gradients are.
        overflow: whether values that are not finite are expected, because a loss scale falls.
        disagreeing: the number of integers of the model state on which microbatches disagree; None
            if it has no integers.
    """

    update: jax.Array
    loss: jax.Array
    finite: jax.Array
    overflow: Any
    disagreeing: jax.Array | None


def decide(guard: Guard, facts: Facts, limit: int, spike: Spike | None) -> tuple[jax.Array, Guard]:
    """Return (True [] if the update is applied, the counters after it).

    Args:
        limit: this many consecutive non-finite updates halt training.
    """
    running, update = guard.halted == 0, facts.update
    spiked, level = jnp.zeros((), bool), guard.level
    if spike and level:
        spiked, level = _detect_spike(level, spike, facts.loss, facts.finite)
    good = facts.finite & ~spiked

    counted = ~facts.finite & ~jnp.asarray(facts.overflow)
    in_a_row = jnp.where(good, 0, guard.in_a_row + counted.astype(jnp.int32))
    first = counted & (guard.in_a_row == 0)
    since = jnp.where(good, 0, jnp.where(first, update, guard.since))
    halted = jnp.where(in_a_row >= limit, NONFINITE, 0)
    if spike and spike.action == "rollback":
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
    applied, new = running & good, jax.tree.map(partial(jnp.where, running), new, guard)
    if facts.disagreeing is None:
        return applied, new

    # A state whose integers differ between microbatches cannot be stored at all.
    bad = applied & (facts.disagreeing > 0)
    halt = new.replace(
        halted=jnp.full_like(new.halted, DISAGREEING), halted_at=update, since=update
    )
    return applied & ~bad, jax.tree.map(partial(jnp.where, bad), halt, new)


def _detect_spike(
    level: Level, spike: Spike, loss: jax.Array, finite: jax.Array
) -> tuple[jax.Array, Level]:
    """Return (True if the loss is a spike, the level after it).

    A spike enters the mean as the largest loss that is not a spike. If losses stay higher, the mean
    rises to them, so the run does not skip updates forever.
    """
    loss = loss.astype(jnp.float32)
    above = (spike.factor - 1) * jnp.abs(level.mean)
    spiked = finite & (level.good >= spike.after) & (loss - level.mean > above)
    weight = spike.decay * level.weight + (1 - spike.decay)
    rate = (1 - spike.decay) / weight  # 1 for the first: the mean starts as the first loss
    mean = level.mean + jnp.where(spiked, above, loss - level.mean) * rate
    accepted = finite & jnp.isfinite(mean)
    new = Level(mean, weight, level.good + 1)
    return spiked, jax.tree.map(partial(jnp.where, accepted), new, level)
