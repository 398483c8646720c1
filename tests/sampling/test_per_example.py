"""A function of outputs and labels as a loss."""

import jax
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.errors import UsageError
from jaxdp.losses import LOSSES, make_loss
from jaxdp.sampling.example_losses import PerExample

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
Y = (RNG.uniform(size=(60, 3)) > 0.5).astype(np.float32)
MASK = (np.arange(60) % 7 != 0).astype(np.float32)


NAME = "optax.losses.sigmoid_binary_cross_entropy"
FUNCTION = {"function": optax.losses.sigmoid_binary_cross_entropy}


@pytest.mark.parametrize(
    ("target", "args"), [("PerExample", FUNCTION), ("PerExample", {"function": NAME}), (NAME, {})]
)
def test_the_mean_is_over_the_unmasked_examples(target, args):
    loss = make_loss(target, args)
    outputs = X[:, :3]
    outputs = np.where(MASK[:, None] > 0, outputs, np.nan)
    total, weight, _ = loss(outputs, {"labels": Y, "mask": MASK})
    expected = optax.losses.sigmoid_binary_cross_entropy(X[:, :3], Y)[MASK > 0].mean()
    np.testing.assert_allclose(total / weight, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["squared_error", "huber_loss", "log_cosh", "sigmoid_binary_cross_entropy"]
)
def test_a_function_of_outputs_and_labels_is_a_loss_as_it_is(name):
    found = getattr(optax.losses, name)
    for loss in (make_loss("f", {}, table={**LOSSES, "f": found}), make_loss(f"optax.{name}", {})):
        total, weight, _ = loss(X[:, :3], {"labels": Y, "mask": MASK})
        expected = found(X[:, :3], Y)[MASK > 0].mean()
        np.testing.assert_allclose(total / weight, expected, rtol=1e-6)
    smooth = make_loss("optax.huber_loss", {"delta": 0.1})
    total, weight, _ = smooth(X[:, :3], {"labels": Y, "mask": MASK})
    expected = optax.huber_loss(X[:, :3], Y, delta=0.1)[MASK > 0].mean()
    np.testing.assert_allclose(total / weight, expected, rtol=1e-6)


@pytest.mark.parametrize("own", [True, False])
def test_a_run_has_the_numbers_of_one_device(own):
    function = optax.losses.sigmoid_binary_cross_entropy

    def fit(devices):
        return jaxdp.fit(
            {"target": "MLP", "args": {"hidden": [8], "num_classes": 3}},
            (X, Y),
            PerExample(function) if own else function,
            {"target": "sgd", "lr": 0.5},
            steps=20,
            batch_size=20,
            parallel={"devices": devices},
        )

    one, four = fit(1), fit(4)
    for a, b in zip(*map(jax.tree.leaves, (one.params, four.params))):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert four.final["loss"] == pytest.approx(one.final["loss"], rel=1e-5)


def test_a_mean_is_refused_with_the_reason():
    def mean(outputs, labels):
        return optax.losses.squared_error(outputs, labels).mean()

    with pytest.raises(UsageError, match="loss: mean returns one number; return a loss of each"):
        PerExample(mean)(X[:, :3], {"labels": Y, "mask": MASK})
    with pytest.raises(UsageError, match=r"loss.args.function: 'optax.nothing'|has no 'nothing'"):
        PerExample("optax.nothing")
