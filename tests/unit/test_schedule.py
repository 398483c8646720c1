"""The learning rate that a run records is the one that its optimizer applies, in the precision of
the run.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp.optim import OPTIMIZERS, make_schedule
from jaxdp.optim.schedule import rate_of

LR, STEPS, WARMUP = 0.3, 20, 4


def cosine(i, n):
    return LR * 0.5 * (1 + np.cos(np.pi * min(i, n) / n))


FORMULAS = {  # rate of the update `i` of `n` after the warm-up
    "constant": lambda i, n: LR,
    "cosine": cosine,
    "linear": lambda i, n: LR * (1 - min(i, n) / n),
}
USERS = {
    "optax.warmup_cosine_decay_schedule": (
        {"init_value": 0.0, "peak_value": LR, "warmup_steps": 7, "decay_steps": 27},
        lambda i: LR * i / 7 if i < 7 else cosine(i - 7, 20),
    ),
    "optax.polynomial_schedule": (
        {"init_value": LR, "end_value": 0.1, "power": 2, "transition_steps": 13},
        lambda i: (LR - 0.1) * (1 - min(i, 13) / 13) ** 2 + 0.1,
    ),
    "optax.exponential_decay": (
        {"init_value": LR, "transition_steps": 7, "decay_rate": 0.3},
        lambda i: LR * 0.3 ** (i / 7),
    ),
    "optax.piecewise_constant_schedule": (
        {"init_value": LR, "boundaries_and_scales": {5: 0.3, 9: 0.7}},
        lambda i: LR * 0.3 ** (i >= 5) * 0.7 ** (i >= 9),
    ),
    "optax.linear_schedule": (
        {"init_value": LR, "end_value": 0.0, "transition_steps": 7},
        lambda i: LR * (1 - min(i, 7) / 7),
    ),
}
COUNTS = [0, 1, 2, 3, 4, 5, 8, 9, 13, 19, 20, 25]


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", FORMULAS)
def test_a_float64_rate_is_one(name, x64):
    """Optax divides an int32 count into a float32."""
    schedule, main = make_schedule(name, LR, STEPS, WARMUP), FORMULAS[name]
    want = [LR * i / WARMUP if i < WARMUP else main(i - WARMUP, STEPS - WARMUP) for i in COUNTS]
    got = [jax.jit(schedule)(jnp.int32(i)) for i in COUNTS]
    assert all(x.dtype == np.float64 for x in got)
    np.testing.assert_allclose(got, want, rtol=1e-15, atol=1e-17)


@pytest.mark.parametrize("target", USERS)
def test_a_users_schedule_follows_its_warm_up_exactly(target, x64):
    args, formula = USERS[target]
    if target != "optax.piecewise_constant_schedule":
        schedule = make_schedule({"target": target, "args": args}, LR, STEPS, WARMUP)
        want = [LR * i / WARMUP if i < WARMUP else formula(i - WARMUP) for i in COUNTS]
        np.testing.assert_allclose(
            [schedule(np.int32(i)) for i in COUNTS], want, rtol=1e-15, atol=1e-16
        )
    got = [make_schedule({"target": target, "args": args}, LR, STEPS)(jnp.int32(i)) for i in COUNTS]
    np.testing.assert_allclose(got, [formula(i) for i in COUNTS], rtol=1e-15, atol=1e-16)


PARAMS = {"a": jnp.ones((3, 4)), "b": jnp.ones(4)}


def every(k, tx):
    return optax.MultiSteps(tx, k)


CASES = {  # optimizer of a learning rate -> the rates of six updates; None: it shows none
    "sgd": (lambda lr: OPTIMIZERS["sgd"](lr, momentum=0.9), [0, 1, 2, 3, 4, 5]),
    "three steps to one": (lambda lr: every(3, optax.adam(lr)), [0, 0, 0, 1, 1, 1]),
    "with clipping around it": (
        lambda lr: optax.chain(optax.clip(1.0), every(2, optax.sgd(lr))),
        [0, 0, 1, 1, 2, 2],
    ),
    "steps in steps": (lambda lr: every(2, every(2, optax.sgd(lr))), [0, 0, 0, 0, 1, 1]),
    "an injected schedule": (
        lambda lr: optax.inject_hyperparams(optax.adamw)(learning_rate=lr),
        [0, 1, 2, 3, 4, 5],
    ),
    "injected, three to one": (
        lambda lr: every(3, optax.inject_hyperparams(optax.sgd)(lr)),
        [0, 0, 0, 1, 1, 1],
    ),
    "an injected constant": (
        lambda lr: optax.inject_hyperparams(optax.sgd)(learning_rate=0.25),
        [2] * 6,
    ),
    "a rate of its own": (lambda lr: optax.sgd(0.25), None),
    "a schedule that no update reads": (lambda lr: optax.chain(optax.sgd(0.25), counted(lr)), None),
    "a count that starts at 2": (
        lambda lr: optax.scale_by_schedule(lambda i: -lr(i + 2)),
        [2, 3, 4, 5, 6, 7],
    ),
    "jitted": (lambda lr: jitted(optax.adamw(lr)), [0, 1, 2, 3, 4, 5]),
    "schedule-free": (
        lambda lr: optax.contrib.schedule_free(optax.sgd(lr), lr),
        [0, 1, 2, 3, 4, 5],
    ),
    "parts": (
        lambda lr: optax.partition({"x": optax.sgd(lr), "y": optax.adam(lr)}, {"a": "x", "b": "y"}),
        [0, 1, 2, 3, 4, 5],
    ),
    "muon": (lambda lr: OPTIMIZERS["muon"](lr, weight_decay=0.1), [0, 1, 2, 3, 4, 5]),
    "adafactor": (lambda lr: OPTIMIZERS["adafactor"](lr, weight_decay=0.1), [0, 1, 2, 3, 4, 5]),
    "lamb": (OPTIMIZERS["lamb"], [0, 1, 2, 3, 4, 5]),
    "masked": (
        lambda lr: optax.masked(optax.lion(lr), {"a": True, "b": False}),
        [0, 1, 2, 3, 4, 5],
    ),
    "prodigy": (lambda lr: optax.contrib.prodigy(lr), [0, 1, 2, 3, 4, 5]),
}


def counted(schedule):
    """Keeps a rate in its state and changes nothing."""

    def update(updates, state, params=None):
        return (
            updates,
            {"count": state["count"] + 1, "rate": schedule(state["count"])},
        )

    return optax.GradientTransformation(
        lambda params: {"count": jnp.int32(0), "rate": jnp.float32(0)}, update
    )


def jitted(tx):
    return optax.GradientTransformation(tx.init, jax.jit(tx.update))


@pytest.mark.parametrize("name", CASES)
def test_the_rate_is_the_one_the_optimizer_uses(name):
    make, want = CASES[name]
    schedule = make_schedule("rates.decay_to", 1.0, 10)
    tx, grads = make(schedule), jax.tree.map(jnp.ones_like, PARAMS)

    @jax.jit
    def update(state):
        new = tx.update(grads, state, PARAMS)[1]
        return new, rate_of(tx, grads, state, PARAMS, new)

    state, rates = tx.init(PARAMS), []
    for _ in range(6):
        state, rate = update(state)
        rates.append(rate)
    assert rates == ([None] * 6 if want is None else [0.5**i for i in want])
