"""What is summed besides gradients, and what the mask excludes: state of all sizes, infinities, NaN
in padding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import toys
from jaxdp.exact.fixed_point import largest_exponent, quantize_values, restore_values
from jaxdp.losses import Contrastive, MeanSquaredError, SoftmaxCrossEntropy
from jaxdp.models.base import Model
from jaxdp.train.step import Forward, UpdateRule, init_state, make_step, replace_masked

# --- values as integers
# ---------------------------------------------------------------------------------------------


def added(x, summands=None):
    """The sum of x [row, ...] as of two devices: the first rows, and the last."""
    x = jnp.asarray(x)
    summands = summands or len(x)
    exponent = largest_exponent(x, 0)
    one, two = (quantize_values(part, exponent, summands).sum(0) for part in (x[:1], x[1:]))
    total = two.astype(one.dtype) + one
    assert total.dtype == (jnp.int64 if x.dtype == jnp.float64 else jnp.int32)
    return np.asarray(restore_values(total, exponent, summands))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_element_has_the_precision_of_its_dtype(dtype):
    info = np.finfo(dtype)
    with jax.enable_x64(dtype == "float64"):
        exponents = np.linspace(np.log2(info.tiny) + 60, np.log2(info.max) - 4, 200)
        rng = np.random.default_rng(0)
        x = (rng.uniform(0.1, 1, (8, 200)) * 2**exponents).astype(dtype)
        for signs in (1, rng.choice([-1, 1], 200)):
            want = (signs * x).astype(np.longdouble).sum(0)
            np.testing.assert_allclose(added(signs * x), want.astype(dtype), rtol=2 * info.eps)
        tiny, largest = np.full((8, 1), info.tiny), np.full((8, 1), info.max, dtype)
        assert added(tiny.astype(dtype))[0] == dtype_of(dtype, 8 * info.tiny)
        assert np.isinf(added(largest)).all() and added(largest[:1], 8) == info.max
        assert added(np.zeros((8, 3), dtype)).tolist() == [0, 0, 0]


def dtype_of(dtype, value):
    return np.dtype(dtype).type(value)


@pytest.mark.quick(2)
@pytest.mark.parametrize("rows", [8, 2, 1000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_not_finite_concerns_one_element_and_is_that_of_a_sum_of_floats(dtype, rows):
    inf, nan = np.inf, np.nan
    pairs = [(inf, 1), (1, inf), (inf, inf), (-inf, 3), (-inf, -inf), (inf, -inf), (-inf, inf)]
    pairs += [(nan, 1), (1, nan), (nan, -inf), (inf, nan), (1e-3, 2e-3), (0, 0)]
    x = np.zeros((rows, len(pairs)), dtype)
    x[[0, -1]] = np.array(pairs, dtype).T
    with jax.enable_x64(dtype == "float64"), np.errstate(invalid="ignore"):
        np.testing.assert_allclose(added(x), x.sum(0), rtol=2 * np.finfo(dtype).eps)


# --- model state
# ----------------------------------------------------------------------------------------------------


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


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [53, 5])  # 5: microbatches that have no example
@pytest.mark.parametrize("reduction", ["exact", "bucket", "exact8"])
def test_state_of_all_sizes_and_infinities_is_averaged_element_by_element(reduction, size):
    """Squares of sizes from 1e-30 to 1e30 in one leaf."""
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
    if reduction == "exact":
        jax.tree.map(np.testing.assert_array_equal, *states)


def of_last_class(outputs, batch):
    """A loss of one class alone: some microbatches weigh 0."""
    return SoftmaxCrossEntropy()(outputs, {**batch, "mask": batch["mask"] * (batch["labels"] == 2)})


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["bucket", "exact"])
@pytest.mark.parametrize("accumulate", ["vmap", "scan"])
def test_the_state_of_a_microbatch_that_weighs_0_does_not_count(reduction, accumulate):
    examples = toys.data(20) | {"labels": (2 * (np.arange(20) % 8 < 3)).astype(np.int32)}
    settings = {
        "reduction": reduction,
        "accumulate": accumulate,
        "optimizer": (optax.sgd(0.1), None),
    }
    _, state, *_ = toys.train(toys.tracking(), examples, steps=1, loss=of_last_class, **settings)
    alike(state.model_state, expected(examples, 20, 3))


# --- what the mask excludes
# -----------------------------------------------------------------------------------------

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


CASES = [
    ("mlp", product, excluded(np.nan), {}),
    ("resnet", SoftmaxCrossEntropy(0.1, top_k=[2]), excluded(np.nan), {"accumulate": "scan"}),
    ("mlp", heights, excluded(np.inf, height=-np.inf), {"reduction": "exact", "devices": 3}),
    ("mlp", pairs, excluded(np.nan), {"devices": 2}),
    ("directions", SoftmaxCrossEntropy(), excluded(0.0, MASKED[:3]), {"accumulate": "scan"}),
    ("directions", product, excluded(1e38, MASKED[:3]), {"backend": "pjit", "devices": 3}),
    (
        "blocks",
        product,
        excluded(-np.inf),
        {"backend": "pjit", "devices": 4, "layout": {"zero": 3}},
    ),
    ("unmasked", SoftmaxCrossEntropy(), excluded(np.nan), {"devices": 4}),
]


def UNMASKED():
    return toys.as_model(lambda rngs: toys.ResNet(rngs, use_mask=False))


MAKE = {**toys.MODELS, "directions": directions, "unmasked": UNMASKED}


@pytest.mark.quick(1)
@pytest.mark.parametrize("model, loss, examples, settings", CASES)
def test_contents_that_the_mask_excludes_change_nothing(model, loss, examples, settings):
    """Neither updates and state nor an evaluation."""
    strategy, step, _ = toys.build(MAKE[model](), examples[1], loss=loss, **settings)
    program, results = strategy.compile(step), []
    for contents in examples:
        *_, batch = toys.build(MAKE[model](), contents, loss=loss, **settings)
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


@pytest.mark.quick(1)
@pytest.mark.parametrize("accumulate", ["vmap", "scan"])
def test_a_step_selects_before_the_transform_the_model_and_the_loss(accumulate):
    """Whoever reads the batch: excluded rows beside real ones, and microbatches of nothing else."""
    examples = toys.data(24)

    def whiten(batch, key, train):
        x = batch["inputs"]
        return {**batch, "inputs": (x - x.mean(0)) / (x.std(0) + 1e-6)}

    forward = Forward(toys.MODELS["mlp"](), product, transform=whiten, eval_transform=whiten)
    rule = UpdateRule(optax.sgd(0.1))
    step = make_step(forward, rule, accumulate)
    batch = {k: v.reshape(6, 4, *v.shape[1:]) for k, v in examples.items()}
    batch |= {"heights": np.ones((6, 4), np.float32), "mask": np.ones((6, 4), np.float32)}
    excluded = [(0, 0), (0, 2), (3, 3), *((5, i) for i in range(4))]
    state, results = init_state(forward, rule, 6, {k: v[0] for k, v in batch.items()}), []
    for bad in (np.nan, -np.inf, 0.0):
        for where in excluded:
            batch["mask"][where], batch["inputs"][where], batch["heights"][where] = 0, bad, bad

        def run(f):
            return jax.jit(toys.alone(f, np.arange(6)))(state, batch)

        results.append(jax.tree.map(np.array, (run(step.grads), run(step.evaluate))))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(results[-1]))
        jax.tree.map(np.testing.assert_array_equal, results[0], results[-1])
    assert results[0][0].weight == 17
    for wrong in (-1, np.nan):
        batch["mask"][1, 1] = wrong
        assert np.isnan(run(step.grads).loss) and np.isnan(run(step.evaluate).loss)


def test_tokens_that_a_mask_excludes_may_hold_anything():
    """Finite numbers stay, since a model may read them as context; an example without tokens is
    replaced.
    """
    x = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    x[0, 1, 0], x[2, 0, 1] = np.nan, np.inf
    mask, tokens = np.array([[1.0, 0.0], [0.5, 1.0], [0.0, 0.0]]), np.arange(6).reshape(3, 2)
    new = replace_masked(
        {"inputs": jnp.asarray(x), "ids": jnp.asarray(tokens), "mask": jnp.asarray(mask)}
    )
    first = [[0, 1], [0, 3]]
    np.testing.assert_array_equal(new["inputs"], [first, x[1], first])
    np.testing.assert_array_equal(new["ids"], tokens[[0, 1, 0]])
    x[1, 0, 0] = np.nan  # of a token that counts
    assert np.isnan(
        replace_masked({"inputs": jnp.asarray(x), "mask": jnp.asarray(mask)})["inputs"][1, 0, 0]
    )
