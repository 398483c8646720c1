"""What goes wrong is left out, counted and, in a row, halts: by the rule, and the same in every
layout.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import toys
from cli_runs import DIGITS
from covering import first, only
from guarding import (
    GOOD,
    HIGH,
    INFINITE,
    LAST,
    LAYOUTS,
    MORE,
    NAN,
    STEEP,
    check_halt,
    check_no_trace,
    check_overflow,
    check_spike,
    column,
    counts,
    examples,
    odd,
    run,
)
from jaxdp.cli import load
from jaxdp.config import validation
from jaxdp.data.prefetch import read_batches
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.metrics.console import Console
from jaxdp.metrics.meter import Meter
from jaxdp.models.base import Model
from jaxdp.optim import OPTIMIZERS
from jaxdp.precision import LossScaling
from jaxdp.run.components import make_parts, make_the_step, state_maker
from jaxdp.train.skip import NONFINITE, SPIKE, Facts, Spike, decide, start_guard
from jaxdp.train.step import Forward, UpdateRule, init_state, make_step
from layouts import assert_same_bits, contents
from plain_runs import metering
from programs import compiled

FEW = ("pmap-1", "pjit-3")
every_layout = pytest.mark.parametrize("layout", only(["pjit-3"], LAYOUTS))

# --- in training
# ----------------------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "kind_and_layout",
    only(
        itertools.product([NAN, INFINITE, STEEP], ["pjit-3"]),
        [*itertools.product([NAN], LAYOUTS), *itertools.product([INFINITE, STEEP], FEW)],
    ),
    ids=str,
)
def test_an_update_that_is_not_finite_leaves_no_trace(kind_and_layout):
    """NaN in one example; an infinite loss with finite gradients; a finite loss with a gradient
    that is none.
    """
    check_no_trace(*kind_and_layout)


@every_layout
def test_a_nonfinite_parameter_halts_the_run_for_good(layout):
    check_halt(layout)


@every_layout
def test_a_spike_is_skipped_and_moves_the_mean_by_rule(layout):
    check_spike(layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", first(1, ["pjit-2", "pmap-0"]))
def test_a_spike_that_is_to_be_rolled_back_halts(layout):
    states, metrics = run([GOOD, MORE, NAN, LAST, HIGH, GOOD, NAN], layout, action="rollback")
    assert_same_bits(contents(states[5]), contents(states[4]))
    assert counts(states[4]) == (0, 0, 1, 0, 0) and counts(states[5]) == (0, 5, 2, 1, SPIKE)
    assert int(states[5].guard.halted_at) == 5 and int(states[5].step) == 5
    for state in states[6:]:
        assert_same_bits(state, states[5])
    assert column(metrics, "halted") == [0, 0, 0, 0, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("layout", first(1, ["pjit-3", "pmap-1"]))
def test_an_overflow_of_the_loss_scale_is_not_counted(layout):
    """From 4 the scale falls to 1; only then is a gradient that is not finite no fault of its own."""
    check_overflow(layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", first(1, ["pmap-1", "pjit-1"]))
def test_with_a_scale_that_stays_every_overflow_counts(layout):
    states, _ = run([STEEP] * 3, layout, scaling=LossScaling(4.0, dynamic=False))
    assert counts(states[-1]) == (3, 1, 3, 0, NONFINITE)


@pytest.mark.slow
def test_the_lr_of_a_record_counts_applied_updates():
    def schedule(count):
        return 0.5 ** (count + 1.0)

    strategy, step, batch = toys.build(
        toys.of_all_kinds(), examples(), devices=1, batch_size=8, loss=odd, schedule=schedule,
        optimizer=(optax.sgd(schedule), None),
    )  # fmt: skip
    state, update, told = strategy.init(), strategy.compile(step).update, []
    for i in (GOOD, NAN, MORE, NAN, LAST):
        before = np.array(strategy.export(state).params["b"])
        state, m = update(state, batch(i))
        told.append(float(m["lr"]))
        moved = np.linalg.norm(np.array(strategy.export(state).params["b"]) - before)
        assert (moved == 0) == (i == NAN)
    assert told == [0.5, 0.25, 0.25, 0.125, 0.125]


# --- the rule
# -------------------------------------------------------------------------------------------------------


class Plain:
    """The rule in plain Python and float64."""

    def __init__(self, most, spike):
        self.most, self.spike = most, spike
        self.row = self.since = self.skipped = self.spikes = self.halted = self.at = self.number = (
            self.n
        ) = 0
        self.sum = 0.0  # of the losses by their weights

    @property
    def mean(self):
        return self.sum / (1 - self.spike.decay**self.n) if self.n else 0.0

    def update(self, loss, finite, expected):
        """(taken, how near the loss came to the threshold)"""
        if self.halted:
            return False, math.inf
        self.number += 1
        near = math.inf
        good, spiked = finite and math.isfinite(loss), False
        if good and self.spike:
            most = self.mean + (self.spike.factor - 1) * abs(self.mean)
            near = abs(loss - most) / max(abs(loss), abs(most), abs(self.mean), 1e-30)
            spiked = self.n >= self.spike.after and loss > most
            self.n += 1
            self.sum = self.spike.decay * self.sum + (1 - self.spike.decay) * (
                most if spiked else loss
            )
        if good and not spiked:
            self.row = self.since = 0
        else:
            self.skipped += 1
            self.spikes += spiked
            if not good and not expected:
                self.row += 1
                self.since = self.since or self.number
            if self.row == self.most:
                self.halted = NONFINITE
            if spiked and self.spike.action == "rollback":
                self.halted, self.since = SPIKE, self.number
            self.at = self.number if self.halted else 0
        return good and not spiked, near


RULES = [
    (3, None), (1, None), (2, Spike(1.5, 0.5, 1)), (4, Spike(3.0, 0.9, 2)), (4, Spike(2.0, 0.98, 3, "rollback")),
]  # fmt: skip


@functools.cache
def compiled_decision(most, spike):
    def one(guard, update, loss, finite, expected):
        facts = Facts(update, loss, finite & jnp.isfinite(loss), expected, None)
        return decide(guard, facts, most, spike)

    return jax.jit(one)


LOSS = st.one_of(
    st.floats(0.5, 2, width=32),
    st.floats(-50, 50, width=32),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e4]),
)
UPDATE = st.tuples(LOSS, st.integers(0, 5).map(bool), st.integers(0, 3).map(lambda n: n == 0))


@settings(deadline=None, max_examples=80)
@given(rule=st.sampled_from(RULES), updates=st.lists(UPDATE, max_size=25))
def test_the_guard_does_what_plain_python_does(rule, updates):
    guard, plain = start_guard(rule[1]), Plain(*rule)
    for loss, finite, expected in updates:
        number = np.int32(plain.number + 1)
        taken, guard = compiled_decision(*rule)(guard, number, np.float32(loss), finite, expected)
        want, near = plain.update(loss, finite, expected)
        assume(near > 1e-4)
        assert bool(taken) == want
        assert counts(guard) == (plain.row, plain.since, plain.skipped, plain.spikes, plain.halted)
        assert int(guard.halted_at) == plain.at
        if rule[1]:
            assert int(guard.level.good) == plain.n
            np.testing.assert_allclose(guard.level.mean, plain.mean, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    rule=st.sampled_from([rule for rule in RULES if rule[1] and rule[1].action == "skip"]),
    low=st.floats(0.01, 10),
    times=st.floats(1, 1e4),
    sign=st.sampled_from([1, -1]),
)
def test_losses_that_stay_high_are_accepted_in_time(rule, low, times, sign):
    """Each spike moves the mean by a share of (factor - 1); losses below zero rise towards it."""
    spike, guard = rule[1], start_guard(rule[1])
    old, new = (low, low * times) if sign > 0 else (-low, -low / times)
    step, taken = compiled_decision(*rule), []
    for number in range(1, 400):
        loss = np.float32(old if number <= spike.after else new)
        done, guard = step(guard, np.int32(number), loss, True, False)
        taken.append(bool(done))
    assert all(taken[: spike.after]) and taken[-1]
    first = taken.index(True, spike.after) - spike.after
    assert all(taken[spike.after + first :])
    grows = (1 - spike.decay) * (spike.factor - 1)
    most = math.log(times) / (math.log1p(grows) if sign > 0 else -math.log1p(-min(grows, 0.999)))
    assert first <= most + 1


def test_a_level_stays_where_its_mean_would_overflow():
    rule = (3, Spike(2.0, 0.5, 5))
    guard = start_guard(rule[1])
    for i, loss in enumerate((-3e38, 3e38, -3e38), 1):
        _, guard = compiled_decision(*rule)(guard, np.int32(i), np.float32(loss), True, False)
    assert np.isfinite(guard.level.mean) and int(guard.level.good) == 2 and int(guard.skipped) == 0


# --- in place
# -------------------------------------------------------------------------------------------------------

PARAMS = {"w": np.float32([[1, 2, 3], [4, 5, 6]]), "b": np.float32([1, -1]), "none": None}
TRANSFORMATIONS = {name: (lambda make=make: make(1e-2)) for name, make in OPTIMIZERS.items()} | {
    "jitted": lambda: (lambda tx: tx._replace(update=jax.jit(tx.update)))(optax.adamw(1e-2)),
    "several steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "one count in two places": lambda: optax.GradientTransformation(
        lambda params: (jnp.int32(0), jnp.int32(7), jnp.float32(2)),
        lambda g, s, p=None: (jax.tree.map(lambda x: -s[2] * x, g), (s[0] + 1, *[s[0] + 1], s[2])),
    ),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1e-2)),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name", only(["adamw", "several steps", "one count in two places"], TRANSFORMATIONS)
)
def test_an_optimizer_updates_all_its_state_or_nothing(name):
    tx, params = (
        TRANSFORMATIONS[name](),
        {"w": jnp.asarray(PARAMS["w"]), "b": jnp.asarray(PARAMS["b"])},
    )

    def apply(params, state, batch, key, train):
        return batch["inputs"] @ params["w"] + params["b"][0], state

    model = Model(lambda key, batch: (params, {}), apply)
    examples = {"inputs": np.ones((2, 2), np.float32), "labels": np.zeros(2, np.int32)}
    forward, rule = Forward(model, SoftmaxCrossEntropy()), UpdateRule(tx)
    step, state = make_step(forward, rule), init_state(forward, rule, 1, examples)
    batch = {**{k: v[None] for k, v in examples.items()}, "mask": np.ones((1, 2), np.float32)}
    sums = toys.alone(step.grads, [0])(state, batch)
    broken = sums._replace(grads=jax.tree.map(lambda x: x.at[0].set(jnp.nan), sums.grads))
    for i in range(3):
        before = jax.tree.map(bits, (state.params, state.opt_state))
        kept, metrics = step.apply(state, broken)
        assert metrics["skipped"] == 1
        assert_same_bits(before, jax.tree.map(bits, (kept.params, kept.opt_state)))
        state, metrics = step.apply(state, sums)
        assert metrics["skipped"] == 0 and int(state.step) == i + 1
        assert not jax.tree.all(
            jax.tree.map(
                np.array_equal, before, jax.tree.map(bits, (state.params, state.opt_state))
            )
        )


def bits(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_the_state_is_not_there_twice(optimizer):
    """Gradients of a device and of all are. The selection of a skipped update copies two more trees
    on CPU, where XLA has no fusion with several outputs; on a GPU it is made in place."""
    program = compiled(zero=0, optimizer=optimizer, tokens=4, layers=4, slots=1, accumulate="vmap")
    assert program.memory.temp_size_in_bytes < 3.3 * program.params
    assert program.memory.alias_size_in_bytes > 2.99 * program.params


# --- around it
# ------------------------------------------------------------------------------------------------------


class Lines(list):
    def write(self, record):
        self.append(record)


def test_records_have_counts_the_console_has_the_total(capsys):
    records, metrics = (
        Lines(),
        {"loss": 1.0, "skipped": 0, "skipped_updates": 3, "halted": 0, "nonfinite_grads": 0},
    )
    with metering(Meter(records, 1, 1, {})) as meter:
        meter.before(range(1, 2), {"mask": np.ones((8, 2))})
        meter.after(range(1, 2), None, {name: jnp.asarray(x) for name, x in metrics.items()})
        meter.flush()
    (record,) = records
    assert record["skipped"] == 0 and record["skipped_updates"] == 3 and "halted" not in record
    console = Console(10)
    console.write(record)
    console.write({**record, "skipped_updates": 0.0, "skipped": 0.0})
    first, second = capsys.readouterr().out.splitlines()
    assert "  skipped 3" in first and "skipped" not in second


@pytest.mark.slow
def test_the_config_makes_the_guard():
    assert make_parts(validation.resolve(load(DIGITS)[0])).rule.spike is None
    extra = [
        "--nonfinite.max_consecutive=2",
        "--spike.factor=3",
        "--spike.after=7",
        "--spike.action=rollback",
    ]
    config = validation.resolve(load([*DIGITS, *extra])[0])
    parts = make_parts(config)
    assert parts.rule.spike == Spike(3.0, 0.98, 7, "rollback")
    step, make = make_the_step(config, parts), state_maker(config, parts)
    apply = jax.jit(step.apply)
    state = jax.jit(make)()
    assert state.guard.level is not None
    batch = read_batches(parts.dataset, parts.order, [0], np.arange(8))
    sums = jax.eval_shape(toys.alone(step.grads, np.arange(8)), state, batch)
    broken = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), sums)
    for halted in (0, NONFINITE, NONFINITE):
        state, metrics = apply(state, broken)
        assert int(metrics["halted"]) == halted
    assert int(state.step) == 2 and int(state.guard.since) == 1 and int(state.guard.halted_at) == 2
