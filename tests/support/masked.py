"""What is summed besides gradients, and what the mask excludes, by one reduction."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import toys
from jaxdp.losses import Contrastive, MeanSquaredError, SoftmaxCrossEntropy
from jaxdp.models.base import Model


def expected(examples, rows, microbatches=8):
    """The state after one update, from the real rows of each microbatch, in float64."""
    x = examples["inputs"].reshape(len(examples["inputs"]), -1).astype(np.float64)
    pieces = [x[m:rows:8] for m in range(min(microbatches, rows))]

    def mean(f):
        return sum(len(x) * f(x) for x in pieces) / sum(map(len, pieces))

    squares = mean(lambda x: (x * x).mean(0)) * toys.SIZES
    phase = mean(lambda x: (np.cos(x[:, :2]) + 1e-6j * np.sin(x[:, :2])).mean(0))
    least, most = mean(lambda x: x[:, :3].min(0)), mean(lambda x: x[:, :3].max(0))
    extremes = {"least": [*least, np.inf], "most": [*most, -np.inf]}
    return {"squares": squares, **extremes, "phase": phase, "calls": 1}


def alike(got, want, rtol=1e-6):
    for name, value in want.items():
        for part in (np.real, np.imag):
            np.testing.assert_allclose(part(got[name]), part(value), rtol=rtol, err_msg=name)


SETTINGS = [{"devices": 1}, {"devices": 3, "backend": "pjit", "layout": {"zero": 2}}]


def check_state(reduction, size):
    """Squares of sizes from 1e-30 to 1e30 in one leaf. Return the state of each layout."""
    examples, states = toys.data(size), []
    for settings in SETTINGS:
        _, state, metrics, *_ = toys.train(
            toys.tracking(),
            examples,
            steps=1,
            reduction=reduction,
            optimizer=(optax.sgd(0.1), None),
            **settings,
        )
        assert metrics[0]["skipped"] == 0
        states.append(state.model_state)
        alike(state.model_state, expected(examples, min(20, size)))
    return states


def of_last_class(outputs, batch):
    """A loss of one class alone: some microbatches weigh 0."""
    return SoftmaxCrossEntropy()(outputs, {**batch, "mask": batch["mask"] * (batch["labels"] == 2)})


def check_weights_of_0(reduction, accumulate):
    examples = toys.data(20) | {"labels": (2 * (np.arange(20) % 8 < 3)).astype(np.int32)}
    settings = {
        "reduction": reduction,
        "accumulate": accumulate,
        "optimizer": (optax.sgd(0.1), None),
    }
    _, state, *_ = toys.train(toys.tracking(), examples, steps=1, loss=of_last_class, **settings)
    alike(state.model_state, expected(examples, 20, 3))


MASKED = [0, 5, 12, 3, 11, 19, 26]  # 3, 11 and 19 are all of a microbatch of the first batch


def product(outputs, batch):
    """A loss of a user, who multiplies by the mask."""
    mask, losses = batch["mask"], jnp.abs(outputs[:, 0] - batch["heights"])
    return jnp.sum(losses * mask), jnp.sum(mask), {"worst": jnp.sum((losses > 1) * losses * mask)}


def heights(outputs, batch):
    return MeanSquaredError()(outputs[:, 0], {**batch, "labels": batch["heights"]})


def pairs(outputs, batch):
    return Contrastive()((outputs, jnp.roll(outputs, 1, -1)), batch)


pairs.scope = "global"


def directions():
    """A linear model of x / |x|, which is NaN for zeros, and of log(x^2); its second layer is an
    embedding.
    """

    def init(key, batch):
        table = jax.random.normal(key, (5, toys.CLASSES))
        return {"w": jax.random.normal(key, (len(toys.SIZES), toys.CLASSES)), "table": table}, {}

    def apply(params, state, batch, key, train):
        x = batch["inputs"].reshape(len(batch["mask"]), -1)
        x = x / jnp.linalg.norm(x, axis=1, keepdims=True) + 0.1 * jnp.log(x * x)
        return x @ params["w"] + params["table"].at[batch["kind"]].get(
            mode="fill", fill_value=jnp.nan
        ), state

    return Model(init, apply)


def excluded(inputs, rows=MASKED, label=-100, height=np.nan, kind=-9):
    """(examples whose excluded rows have these contents, and with those of other examples there)"""
    examples = toys.data(40)
    examples |= {
        "kind": np.arange(40, dtype=np.int32) % 5,
        "heights": np.linspace(-1, 1, 40, dtype=np.float32),
    }
    examples["mask"] = np.ones(40, np.float32)
    examples["mask"][rows] = 0
    bad = {name: x.copy() for name, x in examples.items()}
    for name, value in {"inputs": inputs, "labels": label, "heights": height, "kind": kind}.items():
        bad[name][rows] = value
    return bad, examples


def UNMASKED():
    return toys.as_model(lambda rngs: toys.ResNet(rngs, use_mask=False))


MODELS = {**toys.MODELS, "directions": directions, "unmasked": UNMASKED}


def check_excluded(model, loss, examples, **settings):
    """Neither updates and state nor an evaluation."""
    strategy, step, _ = toys.build(MODELS[model](), examples[1], loss=loss, **settings)
    program, results = strategy.compile(step), []
    for contents in examples:
        *_, batch = toys.build(MODELS[model](), contents, loss=loss, **settings)
        state = strategy.init()
        for i in range(2):
            state, metrics = program.update(state, batch(i))
            assert int(metrics["skipped"]) == 0 and int(metrics["nonfinite_grads"]) == 0
        sums = program.evaluate(state, batch(0))._replace(kept=None)
        exported = strategy.export(state)
        results.append(
            jax.tree.map(np.array, (exported.params, exported.model_state, sums, metrics))
        )
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
