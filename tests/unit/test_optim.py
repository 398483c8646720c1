"""Every optimizer and schedule of the tables, by contract."""

import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp.config import Config
from jaxdp.config.training import Optimizer
from jaxdp.errors import UsageError
from jaxdp.optim import (
    OPTIMIZERS,
    SCHEDULES,
    decay_mask,
    make_optimizer,
    make_schedule,
    scale_by_path,
)
from jaxdp.optim.muon import matrices
from jaxdp.optim.roles import Role
from jaxdp.run.components import make_tx, schedule_of

PARAMS = {
    "layer": {"kernel": jnp.full((4, 4), 2.0), "bias": jnp.full(4, 2.0)},
    "norm": {"scale": jnp.ones(4) * 2},
}
RNG = np.random.default_rng(0)
NO_DECAY = [r"(^|/)(bias|scale)$"]


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_descends_and_decays_only_kernels(name):
    tx = make_optimizer(OPTIMIZERS[name], optax.constant_schedule(0.01), 0.1, NO_DECAY)

    @jax.jit
    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(30):
        params, state = update(params, state, jax.tree.map(lambda p: 2 * p, params))
    assert all(float(jnp.abs(p).max()) < 2 for p in jax.tree.leaves(params))
    params, _ = update(PARAMS, tx.init(PARAMS), jax.tree.map(jnp.zeros_like, PARAMS))
    assert float(jnp.abs(params["layer"]["kernel"] - 2).min()) > 0
    np.testing.assert_array_equal(params["layer"]["bias"], PARAMS["layer"]["bias"])
    np.testing.assert_array_equal(params["norm"]["scale"], PARAMS["norm"]["scale"])


@pytest.mark.parametrize("name", ["lion", "adafactor", "muon"])
def test_decay_is_adamws_and_follows_the_learning_rate(name):
    """With zero gradients only the decay is left; at a learning rate of 0, nothing."""
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)

    def decayed(name):
        tx = make_optimizer(OPTIMIZERS[name], optax.linear_schedule(0.0, 0.02, 2), 0.1, NO_DECAY)
        params, state, history = PARAMS, tx.init(PARAMS), []
        for _ in range(3):
            updates, state = tx.update(zeros, state, params)
            params = optax.apply_updates(params, updates)
            history.append(params)
        return history

    got, want = decayed(name), decayed("adamw")
    jax.tree.map(np.testing.assert_array_equal, got[0], PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_warms_up_peaks_and_ends(name):
    lr = make_schedule(name, 0.5, 100, 10 if name != "one_cycle" else 0)
    values = np.array([lr(i) for i in range(101)])
    assert values.max() == pytest.approx(0.5, rel=1e-3)
    if name != "one_cycle":
        np.testing.assert_allclose(values[:10], np.arange(10) * 0.05, atol=1e-6)
    assert values[100] == pytest.approx(0.5 if name == "constant" else 0.0, abs=1e-3)
    assert make_schedule("cosine", 0.5, 100, 0, final_lr=0.1)(100) == pytest.approx(0.05)


def test_the_config_names_the_schedules_of_the_table():
    assert all(name in inspect.getdoc(Optimizer) for name in SCHEDULES)


def test_any_function_that_returns_a_schedule_is_one():
    """Its own parameters come from args, and lr, steps and final_lr from the config."""
    mine = make_schedule(
        {"target": "rates.decay_to", "args": {"factor": 0.25}}, 0.8, 100, warmup_steps=10
    )
    assert [float(mine(i)) for i in (5, 10, 11)] == pytest.approx([0.4, 0.8, 0.2])
    assert make_schedule("rates.decay_to", 0.8, 100)(1) == pytest.approx(0.4)
    args = {"init_value": 0.1, "decay_steps": 50}
    of_optax = make_schedule({"target": "optax.cosine_decay_schedule", "args": args}, 1.0, 100)
    assert [float(of_optax(i)) for i in (0, 25, 50)] == pytest.approx([0.1, 0.05, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    "name, values", [("wsd", [1, 1, 1, 0.5, 0]), ("restarts", [1, 1, 1, 0.345, 0])]
)
def test_the_schedules_of_the_example(name, values, monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2] / "examples")
    schedule = make_schedule(f"schedules.{name}", 1.0, 100, final_lr=0.0)
    assert [float(schedule(i)) for i in (0, 25, 75, 90, 100)] == pytest.approx(values, abs=1e-2)
    root = make_schedule({"target": "schedules.inverse_sqrt", "args": {"timescale": 25}}, 1.0, 100)
    assert [float(root(i)) for i in (0, 25, 100)] == pytest.approx([1, 1, 0.5])


@pytest.mark.parametrize(
    "shape, words",
    [
        ("cosin", "optimizer.schedule: 'cosin' is neither"),
        (
            {"target": "optax.cosine_decay_schedule"},
            "optimizer.schedule.args.init_value: cosine_decay_schedule needs it",
        ),
        ({"target": "rates.decay_to", "args": {"fctor": 1}}, "did you mean 'factor'"),
        ("jax.numpy.zeros", "optimizer.schedule.args.shape: zeros needs it"),
        (
            "rates.pair",
            "'rates.pair' must return a function from the number of an update to one learning rate",
        ),
        (
            {"args": {}},
            "optimizer.schedule: {'args': {}} is not a schedule; give a name such as cosine",
        ),
    ],
)
def test_what_is_no_schedule_is_refused(shape, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        make_schedule(shape, 0.1, 100)


def test_the_decay_mask_goes_by_path():
    assert decay_mask(NO_DECAY)(PARAMS) == {
        "layer": {"kernel": True, "bias": False},
        "norm": {"scale": False},
    }
    assert decay_mask(["^norm/"])(PARAMS)["layer"] == {"kernel": True, "bias": True}


def test_any_optax_transformation_is_a_target():
    tx = make_optimizer(optax.rmsprop, optax.constant_schedule(0.1), decay=0.8)
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert float(updates["layer"]["bias"][0]) < 0
    with pytest.raises(ValueError, match=r"weight_decay: 0\.1 but rmsprop takes none"):
        make_optimizer(optax.rmsprop, optax.constant_schedule(0.1), 0.1)


def test_of_learning_rates_the_first_match_counts():
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    tx = scale_by_path({"kernel$": 0.5, "^layer/": 0.25, "^layer/bias": 7.0, "nowhere": 3.0})
    updates, _ = jax.jit(tx.update)(grads, tx.init(PARAMS))
    got = jax.tree.map(lambda u: float(u.ravel()[0]), updates)
    assert got == {"layer": {"kernel": 0.5, "bias": 0.25}, "norm": {"scale": 1.0}}
    half = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
    assert {u.dtype.name for u in jax.tree.leaves(tx.update(half, tx.init(half))[0])} == {
        "bfloat16"
    }
    with pytest.raises(UsageError, match=r"lr_scale: '\(' is not a regular expression"):
        scale_by_path({"(": 1.0})


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lr_scale_scales_the_rate_and_the_decay(name):
    plain, half, all_half = (
        make_optimizer(OPTIMIZERS[name], optax.constant_schedule(lr), 0.1, NO_DECAY, lr_scale=scale)
        for lr, scale in ((0.02, {}), (0.02, {"norm|kernel": 0.5}), (0.01, {}))
    )
    grads = jax.tree.map(
        lambda p: jnp.cos(jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape), PARAMS
    )

    def of(tx):
        return tx.update(grads, tx.init(PARAMS), PARAMS)[0]

    assert jax.tree.structure(plain.init(PARAMS)) == jax.tree.structure(all_half.init(PARAMS))
    for path, got in jax.tree_util.tree_leaves_with_path(of(half)):
        want = dict(
            jax.tree_util.tree_leaves_with_path(of(plain if path[-1].key == "bias" else all_half))
        )[path]
        np.testing.assert_allclose(got, want, rtol=1e-6)


STACKED = {
    "embed": {"embedding": RNG.normal(size=(10, 4)).astype(np.float32)},
    "blocks": {
        "kernel": RNG.normal(size=(3, 4, 6)).astype(np.float32),
        "scale": RNG.normal(size=(3, 4)).astype(np.float32),
    },
    "head": {
        "kernel": RNG.normal(size=(4, 10)).astype(np.float32),
        "bias": np.zeros(10, np.float32),
    },
    "conv": RNG.normal(size=(3, 3, 2, 4)).astype(np.float32),
}


ROLES = {"embed/embedding": Role("table", True)}


def train_muon(params, blocks, **args):
    schedule = optax.constant_schedule(0.1)
    tx = make_optimizer(
        OPTIMIZERS["muon"], schedule, 0.1, NO_DECAY, blocks=blocks, roles=ROLES, **args
    )

    @jax.jit
    def update(params, state):
        updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(3):
        params, state = update(params, state)
    return params


def test_muon_takes_matrices_stacked_or_not():
    found = matrices(["blocks"], ROLES)(STACKED)
    assert found["blocks"] == {"kernel": (1, 2), "scale": None}
    assert found["head"] == {"kernel": (0, 1), "bias": None}
    assert found["embed"]["embedding"] is None and found["conv"] == ((0, 1, 2), 3)
    assert matrices()(STACKED)["blocks"] == {
        "kernel": ((0, 1), 2),
        "scale": (0, 1),
    }  # it has to be told


@pytest.mark.slow
def test_muon_updates_a_stack_block_by_block():
    def block(i):
        return jax.tree.map(lambda x: x[i], STACKED["blocks"])

    apart = {**STACKED, "blocks": [block(i) for i in range(3)]}
    got, want = train_muon(STACKED, ["blocks"]), train_muon(apart, [])
    blocks = jax.tree.map(lambda *xs: np.stack(xs), *want.pop("blocks"))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        got,
        {**want, "blocks": blocks},
    )


@pytest.mark.slow
@pytest.mark.parametrize("adam", [None, 0.02])
def test_muon_is_optaxs_for_matrices_and_adamw_else(adam):
    got = train_muon(STACKED, ["blocks"], adam_learning_rate=adam)
    decay = decay_mask(NO_DECAY)
    head = {"head": {"kernel": STACKED["head"]["kernel"]}}
    conv = {"conv": STACKED["conv"]}
    dims = {"conv": optax.contrib.MuonDimensionNumbers((0, 1, 2), 3)}
    rest = {"embed": STACKED["embed"], "head": {"bias": np.zeros(10, np.float32)}}
    for params, tx in (
        (head, optax.contrib.muon(0.1, weight_decay=0.1, weight_decay_mask=decay)),
        (conv, optax.contrib.muon(0.1, weight_decay=0.1, muon_weight_dimension_numbers=dims)),
        (rest, optax.adamw(adam or 0.1, weight_decay=0.1, mask=decay, nesterov=True)),
    ):
        state, update = tx.init(params), jax.jit(tx.update)
        for _ in range(3):
            updates, state = update(jax.tree.map(jnp.sin, params), state, params)
            params = optax.apply_updates(params, updates)
        for path, want in jax.tree_util.tree_leaves_with_path(params):
            own = dict(jax.tree_util.tree_leaves_with_path(got))[path]
            np.testing.assert_allclose(
                own, want, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path)
            )


@pytest.mark.parametrize("no_decay", [["bias"], pytest.param([], marks=pytest.mark.slow)])
def test_muons_adam_has_a_rate_of_its_own(no_decay):
    def history(lr, **args):
        config = Config(
            optimizer=Optimizer(
                "muon", lr, "linear", weight_decay=0.5, no_decay=no_decay, args=args
            )
        )
        tx = make_tx(config, schedule_of(config, 4))
        params = {"kernel": jnp.eye(3), "bias": jnp.ones(3)}
        state, updates = tx.init(params), []
        for _ in range(4):
            update, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
            updates.append(update)
        return jax.tree.map(lambda *xs: np.stack(xs), *updates)

    both, fast, slow = history(0.1, adam_learning_rate=0.01), history(0.1), history(0.01)
    np.testing.assert_array_equal(both["kernel"], fast["kernel"])
    np.testing.assert_allclose(both["bias"], slow["bias"], rtol=1e-6)


@pytest.mark.slow
def test_arguments_reach_muon():
    a, b = train_muon(STACKED, ["blocks"]), train_muon(STACKED, ["blocks"], consistent_rms=0.2)
    assert float(jnp.abs(a["head"]["kernel"] - b["head"]["kernel"]).max()) > 1e-3
    np.testing.assert_array_equal(a["embed"]["embedding"], b["embed"]["embedding"])
