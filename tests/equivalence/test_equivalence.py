"""What trains on many devices is what one device would have trained: three rings, and planted
faults that must show.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toys
from covering import cover, first, name, product
from jaxdp.data.dataset import Arrays
from jaxdp.data.example_order import EpochOrder
from jaxdp.data.prefetch import read_batches
from jaxdp.losses import MeanSquaredError, SoftmaxCrossEntropy
from jaxdp.models import as_model
from jaxdp.split import DATA
from jaxdp.train.step import Forward, UpdateRule, init_state, make_step
from judging import STRATEGIES, TOLERANCE, check_strategy, judged, smallest

ORDINARY = {"reduction": ("auto",), "dtype": ("float64",)}


@pytest.mark.parametrize("row", first(1, sorted(cover(**STRATEGIES), key=smallest)), ids=name)
def test_every_strategy_agrees_with_the_oracle(row):
    check_strategy(**row)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("row", product(**STRATEGIES | ORDINARY), ids=name)
def test_every_combination_agrees_with_the_oracle(row):
    check_strategy(**row)


@pytest.mark.slow
def test_the_oracle_moves_the_parameters():
    with jax.enable_x64(True):
        first = toys.train(
            toys.MODELS["resnet"](), toys.data(dtype="float64"), dtype="float64", steps=0
        )[0]
        params, state = judged("resnet", "adamw", 8, "float64")
    assert toys.relative_error(first.params, params)[0] > 0.1
    assert toys.relative_error(first.model_state, state)[0] > 0.1


AGAINST_JIT = cover(backend=("pjit", "pmap"), devices=(3, 8, 1), model=("mlp", "resnet"))


@pytest.mark.slow
@pytest.mark.parametrize("row", first(1, AGAINST_JIT), ids=name)
def test_every_strategy_agrees_with_a_plain_jit(row):
    model, examples = toys.MODELS[row["model"]](), toys.data(dtype="float64")
    with jax.enable_x64(True):
        step = make_step(
            Forward(model, SoftmaxCrossEntropy(), toys.uniform("float64")),
            UpdateRule(optax.sgd(0.05, 0.9)),
        )
        dataset, cursor = Arrays(**examples), EpochOrder(53, 20, 8, 0, shuffle=False)
        first, got, *_ = toys.train(
            model,
            examples,
            optimizer="momentum",
            dtype="float64",
            **{k: v for k, v in row.items() if k != "model"},
        )
        state, slots = jax.tree.map(jnp.asarray, first), jnp.arange(8)
        update = jax.jit(
            lambda state, batch: step.apply(state, toys.alone(step.grads, slots)(state, batch))
        )
        for i in range(10):
            state, _ = update(state, read_batches(dataset, cursor, [i], np.arange(8)))
        error, where = toys.relative_error(
            (got.params, got.model_state, got.opt_state),
            (state.params, state.model_state, state.opt_state),
        )
    assert error <= 1e-12, where


def losses_of(metrics):
    return np.array([m["loss"] for m in metrics])


class MeanOfMeans(SoftmaxCrossEntropy):
    """A fault: every microbatch counts the same, whatever its number of rows."""

    def __call__(self, outputs, batch):
        total, weight, metrics = super().__call__(outputs, batch)
        return total / jnp.maximum(weight, 1), jnp.minimum(weight, 1), metrics


@pytest.mark.slow
def test_a_planted_mean_of_means_is_caught():
    with jax.enable_x64(True):
        _, state, *_ = toys.train(
            toys.MODELS["mlp"](),
            toys.data(dtype="float64"),
            loss=MeanOfMeans(),
            optimizer="momentum",
            dtype="float64",
        )
        error, _ = toys.relative_error(state.params, judged("mlp", "momentum", 8, "float64")[0])
    assert error > 1e3 * TOLERANCE["float32"]


@pytest.mark.slow
def test_a_planted_device_keyed_dropout_is_caught():
    model = toys.dropout_model(lambda key: jax.random.fold_in(key, jax.lax.axis_index(DATA)))
    one, four = (losses_of(toys.train(model, toys.data(), devices=n, steps=3)[2]) for n in (1, 4))
    assert np.abs(one - four).max() > 1e-2


@pytest.mark.slow
def test_a_planted_unmasked_padding_is_caught():
    model = as_model(lambda rngs: toys.ResNet(rngs, use_mask=False))
    with jax.enable_x64(True):
        _, state, *_ = toys.train(
            model, toys.data(dtype="float64"), optimizer="momentum", dtype="float64"
        )
        error, _ = toys.relative_error(
            state.model_state, judged("resnet", "momentum", 8, "float64")[1]
        )
    assert error > 1e3 * TOLERANCE["float32"]


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    order=st.permutations(range(12)),
    mask=st.lists(st.sampled_from([0.0, 1.0]), min_size=12, max_size=12),
    seed=st.integers(0, 99),
)
def test_sums_of_a_loss_do_not_depend_on_the_split(order, mask, seed):
    rng = np.random.default_rng(seed)
    logits, labels, targets = (
        rng.normal(size=(12, 5)),
        rng.integers(5, size=12),
        rng.normal(size=(12, 5)),
    )
    cases = [
        (SoftmaxCrossEntropy(), labels),
        (SoftmaxCrossEntropy(0.1), labels),
        (MeanSquaredError(), targets),
    ]
    with jax.enable_x64(True):
        for loss, truth in cases:

            def sums(rows, loss=loss, truth=truth):
                return loss(
                    jnp.asarray(logits[rows]),
                    {"labels": jnp.asarray(truth[rows]), "mask": jnp.asarray(np.array(mask)[rows])},
                )

            pieces = [sums(np.array(part)) for part in (order[:2], order[2:5], order[5:])]
            whole = jax.tree.leaves(sums(np.arange(12)))
            total = jax.tree.leaves(jax.tree.map(lambda *x: np.sum(x), *pieces))
            np.testing.assert_allclose(total, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("model", toys.MODELS)
def test_gradients_need_no_implicit_promotion(model):
    examples = toys.data()
    for dtype in ("float32", "bfloat16")[
        : 1 if model == "resnet" else 2
    ]:  # Flax's BatchNorm promotes bfloat16 itself
        policy = toys.uniform("float32")._replace(compute=jnp.dtype(dtype))
        forward, rule = (
            Forward(toys.MODELS[model](), SoftmaxCrossEntropy(), policy),
            UpdateRule(optax.sgd(0.1)),
        )
        step, state = (
            make_step(forward, rule),
            init_state(forward, rule, 8, {k: v[:3] for k, v in examples.items()}),
        )
        batch = read_batches(Arrays(**examples), EpochOrder(53, 20, 8, 0), [0], np.arange(8))
        with jax.numpy_dtype_promotion("strict"):
            sums = jax.eval_shape(toys.alone(step.grads, np.arange(8)), state, batch)
        assert {x.dtype.name for x in jax.tree.leaves(sums)} == {"float32"}
