"""Small runs of `jaxdp.fit` whose loss is known by NumPy from the parameters that they evaluate."""

import jax
import numpy as np
import optax
from flax import nnx

import jaxdp
from jaxdp.split import path_string

RNG = np.random.default_rng(0)


X = (3 * RNG.normal(size=(90, 4)) + 1).astype(np.float32)


Y = (X.sum(1) > 4).astype(np.int32)


class Net(nnx.Module):
    """With BatchNorm."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.norm = (
            nnx.Linear(4, 8, rngs=rngs),
            nnx.BatchNorm(8, momentum=0.5, rngs=rngs),
        )
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(jax.nn.relu(self.norm(self.first(x))))


class Plain(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(jax.nn.relu(self.first(x)))


def fit(model=Net, optimizer=None, **more):
    base = {
        "steps": 6,
        "batch_size": 30,
        "parallel": {"devices": 1},
        "eval_data": (X, Y),
        "log": {"every": 1},
    }
    return jaxdp.fit(
        model,
        (X, Y),
        optimizer=optimizer or {"target": "adam", "lr": 0.05, "ema": 0.8},
        **{**base, **more},
    )


def named(tree):
    return {
        path_string(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def loss_of(params, statistics=None):
    """The loss of Net or Plain, by NumPy."""
    p = named(params)
    x = X @ p["first/kernel"] + p["first/bias"]
    if statistics is not None:
        s = named(statistics)
        x = (x - s["norm/mean"]) / np.sqrt(s["norm/var"] + 1e-5) * p["norm/scale"] + p["norm/bias"]
    logits = np.maximum(x, 0) @ p["last/kernel"] + p["last/bias"]
    top = logits.max(1, keepdims=True)
    return np.mean(top[:, 0] + np.log(np.exp(logits - top).sum(1)) - logits[np.arange(len(Y)), Y])


def FREE():
    return optax.contrib.schedule_free_sgd(0.2, warmup_steps=2, b1=0.7)
