"""Recurrent language models against plain loops in NumPy, over batches that go on where the last
one ended.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import toys
from jaxdp.errors import UsageError
from jaxdp.models import as_model
from jaxdp.models.recurrent import LSTM, RNN

VOCABULARY, LENGTH, HIDDEN = 11, 5, 6
SMALL = {
    "input_shape": (LENGTH,),
    "num_classes": VOCABULARY,
    "dim": 4,
    "hidden": HIDDEN,
    "layers": 2,
}
KINDS = {
    "lstm": (LSTM, {}),
    "tied lstm": (LSTM, {"dim": HIDDEN, "layers": 1, "tied": True}),
    "tanh": (RNN, {}),
    "relu": (RNN, {"nonlinearity": "relu", "layers": 3}),
}
KEY = jax.random.key(0)


def model(name, **args):
    make, own = KINDS[name]
    return as_model(lambda rngs: make(**{**SMALL, **own, **args}, rngs=rngs))


def tokens(examples=3, seed=0):
    return {
        "inputs": np.random.default_rng(seed)
        .integers(VOCABULARY, size=(examples, LENGTH))
        .astype(np.int32)
    }


def oracle(p, text, nonlinearity):
    """The logits of one stream of any length, token by token; from the papers."""

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    layers = [p["layers"][str(i)]["weights"] for i in range(len(p["layers"]))]
    state, logits = [(np.zeros(HIDDEN), np.zeros(HIDDEN)) for _ in layers], []
    for token in text:
        x = p["embed"]["embedding"][token]
        for i, layer in enumerate(layers):
            cell, hidden = state[i]
            sums = x @ layer["dense_i"]["kernel"] + hidden @ layer["dense_h"]["kernel"]
            if nonlinearity:
                x = nonlinearity(sums + layer["dense_i"]["bias"])
            else:
                take, forget, new, give = (sums + layer["dense_h"]["bias"]).reshape(4, HIDDEN)
                cell = sigmoid(forget) * cell + sigmoid(take) * np.tanh(new)
                x = sigmoid(give) * np.tanh(cell)
            state[i] = cell, x
        logits.append(
            x @ p["head"]["kernel"] + p["head"]["bias"]
            if "head" in p
            else p["embed"]["embedding"] @ x
        )
    return np.array(logits)


@pytest.mark.parametrize("name", KINDS)
def test_streams_equal_plain_loops_across_batches(name):
    made = model(name)
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params, state = jax.eval_shape(made.init, KEY, tokens())
        params = jax.tree.map(lambda x: 0.5 * rng.normal(size=x.shape), params)
        state = jax.tree.map(lambda x: np.zeros(x.shape), state)
        run, got = jax.jit(lambda state, batch: made.apply(params, state, batch, KEY, False)), []
        batches = [tokens(seed=seed) for seed in range(3)]
        for batch in batches:
            outputs, state = run(state, batch)
            got.append(outputs)
        assert outputs.dtype == np.float64 and jax.tree.leaves(state)[0].shape == (3, HIDDEN)
    streams = np.concatenate([batch["inputs"] for batch in batches], 1)
    nonlinearity = {"tanh": np.tanh, "relu": lambda x: np.maximum(x, 0)}.get(name)
    want = np.stack([oracle(params, text, nonlinearity) for text in streams])
    assert np.abs(want).max() > 0.5
    np.testing.assert_allclose(np.concatenate(got, 1), want, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_gradients_stop_where_a_batch_begins():
    """The gradient of what follows is that of the carry as a constant, by differences."""
    made, batch = model("lstm"), tokens()
    with jax.enable_x64(True):
        params, state = jax.jit(made.init)(KEY, batch)
        params = jax.tree.map(lambda x: x.astype(np.float64), params)
        state = jax.tree.map(lambda x: jnp.full(x.shape, 0.3), state)

        def total(params, state):
            return jnp.sum(jnp.sin(made.apply(params, state, batch, KEY, False)[0]))

        slopes, of_state = jax.jit(jax.grad(total, (0, 1)))(params, state)
        assert not any(np.any(g) for g in jax.tree.leaves(of_state))
        way = jax.tree.map(lambda x: np.random.default_rng(1).normal(size=x.shape), params)
        at = jax.jit(lambda t: total(jax.tree.map(lambda p, d: p + t * d, params, way), state))
        slope = sum(jnp.sum(a * b) for a, b in zip(*map(jax.tree.leaves, (slopes, way))))
        np.testing.assert_allclose(slope, (at(1e-5) - at(-1e-5)) / 2e-5, rtol=1e-6)


@pytest.mark.slow
def test_a_module_by_itself_goes_on_too():
    """Made outside of a trainer, its carry is for no example yet, and becomes that of the first
    call's.
    """
    module, text = LSTM(**{**SMALL, "layers": 1}, rngs=nnx.Rngs(0)), tokens()["inputs"]
    first, second = module(text), module(text)
    assert first.shape == (3, LENGTH, VOCABULARY) and module.layers[0].cell[...].shape == (
        3,
        HIDDEN,
    )
    assert np.abs(second - first).max() > 1e-3


@pytest.mark.slow
def test_outputs_have_the_weights_dtype_cells_are_wide():
    made, batch = model("lstm"), tokens()
    params, state = jax.jit(made.init)(KEY, batch)
    exact, _ = made.apply(params, state, batch, KEY, False)
    rough = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    outputs, new = jax.jit(lambda p: made.apply(p, state, batch, KEY, False))(rough)
    assert outputs.dtype == jnp.bfloat16 and {x.dtype for x in jax.tree.leaves(new)} == {
        jnp.dtype("float32")
    }
    np.testing.assert_allclose(outputs.astype(np.float32), exact, atol=0.05)


@pytest.mark.slow
def test_training_learns_alike_on_any_devices():
    """Each token is the one before it plus one: dropout, carry and all."""
    first = np.arange(24)[:, None] % VOCABULARY
    inputs = ((first + np.arange(LENGTH)) % VOCABULARY).astype(np.int32)
    examples = {"inputs": inputs, "labels": (inputs + 1) % VOCABULARY}
    made = model("lstm", dropout=0.1, layers=1)
    with jax.enable_x64(True):
        one, four = (
            toys.train(
                made, examples, devices=n, backend="pjit", steps=12, batch_size=12, dtype="float64"
            )
            for n in (1, 4)
        )
    for name in ("params", "kept"):
        assert toys.relative_error(getattr(four[1], name), getattr(one[1], name))[0] < 1e-10
    assert four[2][-1]["loss"] < four[2][0]["loss"] - 0.1


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("lstm", {"layers": 0}, "model.args.layers: 0 is too small"),
        ("lstm", {"tied": True}, "model.args.hidden: 6 is not dim, 4, as tied requires"),
        ("lstm", {"dropout": 1.0}, r"model.args.dropout: 1.0 is not in \[0, 1\)"),
        (
            "lstm",
            {"input_shape": (8, 8, 1)},
            r"model.args.input_shape: \(8, 8, 1\) is not \(length,\)",
        ),
        (
            "tanh",
            {"nonlinearity": "gelu"},
            "model.args.nonlinearity: 'gelu' is not one of 'tanh', 'relu'",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(name, args, words):
    with pytest.raises(UsageError, match=words):
        model(name, **args)


def test_inputs_that_are_no_tokens_are_named():
    made = model("tanh")
    params, state = jax.eval_shape(made.init, KEY, tokens())
    with pytest.raises(UsageError, match=r"RNN reads integers \[example, token\], not float32"):
        jax.eval_shape(
            lambda *args: made.apply(*args, False), params, state, {"inputs": np.zeros((2, 3))}, KEY
        )
