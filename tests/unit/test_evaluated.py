"""What is evaluated, exported and predicted with: weights and statistics that belong together, and
none in between.
"""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from averaging import FREE, Plain, X, Y, fit, loss_of, named
from checks import check_averaged_statistics
from covering import first
from jaxdp.checkpoint.weights import from_checkpoint, on_host
from jaxdp.cli import load
from jaxdp.cli.export import export
from jaxdp.optim.evaluation import evaluation_arrays, evaluation_params
from jaxdp.process.context import current
from jaxdp.run.build import make_run
from jaxdp.train.average import average_statistics
from launch import SUPPORT
from layouts import LAYOUTS

GOLDEN = SUPPORT / "golden"


# --- the average, and its statistics
# --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    return fit(run_dir=tmp_path_factory.mktemp("evaluated") / "run", eval={"ema": True})


def test_averaged_weights_go_with_averaged_statistics(averaged, tmp_path):
    want = loss_of(averaged.ema, averaged.ema_state)
    assert abs(want - loss_of(averaged.ema, averaged.model_state)) > 1e-3
    assert averaged.final["loss"] == averaged.evaluate()["loss"] == pytest.approx(want, rel=1e-5)
    logits = averaged.predict(X)
    assert np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(Y)), Y]) == pytest.approx(
        want, rel=1e-5
    )
    assert averaged.evaluate(ema=False)["loss"] == pytest.approx(
        loss_of(averaged.params, averaged.model_state), rel=1e-5
    )


@pytest.mark.slow
def test_it_is_exported_and_loaded_with_them(averaged, tmp_path):
    file = tmp_path / "a.safetensors"
    export(
        {
            "run_dir": str(averaged.run_dir),
            "step": None,
            "output": str(file),
            "ema": True,
            "layout": "jaxdp",
        }
    )
    for source in (file, averaged.run_dir):
        begun = fit(
            init_from=source,
            init={"ema": True},
            steps=1,
            optimizer={"target": "sgd", "lr": 0.0, "ema": 0.9},
        )
        assert jax.tree.all(jax.tree.map(np.array_equal, begun.params, averaged.ema))
        assert (
            abs(named(begun.ema_state)["norm/mean"] - named(averaged.ema_state)["norm/mean"]).max()
            < 0.1
            * abs(
                named(begun.model_state)["norm/mean"] - named(averaged.ema_state)["norm/mean"]
            ).max()
            + 1e-6
        )


@pytest.mark.parametrize("layout", first(1, [*LAYOUTS]))
def test_the_statistics_are_averaged_by_the_formula(layout):
    check_averaged_statistics(**LAYOUTS[layout])


def test_an_infinite_first_minimum_has_an_average():
    start = {"least": jnp.array([np.inf, np.inf, 2.0]), "calls": None}
    new = average_statistics(
        start, {"least": jnp.array([3.0, np.inf, 1.0]), "calls": jnp.int32(1)}, 0.75
    )
    np.testing.assert_array_equal(new["least"], [3.0, np.inf, 1.75])


def test_a_model_without_statistics_has_none():
    assert fit(Plain, steps=1).ema_state == {}


def test_a_missing_average_starts_from_the_model_state(tmp_path, monkeypatch):
    """The golden checkpoint, which version 0.1 has saved."""
    monkeypatch.syspath_prepend(GOLDEN)
    shutil.copytree(GOLDEN / "run", tmp_path / "run")
    config, *_ = load(["--config", str(GOLDEN / "golden.yaml"), "--parallel.devices", "1"])
    run, said = make_run(config, tmp_path / "run", current()), []
    state = run.checkpoints.restore(run.checkpoints.latest(), run.strategy.abstract(), said.append)
    assert said == [
        "checkpoint 10 has no running average of the model state: it starts from the model state"
    ]
    np.testing.assert_array_equal(state.extra["ema_state"]["mean"], state.model_state["mean"])
    assert state.extra["ema_state"]["calls"] is None
    weights = on_host(from_checkpoint(tmp_path / "run" / "checkpoints" / "10", True))
    np.testing.assert_array_equal(weights["model_state/mean"], state.model_state["mean"])


# --- optimizers that train other weights than those to evaluate
# -----------------------------------------------------


def masked(tx):
    return optax.masked(tx, lambda params: {name: name != "last" for name in params})


def partitioned(tx):
    return optax.partition(
        {"first": tx, "last": optax.adam(0.1)}, {"first": "first", "last": "last"}
    )


def SAM(period=2):
    return optax.contrib.sam(
        optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.5)), period
    )


WRAPPED = {
    "itself": FREE,
    "in a chain": lambda: optax.chain(optax.clip(1.0), FREE()),
    "masked": lambda: masked(FREE()),
    "of a part": lambda: partitioned(FREE()),
    "several steps": lambda: optax.MultiSteps(FREE(), 2).gradient_transformation(),
    "injected": lambda: optax.inject_hyperparams(optax.contrib.schedule_free_sgd)(
        learning_rate=0.2, b1=0.7
    ),
    "adamw": lambda: optax.contrib.schedule_free_adamw(0.05, b1=0.8),
    "sam between": lambda: SAM(4),
    "sam at its end": lambda: SAM(3),
}


def evaluated_by_optax(state, params):
    """The parameters to evaluate, with Optax's own function, for the states of WRAPPED."""

    def is_one(x):
        return isinstance(x, optax.contrib.ScheduleFreeState | optax.contrib.SAMState)

    (own,) = [x for x in jax.tree.leaves(state, is_leaf=is_one) if is_one(x)]
    if isinstance(own, optax.contrib.SAMState):
        return own.cache if int(own.steps_since_sync) else params

    def is_masked(x):
        return isinstance(x, optax.MaskedNode)

    ours = jax.tree.map(lambda z, y: z if is_masked(z) else y, own.z, params, is_leaf=is_masked)
    x = optax.contrib.schedule_free_eval_params(own, ours)
    return jax.tree.map(lambda x, y: y if is_masked(x) else x, x, params, is_leaf=is_masked)


@pytest.mark.parametrize("name", WRAPPED)
def test_the_weights_to_evaluate_are_those_of_optax(name):
    tx = WRAPPED[name]()
    params = {"first": {"kernel": jnp.ones((3, 2))}, "last": {"kernel": jnp.arange(4.0)}}
    state = tx.init(params)
    update = jax.jit(tx.update)
    for i in range(6):
        updates, state = update(jax.tree.map(lambda p, i=i: jnp.cos(p + i), params), state, params)
        params = optax.apply_updates(params, updates)
    got, want = (
        evaluation_params(params, evaluation_arrays(state)),
        evaluated_by_optax(state, params),
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), got, want)
    moved = any(np.any(a != b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(params)))
    assert moved == (name != "sam at its end")


def test_other_states_have_none():
    params = {"z": jnp.ones(2), "b1": jnp.ones(3), "cache": {"x": jnp.ones(2)}}
    for tx in (
        optax.adam(1.0),
        optax.inject_hyperparams(optax.adam)(learning_rate=1.0),
        optax.sgd(0.1, 0.9),
    ):
        assert evaluation_arrays(tx.init(params)) == {}


PARALLEL = {
    "pmap": {"devices": 2},
    "pmap, zero 1": {"devices": 2, "zero": 1},
    "pjit, zero 1": {"backend": "pjit", "devices": 4, "zero": 1},
    "pjit, zero 3": {"backend": "pjit", "devices": 8, "zero": 3},
    "pjit, groups": {"backend": "pjit", "devices": 8, "zero": 2, "shard_size": 4},
}


@pytest.mark.parametrize("layout", first(1, [*PARALLEL]))
def test_schedule_free_weights_are_used_everywhere(layout, tmp_path, capsys):
    trained = fit(
        Plain, FREE(), run_dir=tmp_path / "run", eval={"every": 3}, parallel=PARALLEL[layout]
    )
    checkpoint = tmp_path / "run" / "checkpoints" / "6"
    raw = on_host(from_checkpoint(checkpoint, False))
    assert raw.keys() == named(trained.params).keys()
    for name, x in named(trained.params).items():
        np.testing.assert_allclose(raw[name], x, rtol=1e-6, atol=1e-7)
    want = loss_of(trained.params)
    assert (
        trained.final["loss"] == pytest.approx(want, rel=1e-5)
        and trained.evaluate()["loss"] == trained.final["loss"]
    )
    logits = trained.predict(X)
    assert np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(Y)), Y]) == pytest.approx(
        want, rel=1e-5
    )
    np.testing.assert_allclose(trained.model(X), logits, rtol=1e-4, atol=1e-5)
    begun = fit(
        Plain, optax.sgd(0.0), init_from=tmp_path / "run", steps=1, parallel=PARALLEL[layout]
    )
    assert begun.final["loss"] == pytest.approx(want, rel=1e-5)
    training = trained.final["params_sha256"]
    assert (
        fit(Plain, FREE(), run_dir=tmp_path / "run", eval={"every": 3}).final["params_sha256"]
        == training
    )
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_is_resumed_is_that_of_one_piece(tmp_path):
    """The checkpoint has the weights that are trained."""
    whole = fit(Plain, FREE(), run_dir=tmp_path / "whole")
    fit(Plain, FREE(), run_dir=tmp_path / "parts", steps=3)
    assert (
        fit(Plain, FREE(), run_dir=tmp_path / "parts").final["params_sha256"]
        == whole.final["params_sha256"]
    )
