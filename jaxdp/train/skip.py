"""Skipped updates: the decision on the device, its counters, and an optimizer update that can be
skipped in place.

The decision depends only on sums over all devices, so all devices agree without asking the host.
Once training has halted, further updates leave the state unchanged, so the host may notice the halt
a few updates later."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.extend.core import Var

from jaxdp.train.interpreter import bind, evaluate

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


def decide(
    guard: Guard,
    update: jax.Array,
    loss: jax.Array,
    finite: jax.Array,
    overflow: Any,
    limit: int,
    spike: Spike | None,
) -> tuple[jax.Array, Guard]:
    """Decide whether to apply update number `update`; return (the decision [], the counters after
    the update).

    Args:
        finite: the loss and all gradients are finite.
        overflow: non-finite values are expected here and do not count as consecutive.
        limit: this many consecutive non-finite updates halt training.
    """
    running = guard.halted == 0
    spiked, level = jnp.zeros((), bool), guard.level
    if spike is not None and level is not None:
        spiked, level = _detect_spike(level, spike, loss, finite)
    good = finite & ~spiked
    counted = ~finite & ~jnp.asarray(overflow)
    in_a_row = jnp.where(good, 0, guard.in_a_row + counted.astype(jnp.int32))
    since = jnp.where(good, 0, jnp.where(counted & (guard.in_a_row == 0), update, guard.since))
    halted = jnp.where(in_a_row >= limit, NONFINITE, 0)
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
    return running & good, jax.tree.map(
        lambda after, before: jnp.where(running, after, before), new, guard
    )


def halt_if_disagreeing(
    guard: Guard, update: jax.Array, apply_update: jax.Array, disagreeing: jax.Array
) -> tuple[jax.Array, Guard]:
    """Halt at an update that would be applied, but whose microbatches disagree on integers of the
    model state.
    """
    bad = apply_update & (disagreeing > 0)
    new = guard.replace(
        halted=jnp.full_like(guard.halted, DISAGREEING), halted_at=update, since=update
    )
    return apply_update & ~bad, where(bad, new, guard)


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
    return spiked, jax.tree.map(
        lambda after, before: jnp.where(accepted, after, before), new, level
    )


def where(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    """Select one tree or the other; a leaf that is the same array in both is returned without a
    selection.
    """
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), yes, no)


def update(
    tx: optax.GradientTransformation,
    apply_update: jax.Array,
    grads: Tree,
    state: Tree,
    params: Tree,
) -> tuple[Tree, Tree]:
    """Apply an optimizer update conditionally without keeping a second copy of the state.

    Returns tx.update(grads, state, params) if `apply_update` [], else the old state and updates
    without meaning.

    If the selection came last, the new value of a leaf would have two readers: the selection and
    any other operation on it. The compiler would then compute it twice and copy the old value. So
    each leaf is selected where it is computed, and all later operations read the selected value.
    """
    closed, shapes = jax.make_jaxpr(tx.update, return_shape=True)(grads, state, params)
    old, last = jax.tree.leaves(state), closed.jaxpr.outvars
    out = last[len(last) - len(old) :]
    old_value = {x: y for x, y in zip(out, old, strict=True) if isinstance(x, Var)}
    selected = set()

    def rule(equation: Any, inputs: list[Any]) -> list[Any]:
        results = bind(equation, inputs)
        selected.update(equation.outvars)

        def select(x, value):
            return jnp.where(apply_update, value, old_value[x]) if x in old_value else value

        return [select(x, value) for x, value in zip(equation.outvars, results, strict=True)]

    results = evaluate(closed, jax.tree.leaves((grads, state, params)), rule)
    done = [
        isinstance(x, Var) and x in selected and old_value[x] is y
        for x, y in zip(out, old, strict=True)
    ]
    updates, new = jax.tree.unflatten(jax.tree.structure(shapes), results)

    def finish(done, a, b):
        return a if done else where(apply_update, a, b)  # not done: arguments, shared values

    return updates, jax.tree.map(
        finish, jax.tree.unflatten(jax.tree.structure(state), done), new, state
    )
