"""ViT against plain loops in NumPy, over patches cut out one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toys
from jaxdp.errors import UsageError
from jaxdp.models import as_model
from jaxdp.models.vit import ViT

SHAPE, CLASSES, KEY = (4, 6, 2), 3, jax.random.key(0)
SMALL = {
    "input_shape": SHAPE,
    "num_classes": CLASSES,
    "patch": 2,
    "layers": 2,
    "heads": 2,
    "dim": 8,
}


def model(**args):
    return as_model(lambda rngs: ViT(**{**SMALL, **args}, rngs=rngs))


def oracle(p, image):
    """The logits of one image."""

    def normalize(x, p):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def linear(x, p):
        return x @ p["kernel"] + p.get("bias", 0)

    cuts = [image[i : i + 2, j : j + 2].ravel() for i in range(0, 4, 2) for j in range(0, 6, 2)]
    x = linear(np.array(cuts), p["embed"]) + p["positions"]
    for i in range(2):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], p["blocks"]["stack"])
        y, a = normalize(x, block["norm1"]), block["attention"]
        query, key, value = (
            linear(y, a[name]).reshape(6, 2, 4) for name in ("query", "key", "value")
        )
        mixed = np.zeros((6, 2, 4))
        for t in range(6):
            for h in range(2):
                weights = np.exp(key[:, h] @ query[t, h] / 2)
                mixed[t, h] = weights / weights.sum() @ value[:, h]
        x = x + linear(mixed.reshape(6, 8), a["back"])
        up = linear(normalize(x, block["norm2"]), block["mlp"]["up"])
        x = x + linear(
            0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3))),
            block["mlp"]["back"],
        )
    return linear(normalize(x, p["norm"]).mean(0), p["head"])


def test_logits_are_those_of_plain_loops():
    made, rng = model(), np.random.default_rng(0)
    with jax.enable_x64(True):
        batch = {"inputs": rng.normal(size=(2, *SHAPE))}
        shapes = jax.eval_shape(made.init, KEY, batch)[0]
        params = jax.tree.map(lambda x: 0.3 * (rng.normal(size=x.shape) + (x.ndim < 3)), shapes)
        got = jax.jit(lambda p: made.apply(p, {}, batch, KEY, False)[0])(params)
        assert got.dtype == np.float64 and made.blocks == ("blocks/stack",)
    np.testing.assert_allclose(
        got, [oracle(params, image) for image in batch["inputs"]], rtol=0, atol=1e-12
    )


def test_a_tiny_one_has_its_published_size():
    """DeiT-Ti: 5,717,416 parameters, but for the class token and its position, and the biases of
    keys.
    """
    made = as_model(lambda rngs: ViT((224, 224, 3), 1000, patch=16, rngs=rngs))
    params = jax.eval_shape(made.init, KEY, {"inputs": jnp.zeros((1, 224, 224, 3))})[0]
    assert sum(x.size for x in jax.tree.leaves(params)) == 5_717_416 - 2 * 192 - 12 * 192


@pytest.mark.slow
def test_it_learns():
    made = as_model(lambda rngs: ViT(toys.SHAPE, toys.CLASSES, 2, 2, 2, 8, rngs=rngs))
    _, _, metrics, *_ = toys.train(made, toys.data(24), batch_size=24, steps=20)
    assert metrics[-1]["loss"] < 0.8 * metrics[0]["loss"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"patch": 4}, "model.args.patch: 4 does not divide images of 4x6"),
        ({"heads": 3}, "model.args.dim: 8 does not divide by heads: 3"),
        ({"layers": 0}, "model.args.layers: 0 is too small"),
        (
            {"input_shape": (8,)},
            r"model.args.input_shape: \(8,\) is not \(height, width, channels\)",
        ),
        ({"dropout": -0.1}, r"model.args.dropout: -0.1 is not in \[0, 1\)"),
    ],
)
def test_arguments_that_do_not_fit_are_named(args, words):
    with pytest.raises(UsageError, match=words):
        model(**args)
