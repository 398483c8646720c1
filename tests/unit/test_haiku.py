"""Haiku's pairs of functions: their state, their modes and their keys; what they are called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxdp
import toys
from jaxdp.cli import Call
from jaxdp.cli.export import run as export
from jaxdp.cli.parse import parse
from jaxdp.errors import UsageError
from jaxdp.models import as_model
from jaxdp.models.base import Model
from jaxdp.split import path_string

hk = pytest.importorskip("haiku", reason="pip install dm-haiku")
KEY, WIDTH = jax.random.key(0), 6


def forward(x, is_training):
    """A network of Haiku's own layers, with averages in evaluation and dropout in training."""
    hidden = hk.nets.MLP([WIDTH], with_bias=False, name="body")(hk.Flatten()(x))
    hidden = hk.BatchNorm(True, True, 0.9)(hidden, is_training)
    if is_training:
        hidden = hk.dropout(hk.next_rng_key(), 0.5, hidden)
    return hk.Linear(toys.CLASSES)(jax.nn.relu(hidden))


def without_state(x):
    return hk.Linear(toys.CLASSES)(hk.Flatten()(x))


NET, PLAIN = hk.transform_with_state(forward), hk.transform(without_state)


def make(num_classes=3, width: int = 4):
    return hk.transform_with_state(
        lambda x, is_training: hk.nets.MLP([width, num_classes])(hk.Flatten()(x))
    )


def batch_of(size):
    return {"inputs": jnp.asarray(toys.data()["inputs"][:size]), "mask": jnp.ones(size, bool)}


def paths(tree):
    return {path_string(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def test_parameters_and_state_have_haikus_names():
    params, state = jax.jit(as_model(NET).init)(KEY, batch_of(3))
    assert paths(params) == {
        "batch_norm/offset": (1, WIDTH),
        "batch_norm/scale": (1, WIDTH),
        "body/~/linear_0/w": (32, WIDTH),
        "linear/b": (toys.CLASSES,),
        "linear/w": (WIDTH, toys.CLASSES),
    }
    shapes = {"average": (1, WIDTH), "counter": (), "hidden": (1, WIDTH)}
    assert paths(state) == {
        f"batch_norm/~/{kind}_ema/{name}": shape
        for kind in ("mean", "var")
        for name, shape in shapes.items()
    }


def test_training_and_evaluation_are_haikus_own():
    """The averages of a training call, dropout by the key in training alone."""
    model, batch = as_model(NET), batch_of(5)
    params, state = model.init(KEY, batch)
    (one, new), (again, _), (other, _) = (
        model.apply(params, state, batch, jax.random.key(i), True) for i in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 0.01
    expected = NET.apply(params, state, KEY, batch["inputs"], True)[1]
    jax.tree.map(np.testing.assert_array_equal, new, expected)
    outputs, same = model.apply(params, new, batch, KEY, False)
    jax.tree.map(np.testing.assert_array_equal, same, new)
    np.testing.assert_array_equal(
        outputs, NET.apply(params, new, None, batch["inputs"], is_training=False)[0]
    )
    np.testing.assert_array_equal(
        outputs, model.module(params, new)(None, batch["inputs"], False)[0]
    )


@pytest.mark.parametrize("pair", [PLAIN, hk.without_apply_rng(PLAIN), hk.without_apply_rng(NET)])
def test_pairs_without_state_or_without_a_key(pair):
    model, batch = as_model(pair), batch_of(3)
    params, state = model.init(KEY, batch)
    outputs, _ = model.apply(params, state, batch, KEY, False)
    inputs = {"x": batch["inputs"], **({"is_training": False} if state else {})}
    values = (params, state) if state else (params,)
    key = (None,) if pair is PLAIN else ()
    result = pair.apply(*values, *key, **inputs)
    np.testing.assert_array_equal(outputs, result[0] if state else result)


def test_training_is_the_same_on_one_device_and_eight():
    model = as_model(NET)
    with jax.enable_x64(True):
        (_, one, *_), (_, eight, *_) = (
            toys.train(
                model, toys.data(48, dtype="float64"), batch_size=48, backend=backend, devices=n, steps=4,
                dtype="float64", optimizer="momentum",
            )
            for backend, n in (("pmap", 1), ("pjit", 8))
        )  # fmt: skip
    for name in ("params", "model_state"):
        error, where = toys.relative_error(getattr(eight, name), getattr(one, name))
        assert error < 1e-12, where
    assert one.model_state["batch_norm/~/mean_ema"]["counter"] == 4
    assert np.abs(one.model_state["batch_norm/~/mean_ema"]["average"]).max() > 0.01


def test_a_run_is_resumed_loaded_and_exported(tmp_path):
    args = {"data": toys.data(48), "batch_size": 48, "run_dir": str(tmp_path / "run")}
    args |= {"optimizer": {"lr": 0.05, "schedule": "constant"}}
    first = jaxdp.fit(model=NET, steps=1, **args)
    fitted = jaxdp.fit(model=hk.transform_with_state(forward), steps=30, **args)
    assert fitted.final["loss"] < 0.8 * first.final["loss"]
    with pytest.raises(UsageError, match="the model, the loss or a transform is not"):
        other = hk.transform_with_state(lambda x, is_training: forward(x, is_training) * 2)
        jaxdp.fit(model=other, steps=31, **args)
    loaded = jaxdp.load(tmp_path / "run", model=NET, data=toys.data(48))
    jax.tree.map(np.testing.assert_array_equal, loaded.params, fitted.params)
    outputs, _ = loaded.model(None, toys.data(4)["inputs"], is_training=False)
    np.testing.assert_allclose(loaded.predict(toys.data(4)["inputs"]), outputs, atol=1e-5)
    export(Call(options=parse(["--run_dir", args["run_dir"]], "export")[0]))
    weights = load_file(tmp_path / "run" / "export.safetensors")
    hidden = weights["body/~/linear_0/w"]
    np.testing.assert_array_equal(hidden, fitted.params["body/~/linear_0"]["w"])
    assert "model_state/batch_norm/~/mean_ema/average" in weights
    args |= {"run_dir": None, "init_from": args["run_dir"], "optimizer": {"lr": 0.0}}
    again = jaxdp.fit(model=NET, steps=1, **args)
    jax.tree.map(np.testing.assert_array_equal, again.params, fitted.params)


def test_a_config_names_a_pair_or_a_function_that_returns_one(tmp_path):
    args = {"data": toys.data(48), "batch_size": 16, "epochs": 1}
    for target in ("NET", "PLAIN"):
        assert jaxdp.fit(model=f"{__name__}.{target}", **args).final["step"] == 3
    fitted = jaxdp.fit(model={"target": f"{__name__}.make", "args": {"width": 3}}, **args)
    assert fitted.params["mlp/~/linear_0"]["w"].shape == (32, 3)
    with pytest.raises(UsageError, match=r"NET' is an object and takes no args"):
        jaxdp.fit(model={"target": f"{__name__}.NET", "args": {"width": 3}}, **args)


def test_state_of_a_function_that_was_transformed_without_it_is_refused():
    with pytest.raises(UsageError, match="transform_with_state"):
        jaxdp.fit(model=hk.transform(forward), data=toys.data(48), epochs=1, batch_size=16)


def test_a_model_is_none_of_haikus_classes():
    assert isinstance(as_model(NET), Model)
    with pytest.raises(UsageError, match="a pair of functions"):
        as_model(hk.multi_transform(lambda: (without_state, (without_state, without_state))))
