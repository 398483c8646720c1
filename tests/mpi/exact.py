"""Runs in exact mode, over devices of all processes: `mpirun -np 2 python tests/mpi/exact.py ROW ...`.

A row is model-backend-zero-place-accumulator-optimizer-sum: place is the devices, or devices/shard_size; sum is exact,
or what must not pass for it: vmap or loop. Rank 0 prints one line of JSON: {row: [SHA-256 of the final state, [[loss,
norm of the gradient] of each update]]}, floats as `float.hex`.
"""

# ruff: noqa: E402
import hashlib
import json
import pathlib
import sys
import warnings

from jaxdp import environment

environment.exact(8)

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import toys
from jaxdp.data.augment import random_crop, random_flip
from jaxdp.digest import host
from jaxdp.guard import Spike
from jaxdp.models import as_model
from jaxdp.models.gpt import GPT
from jaxdp.models.mlp import MLP
from jaxdp.precision import LossScaling, Policy

STEPS, BATCH, EXAMPLES = 6, 20, 46  # batches of 20, 20 and 6 rows: two of the 8 microbatches then have none
SUMS = {"exact": ("exact", "one"), "vmap": ("bucket", "vmap"), "loop": ("bucket", "loop")}


def augment(batch, key, train):
    if not train:
        return batch
    crop, flip, noise = jax.random.split(key, 3)
    images = random_flip(random_crop(batch["inputs"], crop, 1), flip)
    return {**batch, "inputs": images + 0.1 * jax.random.normal(noise, images.shape)}


def text(vocabulary=11, length=6):
    tokens = np.random.default_rng(0).integers(vocabulary, size=(EXAMPLES, length + 1)).astype(np.int32)
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


BF16, F16 = (Policy(jnp.dtype("float32"), jnp.dtype(name), jnp.dtype("float32")) for name in ("bfloat16", "float16"))
MODELS = {  # (model, examples, more of `toys.build`)
    "dropout": lambda: (toys.MODELS["dropout"](), toys.data(EXAMPLES), {}),
    "resnet": lambda: (toys.MODELS["resnet"](), toys.data(EXAMPLES), {"transform": augment}),
    "blocks": lambda: (toys.MODELS["blocks"](dropout=0.2), toys.data(EXAMPLES), {"remat": "dots_no_batch"}),
    "gpt": lambda: (as_model(gpt), text(), {"remat": "dots_no_batch"}),
    "lstm": lambda: (toys.lstm_model(), toys.data(EXAMPLES), {}),
    "twelve": lambda: (toys.MODELS["dropout"](), toys.data(EXAMPLES), {"microbatches": 12}),
    "sixteen": lambda: (toys.MODELS["blocks"](), toys.data(EXAMPLES), {"microbatches": 16, "remat": "full"}),
    "bfloat16": lambda: (toys.MODELS["blocks"](dropout=0.2), toys.data(EXAMPLES), {"policy": BF16}),
    "float16": lambda: (toys.MODELS["dropout"](), toys.data(EXAMPLES), {"policy": F16, "scaling": LossScaling()}),
    "float64": lambda: (toys.lstm_model(), toys.data(EXAMPLES, dtype="float64"), {"dtype": "float64"}),
    "frozen": lambda: (toys.MODELS["blocks"](), toys.data(EXAMPLES), {"frozen": ("embed", "up/bias")}),
    "guarded": lambda: (toys.MODELS["dropout"](), broken(), {"spike": Spike(1.02, decay=0.5, after=1)}),
    "wide": lambda: (as_model(wide), toys.data(1200), {"batch_size": 500}),
}


def train(row):
    model, backend, zero, place, accumulator, optimizer, how = row.split("-")
    model, examples, options = MODELS[model]()
    devices, _, shard_size = place.partition("/")
    layout = {"zero": int(zero), "accumulator": accumulator} | ({"shard_size": int(shard_size)} if shard_size else {})
    reduction, accumulate = SUMS[how]
    options = {"batch_size": BATCH} | options
    strategy, step, batch = toys.build(
        model, examples, backend=backend, devices=int(devices), reduction=reduction, accumulate=accumulate,
        optimizer=optimizer, ema=0.9, layout=layout, **options,
    )  # fmt: skip
    state, program, curve = strategy.init(), strategy.lower(step), []
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
