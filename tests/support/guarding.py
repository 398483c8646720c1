"""Updates that the guard leaves out, in a layout: what the state, the counts and the metrics are
then.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import toys
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.precision import LossScaling
from jaxdp.train.skip import NONFINITE, Spike
from layouts import LAYOUTS as USUAL
from layouts import assert_same_bits, contents

LAYOUTS = {**USUAL, "pjit-1": {"backend": "pjit", "layout": {"zero": 1}}}
GOOD, MORE, NAN, INFINITE, STEEP, HIGH, LAST = range(7)  # batches
MOST = 3
WATCH = Spike(2.0, decay=0.5, after=2)


def examples():
    """A batch of 8 of each kind; `odd` goes to the loss alone."""
    made = toys.data(8 * (LAST + 1))
    made["inputs"][8 * NAN + 5, 0, 0, 0] = np.nan
    made["odd"] = np.repeat(np.array([0, 0, 0, np.inf, -1, 100, 0], np.float32), 8)
    made["odd"][8 * INFINITE : 8 * INFINITE + 7] = 0  # one example is enough
    return made


def odd(outputs, batch):
    """Cross entropy and `odd`, of which the parameters know nothing; or, where it is -1, a slope
    that is not finite.
    """
    total, weight, metrics = SoftmaxCrossEntropy()(outputs, batch)
    steep = batch["odd"] == -1
    slope = jnp.sqrt(jnp.where(steep, 0 * outputs.sum(-1), 1.0)) * steep
    return total + jnp.sum(batch["mask"] * (slope + jnp.maximum(batch["odd"], 0))), weight, metrics


@functools.cache
def machine(layout, scaling=None, action="skip", **settings):
    """(strategy, update, i -> batch i on its devices)"""
    strategy, step, batch = toys.build(
        toys.of_all_kinds(), examples(), devices=8, batch_size=8, ema=0.9, loss=odd, optimizer="adamw", scaling=scaling,
        max_nonfinite=MOST, spike=WATCH._replace(action=action), **LAYOUTS[layout], **settings,
    )  # fmt: skip
    return strategy, strategy.compile(step).update, batch


def run(batches, layout, first=None, **settings):
    """([the exported state before, after each update], [metrics of each]); first: changes the first
    state.
    """
    strategy, update, batch = machine(layout, **settings)
    state = strategy.init()
    if first is not None:

        def put(x, like):
            return jax.device_put(np.asarray(x), like.sharding, may_alias=False)

        state = strategy.adopt(
            jax.tree.map(put, first(strategy.export(state)), strategy.abstract())
        )

    def snapshot():
        return jax.tree.map(np.array, strategy.export(state))

    states, metrics = [snapshot()], []
    for i in batches:
        state, m = update(state, batch(i))
        states.append(snapshot())
        metrics.append(jax.device_get(m))
    return states, metrics


def counts(x):
    """Of a state, or of its guard."""
    guard = getattr(x, "guard", x)
    return tuple(
        int(x) for x in (guard.in_a_row, guard.since, guard.skipped, guard.spikes, guard.halted)
    )


def column(metrics, name):
    return [float(m[name]) for m in metrics]


def check_no_trace(kind, layout, **settings):
    states, metrics = run([GOOD, kind, MORE, LAST], layout, **settings)
    without, want = run([GOOD, MORE, LAST], layout, **settings)
    assert_same_bits(contents(states[2]), contents(states[1]))
    assert [math.isfinite(x) for x in column(metrics, "loss")] == [True, kind == STEEP, True, True]
    assert [x > 0 for x in column(metrics, "nonfinite_grads")] == [
        False,
        kind != INFINITE,
        False,
        False,
    ]
    for with_it, never in ((3, 2), (4, 3)):
        assert_same_bits(contents(states[with_it]), contents(without[never]))
        assert_same_bits(states[with_it].guard.level, without[never].guard.level)
        assert toys.relative_error(contents(states[with_it]), contents(states[with_it - 1]))[0] > 0
    assert metrics[2]["loss"] == want[1]["loss"] and metrics[2]["grad_norm"] == want[1]["grad_norm"]
    assert [int(s.step) for s in states] == [0, 1, 2, 3, 4]
    assert (
        list(map(counts, states))
        == [(0, 0, 0, 0, 0)] * 2 + [(1, 2, 1, 0, 0)] + [(0, 0, 1, 0, 0)] * 2
    )
    assert column(metrics, "skipped") == [0, 1, 0, 0] and column(metrics, "skipped_updates") == [
        0,
        1,
        1,
        1,
    ]


def poisoned(state):
    w = np.array(state.params["w"])
    w[-1, -1] = np.nan
    return state.replace(params={**state.params, "w": w})


def check_halt(layout, **settings):
    states, metrics = run([GOOD, MORE, LAST, GOOD, NAN, HIGH], layout, poisoned, **settings)
    for state in states:
        assert_same_bits(contents(state), contents(states[0]))
    for state in states[4:]:
        assert_same_bits(state, states[3])
    assert list(map(counts, states))[1:4] == [
        (1, 1, 1, 0, 0),
        (2, 1, 2, 0, 0),
        (3, 1, 3, 0, NONFINITE),
    ]
    assert int(states[-1].guard.halted_at) == 3 and int(states[-1].step) == 3
    assert column(metrics, "halted") == [0, 0, 1, 1, 1, 1] and column(metrics, "skipped") == [1] * 6
    assert column(metrics, "skipped_updates") == [1, 2, 3, 3, 3, 3]


def check_spike(layout, **settings):
    states, metrics = run(
        [GOOD, HIGH, MORE, HIGH, NAN, LAST], layout, **settings
    )  # the first one comes before two good ones
    before, after = states[3], states[4]
    assert list(map(counts, states))[2:] == [(0, 0, 0, 0, 0)] * 2 + [
        (0, 0, 1, 1, 0),
        (1, 5, 2, 1, 0),
        (0, 0, 2, 1, 0),
    ]
    assert_same_bits(contents(after), contents(before))
    level = before.guard.level
    losses = np.float64(column(metrics, "loss")[:3])
    np.testing.assert_allclose(level.mean, losses @ [0.125, 0.25, 0.5] / 0.875, rtol=1e-6)
    assert losses[1] > 2 * losses[0] and int(level.good) == 3
    assert metrics[3]["loss"] > 2 * level.mean and np.isfinite(metrics[3]["grad_norm"])
    # The spike counts as twice the mean: mean + (2 mean - mean) x 0.5 / (1 - 0.5^4).
    np.testing.assert_allclose(after.guard.level.mean, level.mean * (1 + 0.5 / 0.9375), rtol=1e-6)
    assert column(metrics, "skipped") == [0, 0, 0, 1, 1, 0]


def check_overflow(layout, **settings):
    scaling = LossScaling(4.0)
    states, metrics = run([STEEP] * 6, layout, scaling=scaling, **settings)
    assert [float(s.loss_scale.value) for s in states] == [4, 2, 1, 1, 1, 1, 1]
    row = [0, 0, 1, 2, 3, 3]
    assert list(map(counts, states[1:])) == [
        (n, 3 if n else 0, min(i, 5), 0, NONFINITE if n == 3 else 0) for i, n in enumerate(row, 1)
    ]
    assert (
        column(metrics, "skipped_updates") == [1, 2, 3, 4, 5, 5]
        and int(states[-1].guard.halted_at) == 5
    )
    assert_same_bits(states[6], states[5])
    states, _ = run(
        [STEEP, INFINITE, STEEP, NAN, GOOD, NAN], layout, scaling=scaling, **settings
    )  # a loss is never expected
    assert [float(s.loss_scale.value) for s in states] == [4, 2, 2, 1, 1, 1, 1]
    assert [counts(s)[:3] for s in states[1:]] == [
        (0, 0, 1),
        (1, 2, 2),
        (1, 2, 3),
        (2, 2, 4),
        (0, 0, 4),
        (1, 6, 5),
    ]
