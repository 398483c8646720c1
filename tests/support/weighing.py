"""Metrics with weights of their own, in one layout: each is the mean over its own elements."""

import jax.numpy as jnp
import numpy as np
import pytest

import toys
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.train.state import WEIGHT

RARE = 2  # a class that only the last batch has


def examples(dtype=np.float32):
    """53 examples: batches of 20, 20 and 13, in 8 microbatches."""
    made = toys.data(53, dtype=dtype)
    made["labels"] = np.where(np.arange(53) < 45, np.arange(53) % 2, RARE).astype(np.int32)
    return made


def per_class(outputs, batch):
    """Of each class the mean of an input, which no parameter changes."""
    total, weight, metrics = SoftmaxCrossEntropy()(outputs, batch)
    for label in range(toys.CLASSES):
        own = (batch["labels"] == label) * batch["mask"]
        metrics[f"class{label}"] = (jnp.sum(own * batch["inputs"][:, 0, 0, 0]), jnp.sum(own))
    return total, weight, {**metrics, "all": jnp.sum(batch["inputs"][:, 0, 0, 0] * batch["mask"])}


per_class.derive = lambda means: {
    "balanced": sum(means[f"class{c}"] for c in range(toys.CLASSES)) / toys.CLASSES
}


def want(batch):
    """{metric: mean} of a batch, by NumPy; NaN of a class that it has not."""
    made = examples(np.float64)
    x, labels = (made[k][20 * batch : 20 * batch + 20] for k in ("inputs", "labels"))
    means = {
        f"class{c}": x[labels == c, 0, 0, 0].mean() if (labels == c).any() else np.nan
        for c in range(3)
    }
    return {**means, "all": x[:, 0, 0, 0].mean()}


def check_means(**way):
    _, _, metrics, *_ = toys.train(
        toys.MODELS["mlp"](),
        examples(),
        steps=3,
        **{"loss": per_class, "optimizer": "momentum", **way},
    )
    for batch, got in enumerate(metrics):
        for name, mean in want(batch).items():
            np.testing.assert_allclose(
                got[name], mean, rtol=1e-5, err_msg=f"{name} of batch {batch}"
            )
    assert [float(m[f"{WEIGHT}class{RARE}"]) for m in metrics] == pytest.approx([0, 0, 8], rel=1e-6)
