"""Small models, data and a training harness that the tests share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxdp.data.base import Arrays
from jaxdp.data.cursor import Cursor
from jaxdp.data.prefetch import read_batch
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.models import as_model
from jaxdp.models.base import Model
from jaxdp.models.layers import ConvBN, Residual
from jaxdp.models.mlp import MLP
from jaxdp.parallel import STRATEGIES
from jaxdp.parallel.reduction import make_reduction
from jaxdp.precision import Policy
from jaxdp.step import init_state, make_step

SHAPE, CLASSES = (4, 4, 2), 3


class ResNet(nnx.Module):
    """A stem and one residual of two blocks, all with BatchNorm."""

    def __init__(self, rngs, use_mask=True):
        self.stem = ConvBN(SHAPE[-1], 4, 3, rngs=rngs)
        self.residual = Residual([ConvBN(4, 4, 3, rngs=rngs), ConvBN(4, 4, 3, rngs=rngs)])
        self.head = nnx.Linear(4, CLASSES, rngs=rngs)
        self.use_mask = use_mask

    def __call__(self, x, mask):
        mask = mask if self.use_mask else None
        return self.head(self.residual(self.stem(x, mask), mask).mean((1, 2)))


def dropout_model(key_of=lambda key: key) -> Model:
    """An MLP with dropout as two plain functions; `key_of` lets a test plant a fault."""
    plain = MODELS["mlp"]()

    def init(key, batch):
        return plain.init(key, batch)

    def apply(params, model_state, batch, key, train):
        x = batch["inputs"].reshape(len(batch["inputs"]), -1)
        x = jax.nn.relu(x @ params["layers"]["0"]["kernel"] + params["layers"]["0"]["bias"])
        if train:
            x = jnp.where(jax.random.bernoulli(key_of(key), 0.75, x.shape), x / 0.75, jnp.zeros_like(x))
        return x @ params["head"]["kernel"] + params["head"]["bias"], model_state

    return Model(init, apply)


MODELS = {
    "mlp": lambda: as_model(lambda rngs: MLP(SHAPE, CLASSES, (8,), rngs=rngs)),
    "resnet": lambda: as_model(ResNet),
    "dropout": dropout_model,
}


def data(size=53, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=size).astype(np.int32)
    inputs = rng.normal(size=(size, *SHAPE)) + labels[:, None, None, None] * 0.5
    return {"inputs": inputs.astype(dtype), "labels": labels}


def policy(dtype):
    return Policy(jnp.dtype(dtype), jnp.dtype(dtype), jnp.dtype(dtype))


OPTIMIZERS = {
    "adamw": (lambda: optax.adamw(1e-2, weight_decay=0.1), 0.5),
    "momentum": (lambda: optax.sgd(0.05, 0.9), None),
}


def train(
    model,
    examples,
    *,
    backend="pmap",
    devices=1,
    microbatches=8,
    accumulate="vmap",
    reduction="xla",
    optimizer="adamw",
    steps=10,
    batch_size=20,
    dtype="float32",
    loss=None,
    bucket_mb=0.001,
    layout=None,
):
    """(initial state, final exported state, metrics of each update, strategy, program)"""
    tx, clip = OPTIMIZERS[optimizer][0](), OPTIMIZERS[optimizer][1]
    step = make_step(
        model, loss or SoftmaxCrossEntropy(), tx, policy=policy(dtype), clip_norm=clip, accumulate=accumulate
    )
    dataset = Arrays(**examples)
    cursor = Cursor(len(dataset), batch_size, microbatches, 0, shuffle=False)
    example = {k: v[: cursor.examples_per_microbatch] for k, v in examples.items()}
    make = lambda: init_state(model, tx, policy(dtype), 0, microbatches, example)
    strategy = STRATEGIES[backend](
        make,
        microbatches,
        make_reduction(reduction, bucket_mb),
        None,
        jax.devices()[:devices],
        blocks=model.blocks,
        **(layout or {}),
    )
    state = strategy.init()
    first = jax.tree.map(np.array, strategy.export(state))
    program, metrics = strategy.lower(step), []
    for i in range(steps):
        state, m = program.update(state, strategy.put(read_batch(dataset, cursor, i, strategy.local_slots)))
        metrics.append(jax.device_get(m))
    return first, jax.tree.map(np.array, strategy.export(state)), metrics, strategy, program


def relative_error(a, b):
    """(largest relative L2 error of a leaf, its path)"""
    worst = (0.0, "")
    paths = jax.tree_util.tree_leaves_with_path(a)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(paths, jax.tree.leaves(b)):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        error = np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)
        worst = max(worst, (float(error) if np.isfinite(error) else np.inf, jax.tree_util.keystr(path)))
    return worst
