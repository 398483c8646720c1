"""The cross-entropy of uneven classes: weights, and precision, recall and F1 as quotients of sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.errors import UsageError
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.sampling.example_losses import WeightedCrossEntropy

RNG = np.random.default_rng(1)
LOGITS = jnp.asarray(RNG.normal(size=(64, 3)), jnp.float32)
LABELS = RNG.integers(0, 3, 64).astype(np.int32)
MASK = (np.arange(64) % 5 != 0).astype(np.float32)
BATCH = {"labels": LABELS, "mask": MASK}


def f1_of(number, rows):
    """As sklearn.metrics.f1_score, from counts."""
    predicted, true = np.argmax(LOGITS, -1)[rows] == number, LABELS[rows] == number
    right = (predicted & true).sum()
    return 2 * right / (predicted.sum() + true.sum())


def test_the_loss_is_the_weighted_mean():
    weights = np.array([1.0, 5.0, 0.5])
    total, weight, metrics = WeightedCrossEntropy([1, 5, 0.5])(LOGITS, BATCH)
    terms = np.log(np.exp(LOGITS).sum(-1)) - np.asarray(LOGITS)[np.arange(64), LABELS]
    each = weights[LABELS] * MASK
    np.testing.assert_allclose(total / weight, (terms * each).sum() / each.sum(), rtol=1e-5)
    plain = SoftmaxCrossEntropy()(LOGITS, BATCH)
    assert metrics["accuracy"][0] == plain[2]["accuracy"] and metrics["accuracy"][1] == plain[1]
    np.testing.assert_allclose(WeightedCrossEntropy()(LOGITS, BATCH)[0], plain[0])


def test_the_loss_is_computed_once():
    """With weights of classes too: their sums follow from the same terms."""

    def logarithms(loss):
        return str(jax.make_jaxpr(loss)(LOGITS, BATCH)).count("= log ")

    plain, metrics = SoftmaxCrossEntropy(0.1), WeightedCrossEntropy(None, 1, 0.1)
    assert logarithms(WeightedCrossEntropy([1, 5, 0.5], 1, 0.1)) == logarithms(metrics)
    assert logarithms(plain) == 1


@pytest.mark.parametrize(
    "weights", [np.array([1, 5, 0.5]), jnp.array([1, 5, 0.5]), np.array([2, 10, 1]), (1, 5, 0.5)]
)
def test_weights_may_be_an_array(weights):
    found, listed = WeightedCrossEntropy(weights), WeightedCrossEntropy([1, 5, 0.5])
    sums = [loss(LOGITS, BATCH) for loss in (found, listed)]
    means = [total / weight for total, weight, _ in sums]
    np.testing.assert_allclose(*means, rtol=1e-6)


def test_tokens_have_the_weights_of_their_classes():
    batch = {name: x.reshape(8, 8) for name, x in BATCH.items()}
    found = WeightedCrossEntropy([1, 5, 0.5])(LOGITS.reshape(8, 8, 3), batch)
    for a, b in zip(
        *map(jax.tree.leaves, (found, WeightedCrossEntropy([1, 5, 0.5])(LOGITS, BATCH)))
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("number", range(3))
def test_precision_recall_and_f1_are_quotients_of_sums(number):
    parts = [slice(0, 20), slice(20, 64)]
    sums = [
        WeightedCrossEntropy(positive=number)(
            LOGITS[part], {name: x[part] for name, x in BATCH.items()}
        )[2]
        for part in parts
    ]

    def joined(name):
        return sum(s[name][0] for s in sums) / sum(s[name][1] for s in sums)

    rows = MASK > 0
    np.testing.assert_allclose(joined("f1"), f1_of(number, rows), rtol=1e-6)
    precision, recall = joined("precision"), joined("recall")
    np.testing.assert_allclose(
        2 * precision * recall / (precision + recall), joined("f1"), rtol=1e-5
    )


def test_a_run_keeps_the_checkpoint_of_the_best_f1(tmp_path):
    labels = (np.arange(200) % 20 == 0).astype(np.int32)
    x = (RNG.normal(size=(200, 4)) + 2 * labels[:, None]).astype(np.float32)
    fitted = jaxdp.fit(
        {"target": "MLP", "args": {"hidden": [8], "num_classes": 2}},
        (x, labels),
        {"target": "WeightedCrossEntropy", "args": {"class_weights": [1, 19]}},
        {"target": "adam", "lr": 0.02},
        eval_data=(x, labels),
        steps=60,
        batch_size=40,
        eval={"every": 20},
        checkpoint={"every": 20, "best": "f1"},
        run_dir=tmp_path / "run",
    )
    best = max(fitted.history["eval"]["f1"])
    assert fitted.best.final["f1"] == pytest.approx(best) and best > 0.5
    predicted = fitted.best.predict(x).argmax(-1)
    right = ((predicted == 1) & (labels == 1)).sum()
    assert best == pytest.approx(2 * right / ((predicted == 1).sum() + labels.sum()))


def test_the_mean_over_all_classes():
    loss = WeightedCrossEntropy(positive=None)
    _, _, metrics = loss(LOGITS, {**BATCH, "mask": np.ones(64, np.float32)})
    means = {name: float(a / b) for name, (a, b) in metrics.items()}
    expected = np.mean([f1_of(number, np.arange(64)) for number in range(3)])
    assert loss.derive(means)["macro_f1"] == pytest.approx(expected, rel=1e-6)
    assert np.isnan(loss.derive({})["macro_f1"])


@pytest.mark.parametrize(
    "args, said",
    [
        ({"class_weights": [1, 2]}, "loss.args.class_weights: 2 numbers for 3 classes; give one"),
        ({"class_weights": [1, 0, 1]}, "loss.args.class_weights: .1, 0, 1. is not a list of pos"),
        ({"class_weights": [1, -1, 1]}, "loss.args.class_weights: .1, -1, 1. is not a list of pos"),
        ({"class_weights": [0, 0, 0]}, "loss.args.class_weights: .0, 0, 0. is not a list of pos"),
        ({"class_weights": [1, np.nan, 1]}, "loss.args.class_weights: .1, nan, 1. is not a list"),
        (
            {"class_weights": np.full(3, np.inf)},
            "loss.args.class_weights: array.* is not a list of",
        ),
        ({"class_weights": {0: 1}}, "loss.args.class_weights: .0: 1. is not a list of positive"),
        ({"positive": 3}, "loss.args.positive: 3 is none of 3 classes; give its name, or 0 to 2"),
    ],
)
def test_what_is_wrong_is_named(args, said):
    with pytest.raises(UsageError, match=said):
        WeightedCrossEntropy(**args)(LOGITS, BATCH)
    with pytest.raises(UsageError, match="use SoftmaxCrossEntropy"):
        WeightedCrossEntropy()(LOGITS, {**BATCH, "labels": np.zeros((64, 3), np.float32)})
    with pytest.raises(UsageError, match=r"outputs \(64, 3\) do not fit labels \(64, 3\)"):
        WeightedCrossEntropy()(LOGITS, {**BATCH, "labels": np.zeros((64, 3), np.int32)})
