"""One contract for all adapters: the same network in Flax NNX, Flax Linen, Equinox and plain functions."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxdp.models.equinox as adapter
import toys
from jaxdp.build.parts import make_parts
from jaxdp.cli import load
from jaxdp.errors import UsageError
from jaxdp.models import as_model
from jaxdp.models.base import Model
from jaxdp.models.functions import from_functions
from jaxdp.models.nnx import Blocks, Carry
from jaxdp.split import path_string

INPUTS, WIDTH, DROPOUT = 32, 6, 0.25
KEY = jax.random.key(0)
EXAMPLES = [{k: v[i] for k, v in toys.data().items()} for i in range(53)]
hold = jax.lax.stop_gradient

# Every network: hidden = dropout(relu(up(x))), less its mean (running in evaluation, else of the real examples), plus a
# tenth of what the place had last; a linear head. It counts its calls.


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.head = nnx.Linear(INPUTS, WIDTH, rngs=rngs), nnx.Linear(WIDTH, toys.CLASSES, rngs=rngs)
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)
        self.mean, self.calls = nnx.BatchStat(jnp.zeros(WIDTH)), nnx.Variable(jnp.zeros((), jnp.int32))
        self.last = Carry(jnp.zeros(WIDTH))

    def __call__(self, x, mask, train):
        hidden = self.dropout(nnx.relu(self.up(x.reshape(len(x), -1))))
        last, self.last[...] = hold(self.last[...]), hidden
        mean = (hidden * mask[:, None]).sum(0) / mask.sum() if train else self.mean[...]
        if train:
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * mean
        self.calls[...] += 1
        return self.head(hidden - mean + 0.1 * last)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, mask, *, train):
        hidden = linen.relu(linen.Dense(WIDTH, name="up")(x.reshape(len(x), -1)))
        hidden = linen.Dropout(DROPOUT, deterministic=not train)(hidden)
        running = self.variable("batch_stats", "mean", lambda: jnp.zeros(WIDTH))
        calls = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        carry = self.variable("carry", "last", lambda: jnp.zeros((len(x), WIDTH)))
        last, mean = hold(carry.value), running.value
        if train:
            mean = (hidden * mask[:, None]).sum(0) / mask.sum()
            running.value, calls.value = 0.9 * running.value + 0.1 * mean, calls.value + 1
        if not self.is_initializing():
            carry.value = hidden
        return linen.Dense(toys.CLASSES, name="head")(hidden - mean + 0.1 * last)


class Dense(eqx.Module):
    kernel: jax.Array
    bias: jax.Array

    def __init__(self, inputs, outputs, key):
        self.kernel = jax.random.normal(key, (inputs, outputs)) / inputs**0.5
        self.bias = jnp.zeros(outputs)

    def __call__(self, x):
        return x @ self.kernel + self.bias


class Equinox(eqx.Module):
    up: Dense
    head: Dense
    dropout: eqx.nn.Dropout
    mean: eqx.nn.StateIndex
    calls: eqx.nn.StateIndex
    last: adapter.Carry

    def __init__(self, *, key):
        one, two = jax.random.split(key)
        self.up, self.head = Dense(INPUTS, WIDTH, one), Dense(WIDTH, toys.CLASSES, two)
        self.dropout = eqx.nn.Dropout(DROPOUT)
        self.mean, self.calls = eqx.nn.StateIndex(jnp.zeros(WIDTH)), eqx.nn.StateIndex(jnp.zeros((), jnp.int32))
        self.last = adapter.Carry(jnp.zeros(WIDTH))

    def __call__(self, x, mask, train, state, *, key):
        assert x.ndim == 3 and mask.ndim == 0
        hidden = self.dropout(jax.nn.relu(self.up(x.ravel())), key=key)
        last, mean, calls = hold(state.get(self.last.index)), state.get(self.mean), state.get(self.calls)
        state = state.set(self.last.index, hidden)
        if train:
            running, total = mean, jax.lax.psum((hidden * mask, mask.astype(hidden.dtype)), "batch")
            mean = total[0] / total[1]
            state = state.set(self.mean, 0.9 * running + 0.1 * mean).set(self.calls, calls + 1)
        return self.head(hidden - mean + 0.1 * last), state


def start(key, inputs):
    one, two = jax.random.split(key)
    draw = lambda key, a, b: {"kernel": jax.random.normal(key, (a, b)) / a**0.5, "bias": jnp.zeros(b)}
    params = {"up": draw(one, INPUTS, WIDTH), "head": draw(two, WIDTH, toys.CLASSES)}
    carry = {"last": jnp.zeros((len(inputs), WIDTH))}
    return params, {"mean": jnp.zeros(WIDTH), "calls": jnp.zeros((), jnp.int32), "carry": carry}


def forward(params, inputs, state, key, train, mask):
    linear = lambda p, x: x @ p["kernel"] + p["bias"]
    hidden, mean = jax.nn.relu(linear(params["up"], inputs.reshape(len(inputs), -1))), state["mean"]
    if train:
        hidden = jnp.where(jax.random.bernoulli(key, 1 - DROPOUT, hidden.shape), hidden / (1 - DROPOUT), 0)
        mean = (hidden * mask[:, None]).sum(0) / mask.sum()
        running = 0.9 * state["mean"] + 0.1 * mean
        state = {**state, "mean": running, "calls": state["calls"] + 1}
    outputs = linear(params["head"], hidden - mean + 0.1 * hold(state["carry"]["last"]))
    return outputs, {**state, "carry": {"last": hidden}}


PAIR = (start, forward)
LINEN = Linen()
BY_HAND = from_functions(*PAIR)


def make_pair():
    return PAIR


def make_equinox(key):
    return Equinox(key=key)


ALL: dict[str, Any] = {"Nnx": Nnx, "Linen": LINEN, "Equinox": Equinox, "PAIR": PAIR}
every = pytest.mark.parametrize("model", [as_model(made) for made in ALL.values()], ids=ALL)


def leaf(tree, name):
    """The one leaf whose path has this part."""
    (found,) = [x for path, x in jax.tree_util.tree_leaves_with_path(tree) if name in path_string(path).split("/")]
    return np.asarray(found)


def parts(target, *argv):
    flags = ["--model.target", f"test_adapters.{target}", "--data.target", "test_adapters.EXAMPLES", *argv]
    return make_parts(load([*flags, "--steps", "1", "--batch_size", "20"])[0])


@pytest.mark.parametrize("target", ["Nnx", "Linen", "LINEN", "Equinox", "PAIR", "BY_HAND", "make_pair", "make_equinox"])
def test_every_kind_of_target_makes_a_model(target):
    model = parts(target).model
    batch = {k: jnp.asarray(v[:3]) for k, v in toys.data().items()} | {"mask": jnp.ones(3, bool)}
    params, state = jax.jit(model.init)(KEY, batch)
    paths = {path_string(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
    assert paths == {
        "up/kernel": (INPUTS, WIDTH), "up/bias": (WIDTH,), "head/kernel": (WIDTH, toys.CLASSES), "head/bias": (3,)
    }  # fmt: skip
    assert leaf(state["carry"], "last").shape == (3, WIDTH) and leaf(state, "mean").shape == (WIDTH,)
    assert leaf(state, "calls").dtype == np.int32


@every
def test_evaluation_is_the_formula(model):
    """With running averages, without dropout, whatever the key; and what a place had last counts."""
    rng = np.random.default_rng(0)
    batch = {"inputs": jnp.asarray(toys.data()["inputs"][:5]), "mask": jnp.ones(5, bool)}
    made = jax.eval_shape(model.init, KEY, batch)
    draw = lambda x: rng.normal(size=x.shape) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape)
    params, state = jax.tree.map(lambda x: jnp.asarray(draw(x), x.dtype), made)
    run = jax.jit(lambda key: model.apply(params, state, batch, key, False))
    outputs, new = run(KEY)
    np.testing.assert_array_equal(outputs, run(jax.random.key(1))[0])
    hidden = np.maximum(np.asarray(batch["inputs"]).reshape(5, -1) @ params["up"]["kernel"] + params["up"]["bias"], 0)
    mixed = hidden - leaf(state, "mean") + 0.1 * leaf(state["carry"], "last")
    np.testing.assert_allclose(outputs, mixed @ params["head"]["kernel"] + params["head"]["bias"], atol=1e-4)
    np.testing.assert_allclose(leaf(new["carry"], "last"), hidden, atol=1e-5)


@every
def test_dropout_follows_the_key_and_statistics_the_mask(model):
    batch = {"inputs": jnp.asarray(toys.data()["inputs"][:6]), "mask": jnp.asarray([1, 1, 1, 1, 0, 0], bool)}
    params, state = model.init(KEY, batch)
    run = jax.jit(lambda key, batch: model.apply(params, state, batch, key, True))
    (one, new), (again, _), (other, _) = (run(jax.random.key(i), batch) for i in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 0.01
    hidden = leaf(new["carry"], "last")
    np.testing.assert_allclose(leaf(new, "mean"), 0.1 * hidden[:4].mean(0), atol=1e-6)
    assert leaf(new, "calls") == 1 and len(np.unique((hidden > 0).astype(int), axis=0)) > 1
    padding = {**batch, "inputs": batch["inputs"].at[4:].set(7.0)}
    np.testing.assert_allclose(run(KEY, padding)[0][:4], one[:4], atol=1e-6)


FLAX = [pytest.param(name, marks=pytest.mark.slow) for name in ("Nnx", "Linen")]  # test_models.py has others of these


@pytest.mark.parametrize("name", ["Equinox", "PAIR", *FLAX])
def test_training_is_the_same_on_one_device_and_eight(name):
    model = as_model(ALL[name])
    with jax.enable_x64(True):
        one, eight = (
            toys.train(
                model, toys.data(dtype="float64"), backend=backend, devices=n, steps=4, dtype="float64",
                optimizer="momentum",
            )
            for backend, n in (("pmap", 1), ("pjit", 8))
        )  # fmt: skip
    error, where = max(
        toys.relative_error(getattr(eight[1], name), getattr(one[1], name))
        for name in ("params", "model_state", "carry")
    )
    assert error < 1e-12, where
    assert one[2][3]["loss"] < one[2][0]["loss"] and leaf(one[1].model_state, "calls") == 4  # of the same batch
    assert np.abs(leaf(one[1].model_state, "mean")).max() > 0.01 and np.abs(leaf(one[1].carry, "last")).max() > 0.1


# --- what each has by itself -----------------------------------------------------------------------------------------


class Normed(eqx.Module):
    """Layers of Equinox's own, in a Sequential; BatchNorm by an axis of another name."""

    layers: eqx.nn.Sequential

    def __init__(self, key):
        one, two = jax.random.split(key)
        norm = eqx.nn.BatchNorm(WIDTH, axis_name="examples", mode="batch", momentum=0.9)
        act = eqx.nn.Lambda(jax.nn.relu)
        self.layers = eqx.nn.Sequential(
            [eqx.nn.Linear(INPUTS, WIDTH, key=one), norm, act, eqx.nn.Dropout(0.1), eqx.nn.Linear(WIDTH, 3, key=two)]
        )

    def __call__(self, inputs, state, key):
        return self.layers(inputs.ravel(), state, key=key)


def test_equinox_s_own_layers_work_and_are_named_by_attribute():
    model, examples = as_model(Normed), toys.data(48)
    _, state, metrics, *_ = toys.train(model, examples, batch_size=48, steps=25)
    assert metrics[-1]["loss"] < 0.8 * metrics[0]["loss"]
    assert state.params["layers"]["layers"]["0"]["weight"].shape == (WIDTH, INPUTS)
    norm = state.model_state["layers"]["layers"]["1"]
    assert norm["batch_counter"] == 25 and np.abs(norm["batch_state_index"]["0"]).max() > 0.05
    batch = {"inputs": jnp.asarray(examples["inputs"][:4]), "mask": jnp.ones(4, bool)}
    alone = {"inputs": batch["inputs"][:1], "mask": batch["mask"][:1]}
    run = lambda batch: model.apply(state.params, state.model_state, batch, KEY, False)[0]
    np.testing.assert_allclose(run(alone), run(batch)[:1], atol=1e-5)


class Table(eqx.Module):
    """An array of integers is no parameter; nothing is random and nothing is kept."""

    order: jax.Array
    out: eqx.nn.Linear

    def __init__(self, key):
        self.order, self.out = jnp.arange(INPUTS)[::-1], eqx.nn.Linear(INPUTS, 3, key=key)

    def __call__(self, x):
        return self.out(x.ravel()[self.order])


def test_integers_of_an_equinox_module_are_no_parameters():
    _, state, *_ = toys.train(as_model(Table), toys.data(24), steps=2)
    assert set(state.params) == {"out"} and state.model_state["order"].tolist() == list(range(INPUTS))[::-1]


class Recurrent(nnx.Module):
    """A block that keeps what it saw, for an example; stacked, three of them."""

    def __init__(self, rngs):
        self.linear, self.seen = nnx.Linear(4, 4, rngs=rngs), Carry(jnp.zeros(4))

    def __call__(self, x):
        self.seen[...] = self.seen[...] + hold(x)
        return self.linear(x)


def test_blocks_carry_by_example_and_block():
    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.blocks = Blocks(Recurrent, 3, rngs=rngs)

        def __call__(self, x):
            return self.blocks(x)

    model, x = as_model(Deep), np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    params, state = model.init(KEY, {"inputs": x})
    seen = state["carry"]["blocks"]["stack"]["seen"]
    assert seen.shape == (5, 3, 4) and not seen.any()
    for times in (1, 2):
        state = model.apply(params, state, {"inputs": x}, KEY, True)[1]
        np.testing.assert_allclose(state["carry"]["blocks"]["stack"]["seen"][:, 0], times * x, rtol=1e-6)
    kernel = params["blocks"]["stack"]["linear"]["kernel"]
    np.testing.assert_allclose(state["carry"]["blocks"]["stack"]["seen"][:, 1], 2 * x @ kernel[0], rtol=1e-4, atol=1e-5)


# --- what is refused -------------------------------------------------------------------------------------------------


class Differs(Table):
    """State that only one example decides."""

    seen: eqx.nn.StateIndex

    def __init__(self, key):
        super().__init__(key)
        self.seen = eqx.nn.StateIndex(jnp.zeros(()))

    def __call__(self, x, state):
        return super().__call__(x), state.set(self.seen, x.sum())


class Silent(Differs):
    def __call__(self, x):
        return Table.__call__(self, x)


class Forgetful(Differs):
    def __call__(self, x, state):
        return Table.__call__(self, x)


class Narrow(Table):
    """One logit for all classes."""

    def __call__(self, x):
        return super().__call__(x).sum()


def number():
    return 3


def no_module(rngs):
    return 3


def no_equinox(key):
    return 3


MADE = Nnx(nnx.Rngs(0))


@pytest.mark.parametrize(
    ("target", "argv", "words"),
    [
        (
            "number",
            (),
            "model: int is no model; give a Flax NNX class or a function of rngs, .* or a jaxdp",
        ),
        ("no_module", (), "model: what takes rngs must give a Flax NNX module, not int"),
        ("no_equinox", (), "model: what takes a key must give an Equinox module, not int"),
        ("MADE", (), "model: Nnx is made already, of numbers that no seed decides; name what makes it"),
        ("LINEN", ("--model.args.x", "1"), "model.args: 'test_adapters.LINEN' is made already and takes none"),
        ("Silent", (), "model: Silent holds state, but its __call__ takes none; add the argument state"),
    ],
)
def test_targets_that_give_no_model_are_refused(target, argv, words):
    with pytest.raises(UsageError, match=words):
        parts(target, *argv)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Differs, "the state of Differs differs from example to example; average it with jax.lax.pmean.*Carry"),
        (Forgetful, r"Forgetful takes state, so it must return \(outputs, state\)"),
        (Narrow, r"outputs \(3,\) do not fit labels \(3,\); the model must return logits \[3, classes\]"),
        ((start, lambda params, inputs, state: inputs), r"apply must return \(outputs, state\), with a dict as state"),
        ((lambda key, inputs: {}, forward), r"init must return \(params, state\), with a dict as state, not dict"),
        ((start, lambda params, inputs, state: (inputs, {"a": 1})), r"init made the state .* but apply \['a'\]"),
        (
            (lambda key, inputs: {"a": jnp.ones(3)}, lambda params, inputs, context: 1),
            "nothing to give to its argument 'context'",
        ),
    ],
    ids=["state by example", "state not returned", "outputs", "no pair", "no state", "other state", "no source"],
)
def test_calls_that_do_not_fit_are_refused(made, words):
    with pytest.raises(UsageError, match=words):
        toys.train(as_model(made), toys.data(24), steps=1)


def test_a_model_by_hand_is_itself():
    assert as_model(BY_HAND) is BY_HAND and isinstance(BY_HAND, Model)
