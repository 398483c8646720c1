"""Small models, data and a training harness that the tests share."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.tree_util import Partial

from jaxdp.config import Config, Parallel
from jaxdp.data.dataset import Arrays
from jaxdp.data.example_order import EpochOrder, Streams
from jaxdp.data.prefetch import read_batches
from jaxdp.extras import extras_of
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.models import as_model
from jaxdp.models.base import Model
from jaxdp.models.layers import ConvBN, Residual
from jaxdp.models.mlp import MLP
from jaxdp.models.nnx import Blocks
from jaxdp.optim import OPTIMIZERS as TABLE
from jaxdp.parallel.layout import Sharding
from jaxdp.precision import Policy
from jaxdp.run.components import STRATEGIES, make_reduction
from jaxdp.train.step import Forward, Replica, UpdateRule, init_state, make_step

SHAPE, CLASSES, WIDTH = (4, 4, 2), 3, 24
SIZES = np.logspace(-30, 30, 32)  # of the squares of `tracking`
STACK = ("blocks/stack",)


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


class Block(nnx.Module):
    """x + down(relu(up(x)))"""

    def __init__(self, rngs, dropout):
        self.up, self.down = (
            nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs),
            nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs),
        )
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(nnx.relu(self.up(x))))


class Stacked(nnx.Module):
    """The inputs as tokens, embedded and averaged, and three stacked blocks: widths split by 8, and
    by 3.
    """

    def __init__(self, rngs, dropout=0.0):
        self.embed = nnx.Embed(8, WIDTH, rngs=rngs)
        self.blocks = Blocks(lambda rngs: Block(rngs, dropout), 3, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        tokens = jnp.clip(jnp.floor(2 * x.reshape(len(x), -1) + 4), 0, 7).astype(jnp.int32)
        return self.head(self.blocks(self.embed(tokens).mean(1)))


def dropout_model(key_of=lambda key: key) -> Model:
    """An MLP with dropout as two plain functions; `key_of` lets a test plant a fault."""
    plain = MODELS["mlp"]()

    def init(key, batch):
        return plain.init(key, batch)

    def apply(params, model_state, batch, key, train):
        x = batch["inputs"].reshape(len(batch["inputs"]), -1)
        x = jax.nn.relu(x @ params["layers"]["0"]["kernel"] + params["layers"]["0"]["bias"])
        if train:
            x = jnp.where(
                jax.random.bernoulli(key_of(key), 0.75, x.shape), x / 0.75, jnp.zeros_like(x)
            )
        return x @ params["head"]["kernel"] + params["head"]["bias"], model_state

    return Model(init, apply)


def lstm_model(width=12) -> Model:
    """An LSTM over the rows of an image, as two plain functions; a place goes on where it ended in
    the last batch.
    """
    inputs = SHAPE[1] * SHAPE[2]

    def init(key, batch):
        one, two = jax.random.split(key)

        def draw(key, *shape):
            return jax.random.normal(key, shape) / shape[0] ** 0.5

        gates = {"kernel": draw(one, inputs + width, 4 * width), "bias": jnp.zeros(4 * width)}
        head = {"kernel": draw(two, width, CLASSES), "bias": jnp.zeros(CLASSES)}
        last = jnp.zeros((len(batch["inputs"]), width))
        return {"gates": gates, "head": head}, {"carry": {"cell": last, "hidden": last}}

    def apply(params, model_state, batch, key, train):
        def step(carry, x):
            cell, hidden = carry
            mixed = (
                jnp.concatenate([x, hidden], 1) @ params["gates"]["kernel"]
                + params["gates"]["bias"]
            )
            take_in, forget, give, new = jnp.split(mixed, 4, 1)
            cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(take_in) * jnp.tanh(new)
            return (cell, jax.nn.sigmoid(give) * jnp.tanh(cell)), None

        rows = batch["inputs"].reshape(*batch["inputs"].shape[:2], inputs).swapaxes(0, 1)
        carry = jax.lax.stop_gradient(
            (model_state["carry"]["cell"], model_state["carry"]["hidden"])
        )
        (cell, hidden), _ = jax.lax.scan(step, carry, rows)
        outputs = hidden @ params["head"]["kernel"] + params["head"]["bias"]
        return outputs, {"carry": {"cell": cell, "hidden": hidden}}

    return Model(init, apply)


def summing():
    """Carries the sum of what a row has seen; its output depends on it."""

    def init(key, batch):
        size = int(np.prod(batch["inputs"].shape[1:]))
        kernel = jax.random.normal(key, (size, CLASSES)) * 0.1
        return {"kernel": kernel}, {"carry": {"seen": jnp.zeros((len(batch["inputs"]), size))}}

    def apply(params, state, batch, key, train):
        seen = jax.lax.stop_gradient(state["carry"]["seen"]) + batch["inputs"].reshape(
            len(batch["inputs"]), -1
        )
        return seen @ params["kernel"], {"carry": {"seen": seen}}

    return Model(init, apply)


def counting(step_of=lambda batch: 1) -> Model:
    """A linear model that counts its calls in an int32 and carries the sum of what each place has
    seen.
    """

    def init(key, batch):
        x = batch["inputs"].reshape(len(batch["inputs"]), -1)
        params = {"w": jax.random.normal(key, (x.shape[1], CLASSES), x.dtype) * 0.1}
        return params, {
            "calls": jnp.zeros((), jnp.int32),
            "carry": {"seen": jnp.zeros(x.shape, x.dtype)},
        }

    def apply(params, state, batch, key, train):
        x = batch["inputs"].reshape(len(batch["inputs"]), -1)
        seen = jax.lax.stop_gradient(state["carry"]["seen"]) + x
        new = {"calls": state["calls"] + step_of(batch), "carry": {"seen": seen}}
        return seen @ params["w"], new

    return Model(init, apply)


def two_towers(width=6):
    """Two embeddings of an image, one of them of a noisy copy: noise by the microbatch's key, a
    running mean.
    """

    def init(key, batch):
        one, two = jax.random.split(key)
        size = np.prod(batch["inputs"].shape[1:])

        def draw(key):
            return jax.random.normal(key, (size, width)) / size**0.5

        return {"first": draw(one), "second": draw(two)}, {"mean": jnp.zeros(())}

    def apply(params, state, batch, key, train):
        x = batch["inputs"].reshape(len(batch["inputs"]), -1)
        noisy = x + 0.1 * jax.random.normal(key, x.shape, x.dtype) * train
        mask = batch["mask"].astype(x.dtype)
        seen = jnp.sum(mask * x.mean(-1)) / jnp.sum(mask)
        return (x @ params["first"], jnp.tanh(noisy @ params["second"])), {
            "mean": 0.9 * state["mean"] + 0.1 * seen
        }

    return Model(init, apply)


def of_all_kinds():
    """A linear model with a running mean, a count, and what each place has seen."""

    def init(key, batch):
        x = batch["inputs"].reshape(len(batch["inputs"]), -1)
        params = {"w": 0.1 * jax.random.normal(key, (x.shape[1], CLASSES)), "b": jnp.zeros(CLASSES)}
        state = {"mean": jnp.zeros(x.shape[1]), "calls": jnp.zeros((), jnp.int32)}
        return params, {**state, "carry": {"seen": jnp.zeros(x.shape)}}

    def apply(params, state, batch, key, train):
        x = batch["inputs"].reshape(len(batch["inputs"]), -1)
        wide = x.astype(jnp.float32)
        mean = 0.9 * state["mean"] + 0.1 * wide.mean(0)
        new = {
            "mean": mean,
            "calls": state["calls"] + 1,
            "carry": {"seen": state["carry"]["seen"] + wide},
        }
        return x @ params["w"] + params["b"], new

    return Model(init, apply)


def tracking():
    """A linear model that tracks squares of all sizes, extremes (of the last element nothing is
    seen) and a phase.
    """

    def init(key, batch):
        state = {
            "squares": jnp.zeros(len(SIZES)),
            "least": jnp.full(4, jnp.inf),
            "most": jnp.full(4, -jnp.inf),
        }
        state |= {"phase": jnp.zeros(2, jnp.complex64), "calls": jnp.int32(0)}
        return {"w": jnp.zeros((len(SIZES), CLASSES))}, state

    def apply(params, state, batch, key, train):
        x, mask = batch["inputs"].reshape(len(batch["mask"]), -1), batch["mask"][:, None]
        seen, share = mask & (jnp.arange(4) < 3), mask / mask.sum()
        wave = jax.lax.complex(jnp.cos(x[:, :2]), 1e-6 * jnp.sin(x[:, :2]))
        new = {
            "squares": jnp.sum(share * x * x, 0) * jnp.asarray(SIZES, jnp.float32),
            "least": jnp.minimum(state["least"], jnp.min(x[:, :4], 0, where=seen, initial=jnp.inf)),
            "most": jnp.maximum(state["most"], jnp.max(x[:, :4], 0, where=seen, initial=-jnp.inf)),
            "phase": jnp.sum(share * wave, 0),
            "calls": state["calls"] + 1,
        }
        return x @ params["w"], new if train else state

    return Model(init, apply)


MODELS = {
    "mlp": lambda: as_model(lambda rngs: MLP(SHAPE, CLASSES, (8,), rngs=rngs)),
    "resnet": lambda: as_model(ResNet),
    "dropout": dropout_model,
    "blocks": lambda **args: as_model(lambda rngs: Stacked(rngs, **args)),
}


def data(size=53, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=size).astype(np.int32)
    inputs = rng.normal(size=(size, *SHAPE)) + labels[:, None, None, None] * 0.5
    return {"inputs": inputs.astype(dtype), "labels": labels}


def uniform(dtype):
    """The policy of one dtype."""
    return Policy(jnp.dtype(dtype), jnp.dtype(dtype), jnp.dtype(dtype))


OPTIMIZERS = {  # (transformation, clip_norm)
    "adamw": (lambda: optax.adamw(1e-2, weight_decay=0.1), 0.5),
    "momentum": (lambda: optax.sgd(0.05, 0.9), None),
    "lion": (lambda: optax.lion(1e-3, weight_decay=0.1), 0.5),
    "lamb": (lambda: optax.lamb(1e-2, weight_decay=0.1), 0.5),
    "adafactor": (
        lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8, weight_decay_rate=1e-3),
        0.5,
    ),
    "muon": (lambda: TABLE["muon"](1e-2, weight_decay=0.1, blocks=STACK), 0.5),
}


def build(
    model,
    examples,
    *,
    backend="pmap",
    devices=1,
    microbatches=8,
    accumulate="vmap",
    reduction="xla",
    optimizer="adamw",
    batch_size=20,
    dtype="float32",
    loss=None,
    bucket_mb=0.001,
    layout=None,
    policy=None,
    reduce_dtype=None,
    frozen=(),
    ema=None,
    scaling=None,
    spike=None,
    sequential=False,
    group=1,
    **options,
):
    """(strategy, step, i -> the batch of update i on its devices); layout: more arguments of the
    strategy; options: of `Forward`, `UpdateRule` and `make_step`; optimizer: a name, or
    (transformation, clip_norm)."""
    tx, clip = (
        optimizer
        if isinstance(optimizer, tuple)
        else (OPTIMIZERS[optimizer][0](), OPTIMIZERS[optimizer][1])
    )
    policy = policy or uniform(dtype)
    more = {name: options.pop(name) for name in Forward._fields if name in options}
    forward = Forward(model, loss or SoftmaxCrossEntropy(), policy, loss_scaling=scaling, **more)
    more = {name: options.pop(name) for name in UpdateRule._fields if name in options}
    rule = UpdateRule(tx, clip, frozen, ema, spike=spike, **more)
    step = make_step(forward, rule, accumulate, **options)
    dataset = Arrays(**examples)
    if sequential:
        cursor = Streams(len(dataset), batch_size, microbatches)
    else:
        cursor = EpochOrder(len(dataset), batch_size, microbatches, 0, shuffle=False)
    places = cursor.examples_per_microbatch
    example = {"mask": np.ones(places, bool), **{k: v[:places] for k, v in examples.items()}}

    def first(seed):
        return init_state(forward._replace(seed=seed), rule, microbatches, example)

    make, parts = first, SimpleNamespace(rule=rule)
    for extra in extras_of(Config(parallel=Parallel(reduction=reduction))):
        make = extra.initial_state(make, parts)
    strategy = STRATEGIES[backend](
        Partial(make, np.uint32(forward.seed)),
        microbatches,
        make_reduction(reduction, bucket_mb, group),
        reduce_dtype,
        jax.devices()[:devices],
        Sharding(blocks=model.blocks, **(layout or {})),
    )
    return (
        strategy,
        step,
        lambda i: strategy.shard_batch(
            read_batches(dataset, cursor, [i], strategy.local_microbatches)
        ),
    )


def alone(f, numbers):
    """(state, batch) -> sums of `Step.grads` or `Step.evaluate`, on one device without a strategy."""
    return lambda state, batch: f(state, batch, Replica(jnp.asarray(numbers)))


def train(model, examples, *, steps=10, **settings):
    """(initial state, final exported state, metrics of each update, strategy, program); settings:
    as `build`.
    """
    strategy, step, batch = build(model, examples, **settings)
    state = strategy.init()
    first = jax.tree.map(np.array, strategy.export(state))
    program, metrics = strategy.compile(step), []
    for i in range(steps):
        state, m = program.update(state, batch(i))
        metrics.append(jax.device_get(m))
    return first, jax.tree.map(np.array, strategy.export(state)), metrics, strategy, program


def relative_error(a, b):
    """(largest relative L2 error of a leaf, its path)"""
    worst = (0.0, "")
    paths = jax.tree_util.tree_leaves_with_path(a)
    assert paths and jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(paths, jax.tree.leaves(b)):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        error = np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)
        worst = max(
            worst, (float(error) if np.isfinite(error) else np.inf, jax.tree_util.keystr(path))
        )
    return worst
