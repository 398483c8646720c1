"""Runs in exact mode, over devices of all processes: `mpirun -np 2 python
tests/exact/exact_job.py ROW ...`.

A row is model-backend-zero-place-gradient_buffer-optimizer-sum: model is a name or name.precision;
place is the devices, or devices/shard_size; sum is an exact reduction, or one with its exact_group
(exact/2), or what must not pass for exact: vmap or scan. Rank 0 prints one line of JSON: {row:
[SHA-256 of the final state, [[loss, norm of the gradient] of each update]]}, floats as `float.hex`.
"""

# ruff: noqa: E402
import functools
import hashlib
import json
import pathlib
import sys
import warnings

from jaxdp.exact import flags

flags.set_flags()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdp

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
import toys
from jaxdp.checkpoint.leaves import host
from jaxdp.data.augment import random_crop, random_flip
from jaxdp.models import as_model
from jaxdp.models.gpt import GPT
from jaxdp.models.mlp import MLP
from jaxdp.precision import LossScaling, Policy
from jaxdp.train.skip import Spike

STEPS, BATCH, EXAMPLES = (
    6,
    20,
    46,
)  # batches of 20, 20 and 6 rows: two of the 8 microbatches then have none
FAULTS = ("vmap", "scan")  # how `bucket` sums the microbatches of a device


def augment(batch, key, train):
    if not train:
        return batch
    crop, flip, noise = jax.random.split(key, 3)
    images = random_flip(random_crop(batch["inputs"], crop, 1), flip)
    return {**batch, "inputs": images + 0.1 * jax.random.normal(noise, images.shape)}


def text(vocabulary=11, length=6):
    tokens = (
        np.random.default_rng(0).integers(vocabulary, size=(EXAMPLES, length + 1)).astype(np.int32)
    )
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


def gpt(rngs):
    return GPT((6,), 11, layers=3, heads=2, dim=16, hidden=20, bias=False, dropout=0.2, rngs=rngs)


def wide(rngs):
    """Products that XLA deals out over threads."""
    return MLP(toys.SHAPE, toys.CLASSES, (1000, 604), 0.1, rngs=rngs)


def broken():
    """An example of the second batch is not a number."""
    examples = toys.data(EXAMPLES)
    examples["inputs"][BATCH + 5, 0, 0, 0] = np.nan
    return examples


class Net(nnx.Module):
    """Layers, the mean over all dims but the first and the last, and a linear head."""

    def __init__(self, layers, width, rngs):
        self.layers, self.head = nnx.List(layers), nnx.Linear(width, toys.CLASSES, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(tuple(range(1, x.ndim - 1))))


def convolutions(rngs):
    """Plain, strided, dilated, depthwise, grouped and transposed."""

    def conv(i, o, **options):
        return nnx.Conv(i, o, (3, 3), rngs=rngs, **options)

    up = nnx.ConvTranspose(9, 7, (3, 3), strides=(2, 2), rngs=rngs)
    plain = [
        conv(2, 13),
        nnx.BatchNorm(13, rngs=rngs),
        nnx.gelu,
        conv(13, 12, kernel_dilation=2),
        nnx.relu,
    ]
    grouped = [conv(12, 12, feature_group_count=12), nnx.gelu, conv(12, 9, feature_group_count=3)]
    return Net([*plain, *grouped, up, nnx.gelu, conv(7, 16, strides=2)], 16, rngs)


def gru(rngs):
    def rows(x):
        return x.reshape(len(x), toys.SHAPE[0], -1)

    return Net([rows, nnx.RNN(nnx.GRUCell(8, 13, rngs=rngs))], 13, rngs)


class Experts(nnx.Module):
    """A mixture of five experts, of which each token takes two; and norms."""

    def __init__(self, rngs, width=8, hidden=11):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.gate, self.norm = nnx.Linear(width, 5, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (5, width, hidden)))
        self.down = nnx.Param(init(rngs.params(), (5, hidden, width)))

    def __call__(self, x):
        best, chosen = jax.lax.top_k(self.gate(x), 2)
        share = (jax.nn.one_hot(chosen, 5, dtype=x.dtype) * jax.nn.softmax(best)[..., None]).sum(-2)
        hidden = nnx.gelu(jnp.einsum("btd,edh->bteh", x, self.up[...]))
        return self.norm(x + jnp.einsum("bteh,ehd,bte->btd", hidden, self.down[...], share))


def experts(rngs):
    return Net([lambda x: x.reshape(len(x), toys.SHAPE[0], -1), Experts(rngs)], 8, rngs)


class Large(nnx.Module):
    """Reductions of parameters that are larger than a thread's share: means, variances, norms, a
    softmax.
    """

    def __init__(self, rngs):
        self.vector = nnx.Param(jax.random.normal(rngs.params(), (300007,)))
        self.matrix = nnx.Param(1 + 0.1 * jax.random.normal(rngs.params(), (1013, 129)))

    def __call__(self, x):
        v, m = self.vector[...], self.matrix[...]
        of_vector = v.var() + (jax.nn.softmax(v) * v).sum()
        return (
            x * (1 + v.mean()) + of_vector + jnp.tanh(m).mean(1).max() + jnp.square(m).sum(0).mean()
        )


def large(rngs):
    return Net([Large(rngs)], toys.SHAPE[-1], rngs)


def precise(params, compute, **options):
    return {"policy": Policy(jnp.dtype(params), jnp.dtype(compute), jnp.dtype(params)), **options}


PRECISIONS = {
    "": {},
    "float32": {},
    "bfloat16": precise("float32", "bfloat16"),
    "all_bfloat16": precise("bfloat16", "bfloat16"),
    "float16": precise("float32", "float16", scaling=LossScaling(2.0**17, interval=3)),
    "static_float16": precise("float32", "float16", scaling=LossScaling(1024.0, dynamic=False)),
}
OPTIMIZERS = {  # beside those of `toys`: (transformation, clip_norm)
    "schedule_free": lambda: (optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2), None),
    "prodigy": lambda: (optax.contrib.prodigy(1.0), None),
    "sam": lambda: (
        optax.contrib.sam(optax.adam(1e-2), optax.chain(optax.contrib.normalize(), optax.sgd(0.1))),
        None,
    ),
    "multi_steps": lambda: (
        optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
        0.5,
    ),
    "injected": lambda: (
        optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 1e-3, 5)),
        0.5,
    ),
}
MODELS = {  # (model, examples, more of `toys.build`)
    "dropout": lambda: (toys.MODELS["dropout"](), toys.data(EXAMPLES), {}),
    "resnet": lambda: (toys.MODELS["resnet"](), toys.data(EXAMPLES), {"transform": augment}),
    "blocks": lambda: (
        toys.MODELS["blocks"](dropout=0.2),
        toys.data(EXAMPLES),
        {"remat": "dots_no_batch"},
    ),
    "gpt": lambda: (as_model(gpt), text(), {"remat": "dots_no_batch"}),
    "lstm": lambda: (toys.lstm_model(), toys.data(EXAMPLES), {}),
    "twelve": lambda: (toys.MODELS["dropout"](), toys.data(EXAMPLES), {"microbatches": 12}),
    "sixteen": lambda: (
        toys.MODELS["blocks"](),
        toys.data(EXAMPLES),
        {"microbatches": 16, "remat": "full"},
    ),
    **{
        make.__name__: functools.partial(
            lambda make: (as_model(make), toys.data(EXAMPLES), {}), make
        )
        for make in (convolutions, gru, experts, large)
    },
    "float64": lambda: (
        toys.lstm_model(),
        toys.data(EXAMPLES, dtype="float64"),
        {"dtype": "float64"},
    ),
    "frozen": lambda: (
        toys.MODELS["blocks"](),
        toys.data(EXAMPLES),
        {"frozen": ("embed", "up/bias")},
    ),
    "guarded": lambda: (
        toys.MODELS["dropout"](),
        broken(),
        {"spike": Spike(1.02, decay=0.5, after=1)},
    ),
    "wide": lambda: (as_model(wide), toys.data(1200), {"batch_size": 500}),
}


def train(row):
    model, backend, zero, place, gradient_buffer, optimizer, how = row.split("-")
    model, _, precision = model.partition(".")
    model, examples, options = MODELS[model]()
    devices, _, shard_size = place.partition("/")
    layout = {"zero": int(zero), "gradient_buffer": gradient_buffer} | (
        {"shard_size": int(shard_size)} if shard_size else {}
    )
    reduction, _, group = how.partition("/")
    sums = {"reduction": "bucket", "accumulate": how} if how in FAULTS else {"reduction": reduction}
    optimizer = OPTIMIZERS[optimizer]() if optimizer in OPTIMIZERS else optimizer
    options = (
        {"batch_size": BATCH, "group": int(group or 1)} | sums | options | PRECISIONS[precision]
    )
    strategy, step, batch = toys.build(
        model, examples, backend=backend, devices=int(devices), optimizer=optimizer, ema=0.9, layout=layout, **options,
    )  # fmt: skip
    state, program, curve = strategy.init(), strategy.compile(step), []
    for i in range(STEPS):
        state, metrics = program.update(state, batch(i))
        curve.append([float(metrics[name]).hex() for name in ("loss", "grad_norm")])
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(strategy.export(state)):
        digest.update(host(leaf).tobytes())
    return digest.hexdigest(), curve


if __name__ == "__main__":
    warnings.simplefilter("error")
    context = jaxdp.init()
    trained = {}
    for row in sys.argv[1:]:
        with jax.enable_x64(row.startswith("float64")):
            trained[row] = train(row)
    if context.is_root:
        print(json.dumps(trained))
