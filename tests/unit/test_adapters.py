"""One contract for all adapters: the same network in Flax NNX, Flax Linen, Equinox and plain
functions.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx, struct

import jaxdp.models.equinox as adapter
import toys
from covering import first
from jaxdp.cli import load
from jaxdp.errors import UsageError
from jaxdp.models import as_model
from jaxdp.models.base import Model
from jaxdp.models.functions import from_functions
from jaxdp.models.nnx import Blocks, Carry
from jaxdp.run.components import make_parts
from jaxdp.split import path_string

INPUTS, WIDTH, DROPOUT = 32, 6, 0.25
KEY = jax.random.key(0)
EXAMPLES = [{k: v[i] for k, v in toys.data().items()} for i in range(53)]
hold = jax.lax.stop_gradient

# Every network: hidden = dropout(relu(up(x))), less its mean (running in evaluation, else of the
# real examples), plus a tenth of what the place had last; a linear head. It counts its calls.


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.head = (
            nnx.Linear(INPUTS, WIDTH, rngs=rngs),
            nnx.Linear(WIDTH, toys.CLASSES, rngs=rngs),
        )
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)
        self.mean, self.calls = (
            nnx.BatchStat(jnp.zeros(WIDTH)),
            nnx.Variable(jnp.zeros((), jnp.int32)),
        )
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
        self.mean, self.calls = (
            eqx.nn.StateIndex(jnp.zeros(WIDTH)),
            eqx.nn.StateIndex(jnp.zeros((), jnp.int32)),
        )
        self.last = adapter.Carry(jnp.zeros(WIDTH))

    def __call__(self, x, mask, train, state, *, key):
        assert x.ndim == 3 and mask.ndim == 0
        hidden = self.dropout(jax.nn.relu(self.up(x.ravel())), key=key)
        last, mean, calls = (
            hold(state.get(self.last.index)),
            state.get(self.mean),
            state.get(self.calls),
        )
        state = state.set(self.last.index, hidden)
        if train:
            running, total = mean, jax.lax.psum((hidden * mask, mask.astype(hidden.dtype)), "batch")
            mean = total[0] / total[1]
            state = state.set(self.mean, 0.9 * running + 0.1 * mean).set(self.calls, calls + 1)
        return self.head(hidden - mean + 0.1 * last), state


def start(key, inputs):
    one, two = jax.random.split(key)

    def draw(key, a, b):
        return {"kernel": jax.random.normal(key, (a, b)) / a**0.5, "bias": jnp.zeros(b)}

    params = {"up": draw(one, INPUTS, WIDTH), "head": draw(two, WIDTH, toys.CLASSES)}
    carry = {"last": jnp.zeros((len(inputs), WIDTH))}
    return params, {"mean": jnp.zeros(WIDTH), "calls": jnp.zeros((), jnp.int32), "carry": carry}


def forward(params, inputs, state, key, train, mask):
    def linear(p, x):
        return x @ p["kernel"] + p["bias"]

    hidden, mean = jax.nn.relu(linear(params["up"], inputs.reshape(len(inputs), -1))), state["mean"]
    if train:
        hidden = jnp.where(
            jax.random.bernoulli(key, 1 - DROPOUT, hidden.shape), hidden / (1 - DROPOUT), 0
        )
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
    (found,) = [
        x
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if name in path_string(path).split("/")
    ]
    return np.asarray(found)


def parts(target, *argv):
    flags = [
        "--model.target",
        f"{__name__}.{target}",
        "--data.target",
        f"{__name__}.EXAMPLES",
        *argv,
    ]
    return make_parts(load([*flags, "--steps", "1", "--batch_size", "20"])[0])


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    "target", ["Nnx", "Linen", "LINEN", "Equinox", "PAIR", "BY_HAND", "make_pair", "make_equinox"]
)
def test_every_kind_of_target_makes_a_model(target):
    model = parts(target).forward.model
    batch = {k: jnp.asarray(v[:3]) for k, v in toys.data().items()} | {"mask": jnp.ones(3, bool)}
    params, state = jax.jit(model.init)(KEY, batch)
    paths = {path_string(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
    assert paths == {
        "up/kernel": (INPUTS, WIDTH), "up/bias": (WIDTH,), "head/kernel": (WIDTH, toys.CLASSES), "head/bias": (3,)
    }  # fmt: skip
    assert leaf(state["carry"], "last").shape == (3, WIDTH) and leaf(state, "mean").shape == (
        WIDTH,
    )
    assert leaf(state, "calls").dtype == np.int32


@every
def test_evaluation_is_the_formula(model):
    """With running averages, without dropout, whatever the key; and what a place had last counts."""
    rng = np.random.default_rng(0)
    batch = {"inputs": jnp.asarray(toys.data()["inputs"][:5]), "mask": jnp.ones(5, bool)}
    made = jax.eval_shape(model.init, KEY, batch)

    def draw(x):
        return (
            rng.normal(size=x.shape) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape)
        )

    params, state = jax.tree.map(lambda x: jnp.asarray(draw(x), x.dtype), made)
    run = jax.jit(lambda key: model.apply(params, state, batch, key, False))
    outputs, new = run(KEY)
    np.testing.assert_array_equal(outputs, run(jax.random.key(1))[0])
    hidden = np.maximum(
        np.asarray(batch["inputs"]).reshape(5, -1) @ params["up"]["kernel"] + params["up"]["bias"],
        0,
    )
    mixed = hidden - leaf(state, "mean") + 0.1 * leaf(state["carry"], "last")
    np.testing.assert_allclose(
        outputs, mixed @ params["head"]["kernel"] + params["head"]["bias"], atol=1e-4
    )
    np.testing.assert_allclose(leaf(new["carry"], "last"), hidden, atol=1e-5)


@pytest.mark.slow
@every
def test_dropout_follows_the_key_statistics_the_mask(model):
    batch = {
        "inputs": jnp.asarray(toys.data()["inputs"][:6]),
        "mask": jnp.asarray([1, 1, 1, 1, 0, 0], bool),
    }
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", first(1, ["Equinox", "PAIR", "Nnx", "Linen"])
)  # test_models.py has others of Flax
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
        for name in ("params", "model_state", "kept")
    )
    assert error < 1e-12, where
    assert (
        one[2][3]["loss"] < one[2][0]["loss"] and leaf(one[1].model_state, "calls") == 4
    )  # of the same batch
    assert (
        np.abs(leaf(one[1].model_state, "mean")).max() > 0.01
        and np.abs(leaf(one[1].kept["carry"], "last")).max() > 0.1
    )


# --- what each has by itself
# -----------------------------------------------------------------------------------------


class Normed(eqx.Module):
    """Layers of Equinox's own, in a Sequential; BatchNorm by an axis of another name."""

    layers: eqx.nn.Sequential

    def __init__(self, key, mode):
        one, two = jax.random.split(key)
        norm = eqx.nn.BatchNorm(WIDTH, axis_name="examples", mode=mode, momentum=0.9)
        act = eqx.nn.Lambda(jax.nn.relu)
        self.layers = eqx.nn.Sequential(
            [
                eqx.nn.Linear(INPUTS, WIDTH, key=one),
                norm,
                act,
                eqx.nn.Dropout(0.1),
                eqx.nn.Linear(WIDTH, 3, key=two),
            ]
        )

    def __call__(self, inputs, state, key):
        return self.layers(inputs.ravel(), state, key=key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "index", "value"),
    [("batch", "batch_counter", 25), ("ema", "ema_first_time_index", 0)],
)
def test_equinox_layers_train_under_their_own_names(mode, index, value):
    model, examples = as_model(lambda key: Normed(key, mode)), toys.data(48)
    _, state, metrics, *_ = toys.train(model, examples, batch_size=48, steps=25)
    assert metrics[-1]["loss"] < 0.8 * metrics[0]["loss"]
    assert state.params["layers"]["layers"]["0"]["weight"].shape == (WIDTH, INPUTS)
    norm = state.model_state["layers"]["layers"]["1"]
    assert norm[index] == value and np.abs(norm[f"{mode}_state_index"]["0"]).max() > 0.05
    batch = {"inputs": jnp.asarray(examples["inputs"][:4]), "mask": jnp.ones(4, bool)}
    alone = {"inputs": batch["inputs"][:1], "mask": batch["mask"][:1]}

    def run(batch):
        return model.apply(state.params, state.model_state, batch, KEY, False)[0]

    np.testing.assert_allclose(run(alone), run(batch)[:1], atol=1e-5)


class Table(eqx.Module):
    """An array of integers is no parameter; nothing is random and nothing is kept."""

    order: jax.Array
    out: eqx.nn.Linear

    def __init__(self, key):
        self.order, self.out = jnp.arange(INPUTS)[::-1], eqx.nn.Linear(INPUTS, 3, key=key)

    def __call__(self, x):
        return self.out(x.ravel()[self.order])


@pytest.mark.slow
def test_integers_of_equinox_modules_are_no_parameters():
    _, state, *_ = toys.train(as_model(Table), toys.data(24), steps=2)
    assert (
        set(state.params) == {"out"}
        and state.model_state["order"].tolist() == list(range(INPUTS))[::-1]
    )


class Recurrent(nnx.Module):
    """A block that keeps what it saw, for an example; stacked, three of them."""

    def __init__(self, rngs):
        self.linear, self.seen = nnx.Linear(4, 4, rngs=rngs), Carry(jnp.zeros(4))

    def __call__(self, x):
        self.seen[...] = self.seen[...] + hold(x)
        return self.linear(x)


@pytest.mark.slow
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
        np.testing.assert_allclose(
            state["carry"]["blocks"]["stack"]["seen"][:, 0], times * x, rtol=1e-6
        )
    kernel = params["blocks"]["stack"]["linear"]["kernel"]
    np.testing.assert_allclose(
        state["carry"]["blocks"]["stack"]["seen"][:, 1], 2 * x @ kernel[0], rtol=1e-4, atol=1e-5
    )


# --- what a call asks for by name
# ------------------------------------------------------------------------------------


class Fields(linen.Module):
    """Flags of a module's own and of a config in it, and streams of random numbers by three names."""

    config: Any = None
    deterministic: bool = False

    @linen.compact
    def __call__(self, x, z_rng):
        x = linen.Dense(3)(x)
        if not self.deterministic:
            x = linen.Dropout(0.5, deterministic=self.config.deterministic)(x)
            x = x + jax.random.normal(self.make_rng("noise"), x.shape)
        self.sow("seen", "x", x)
        calls = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        if self.is_mutable_collection("counts") and not self.is_initializing():
            calls.value += 1
        return {"x": x, "pair": (x, jax.random.normal(z_rng, (4,)))}


class Scanned(linen.Module):
    """A stream that a scan splits: each step draws numbers of its own."""

    @linen.compact
    def __call__(self, x):
        def draw(module, carry, _):
            return (carry, jax.random.normal(module.make_rng("steps")))

        scan = linen.scan(
            draw, variable_broadcast="params", split_rngs={"params": False, "steps": True}, length=3
        )
        return linen.Dense(3)(x) + scan(self, None, None)[1]


class Idioms(nnx.Module):
    """Dropout without a stream, arrays as attributes, a shared layer, a mode by `set_view`, an
    axis, sown values.
    """

    def __init__(self, rngs):
        self.one, self.head = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)
        self.two, self.layers = self.one, nnx.List([nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, axis_name="batch", momentum=0.5, rngs=rngs)
        self.dropout, self.scale, self.plain = (
            nnx.Dropout(0.5),
            jnp.arange(1.0, 5.0),
            nnx.data(np.ones(4, np.float32)),
        )
        self.mode = "?"

    def set_view(self, deterministic=None):
        self.mode = "evaluation" if deterministic else "training"

    def __call__(self, x, rngs: nnx.Rngs, cache: dict | None, *, other: "nnx.Rngs | None" = None):
        assert cache is None and self.mode == ("evaluation" if other is None else "training")
        x = self.dropout(self.norm(self.two(self.one(x * self.scale))), rngs=rngs)
        return self.head(self.layers[0](x * self.plain))


def averaged(params, inputs, state, sample_key, train):
    """A mean over an axis that the microbatch has alone."""
    outputs = jax.lax.pmean(inputs @ params["kernel"], "examples").mean(0, keepdims=True)
    return outputs + jax.random.normal(sample_key, (3,)), {"mean": outputs[0]}


AVERAGED = (lambda key, inputs: ({"kernel": jnp.ones((4, 3))}, {"mean": jnp.zeros(3)}), averaged)
CONFIG = struct.dataclass(
    type("Config", (), {"__annotations__": {"deterministic": bool}, "deterministic": False})
)
BATCH = {"inputs": jnp.arange(20.0).reshape(5, 4) / 10, "mask": jnp.ones(5, bool)}


def calls(made, keys=(0, 0, 1)):
    """(model, parameters, state, outputs and new state by (key, train))."""
    model = as_model(made)
    params, state = jax.jit(model.init)(KEY, BATCH)
    run = jax.jit(model.apply, static_argnums=4)
    results = {
        (i, t): run(params, state, BATCH, jax.random.key(i), t) for i in keys for t in (True, False)
    }
    return params, state, results


def test_linen_streams_flags_and_sown_values():
    _, state, results = calls(Fields(CONFIG()))
    assert state.keys() == {"counts"}  # what is sown grows with every call, and is none
    (one, new), (other, _), (evaluated, _) = results[0, True], results[1, True], results[0, False]
    assert new["counts"]["calls"] == 1 and np.abs(one["x"] - other["x"]).max() > 0.1
    np.testing.assert_array_equal(evaluated["x"], results[1, False][0]["x"])
    assert np.abs(evaluated["pair"][1] - results[1, False][0]["pair"][1]).max() > 0.01
    np.testing.assert_array_equal(one["pair"][1], evaluated["pair"][1])


ADDED = {"reduce_fn": jnp.add, "init_fn": lambda: jnp.zeros(())}
SOWN = {
    "a loss": lambda self, x, train: self.sow("aux_losses", "balance", x.mean()),
    "a sum": lambda self, x, train: self.sow("aux_losses", "balance", x.mean(), **ADDED),
    "in training": lambda self, x, train: (
        train and self.sow("aux_losses", "balance", x.mean(), **ADDED)
    ),
    "by its name": lambda self, x, train: self.sow("intermediates", "balance_loss", x.mean()),
    "a metric": lambda self, x, train: self.sow("seen", "mean", x.mean(), **ADDED),
}


@pytest.mark.parametrize("what", SOWN)
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_a_loss_that_would_be_dropped_is_refused(what):
    class Experts(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            SOWN[what](self, x, train)
            return linen.Dense(3)(x)

    class OfNnx(nnx.Module):
        def __init__(self, rngs):
            self.head = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x, train):
            SOWN[what](self, x, train)
            return self.head(x)

    for made in (Experts(), OfNnx):
        if what == "a metric":
            _, state, results = calls(made)
            assert not state and not results[0, True][1]
            continue
        with pytest.raises(
            UsageError, match=r"sows into '.*' would not be part of the loss; return it among"
        ):
            calls(made)


def test_a_declared_variable_of_a_sown_loss_is_refused():
    class Experts(nnx.Module):
        def __init__(self, rngs):
            self.head, self.balance_loss = (
                nnx.Linear(4, 3, rngs=rngs),
                nnx.Intermediate(jnp.zeros(())),
            )

        def __call__(self, x):
            self.balance_loss[...] += x.mean()
            return self.head(x)

    with pytest.raises(UsageError, match=r"sows into 'balance_loss' would not be part of the loss"):
        calls(Experts)


def test_a_linen_stream_is_split_where_the_model_does():
    _, _, results = calls(Scanned())
    drawn = results[0, True][0] - results[1, True][0]
    assert len(np.unique(np.asarray(drawn)[0].round(4))) == 3


@pytest.mark.slow
def test_nnx_idioms():
    params, state, results = calls(Idioms)
    assert set(params) == {"one", "head", "layers", "norm"} and set(state) == {
        "norm",
        "scale",
        "plain",
    }
    x = BATCH["inputs"] * jnp.arange(1.0, 5.0)
    for _ in range(2):
        x = x @ params["one"]["kernel"] + params["one"]["bias"]
    np.testing.assert_allclose(results[0, True][1]["norm"]["mean"], 0.5 * x.mean(0), rtol=1e-4)
    np.testing.assert_array_equal(results[0, False][0], results[1, False][0])
    assert np.abs(results[0, True][0] - results[1, True][0]).max() > 0.01


def test_a_named_axis_is_the_microbatch():
    _, _, results = calls(AVERAGED)
    np.testing.assert_allclose(
        results[0, True][1]["mean"], np.full(3, BATCH["inputs"].sum(1).mean()), rtol=1e-5
    )


@pytest.mark.slow
def test_an_axis_name_of_statistics_changes_no_number():
    """The statistics are of the microbatch, on one device and on four, in a program that maps over
    devices.
    """
    with jax.enable_x64(True):
        one, four = (
            toys.train(as_model(Normal), toys.data(48, dtype="float64"), batch_size=48, backend=backend, devices=n,
                       steps=3, dtype="float64")
            for backend, n in (("pmap", 1), ("pjit", 4))
        )  # fmt: skip
        error, where = toys.relative_error(four[1].model_state, one[1].model_state)
        assert error < 1e-12, where
        assert toys.relative_error(four[1].params, one[1].params)[0] < 1e-12


class Normal(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(INPUTS, axis_name="batch", rngs=rngs)
        self.head = nnx.Linear(INPUTS, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(x.reshape(len(x), -1)))


class OfTheMesh(Normal):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm.axis_name = "data"


def test_the_mesh_s_own_axis_is_refused_with_the_fix():
    with pytest.raises(UsageError, match="it uses the axis 'data' of the device mesh; use 'batch'"):
        model, batch = (
            as_model(OfTheMesh),
            {"inputs": jnp.ones((2, INPUTS)), "mask": jnp.ones(2, bool)},
        )
        model.apply(*model.init(KEY, batch), batch, KEY, True)


# --- what is refused
# -------------------------------------------------------------------------------------------------


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
            "model: int is not a model; give a Flax NNX class or a function of rngs, .* or a jaxdp",
        ),
        (
            "no_module",
            (),
            "model: a factory that takes rngs must return a Flax NNX module, not int",
        ),
        (
            "no_equinox",
            (),
            "model: a factory that takes a key must return an Equinox module, not int",
        ),
        ("MADE", (), "model: got an initialized Nnx; pass the class"),
        (
            "LINEN",
            ("--model.args.x", "1"),
            "model.args: 'test_adapters.LINEN' is an object and takes no args",
        ),
        (
            "Silent",
            (),
            "model: Silent has state, but its __call__ does not take it; add the argument state",
        ),
    ],
)
def test_chips_that_give_no_model_are_refused(target, argv, words):
    with pytest.raises(UsageError, match=words.replace("test_adapters", __name__)):
        parts(target, *argv)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            Differs,
            "the state of Differs differs from example to example; average it with jax.lax.pmean.*Carry",
        ),
        (Forgetful, r"Forgetful takes state, so it must return \(outputs, state\)"),
        (
            Narrow,
            r"outputs \(3,\) do not fit labels \(3,\); the model must return logits \[3, classes\]",
        ),
        (
            (start, lambda params, inputs, state: inputs),
            r"apply must return \(outputs, state\), with a dict as state",
        ),
        (
            (lambda key, inputs: {}, forward),
            r"init must return \(params, state\), with a dict as state, not dict",
        ),
        (
            (start, lambda params, inputs, state: (inputs, {"a": 1})),
            r"init returned the state .* but apply \['a'\]",
        ),
        (
            (lambda key, inputs: {"a": jnp.ones(3)}, lambda params, inputs, context: 1),
            "no value for its argument 'context'",
        ),
    ],
    ids=[
        "state by example",
        "state not returned",
        "outputs",
        "no pair",
        "no state",
        "other state",
        "no source",
    ],
)
def test_calls_that_do_not_fit_are_refused(made, words):
    with pytest.raises(UsageError, match=words):
        toys.train(as_model(made), toys.data(24), steps=1)


def test_a_model_by_hand_is_itself():
    assert as_model(BY_HAND) is BY_HAND and isinstance(BY_HAND, Model)
