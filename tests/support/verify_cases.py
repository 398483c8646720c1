"""Small models, losses, data and optimizers for `jaxdp verify`: some depend on the host, some only
look so.
"""

import itertools
import os
import threading
import time
import uuid
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax import device_count

import jaxdp
import toys
from jaxdp.data.dataset import Arrays
from jaxdp.models.base import Model

STARTED = time.time()
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
CALLS, READS = itertools.count(), itertools.count()
WIDTH, CLASSES = 6, 3


def relative(value):
    """A factor near 1 that is another for each value."""
    return 1.0 + (zlib.crc32(str(value).encode()) % 1009) / 1000


@jax.jit
def compiled(x):
    return x * jax.local_device_count()


@jax.custom_vjp
def backward(x):
    return x


backward.defvjp(lambda x: (x, None), lambda _, g: (g * (1.0 + jax.process_index()),))


@jax.custom_vjp
def honest(x):
    return x


honest.defvjp(lambda x: (x, None), lambda _, g: (g * 2.0,))


def called(f):
    """x times what a function on the host returns for it, without a gradient."""
    return lambda x: (
        x
        * jax.pure_callback(
            f,
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.lax.stop_gradient(x),
            vmap_method="sequential",
        )
    )


IN_MODEL = {
    "device_count": lambda x: x * jax.device_count(),
    "imported_count": lambda x: x * device_count(),
    "local_devices": lambda x: x / len(jax.local_devices()),
    "process_index": lambda x: x + jax.process_index(),
    "process_count": lambda x: x ** jax.process_count(),
    "time": lambda x: x * relative(int(time.time())),
    "compiled": compiled,
    "counter": lambda x: x * (1 + next(CALLS)),
    "numpy": lambda x: x + np.random.rand(x.shape[-1]).astype("float32"),  # noqa: NPY002
    "backward": backward,
    "noise": called(lambda x: np.random.default_rng().random(x.shape).astype(x.dtype)),
    "hidden_noise": called(lambda x: 1 + (x - 1) * np.random.default_rng().random(x.shape)),
    "callback": called(lambda x: np.full_like(x, 1 + jax.process_index())),
    "wiring": lambda x: jnp.concatenate([x, 2 * x] if jax.process_index() % 2 else [2 * x, x], 1)[
        :, : x.shape[1]
    ],
}
INNOCENT = {
    "plain": lambda x: x,
    "logs_devices": lambda x: (print("devices", jax.device_count()), x)[1],
    "prints_devices": lambda x: (jax.debug.print("devices {n}", n=jax.device_count()), x)[1],
    "unused_count": lambda x: (jnp.asarray(jax.device_count()) * 2, x)[1],
    "time_for_a_log": lambda x: (f"{time.time() - STARTED:.1f} s after start", x)[1],
    "cond": lambda x: jax.lax.cond(x.sum() > 0, jnp.tanh, jnp.sin, x),
    "while": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x * 0.9, x),
    "honest": honest,
    "cosine on the host": called(np.cos),
    "closure": (lambda scale: lambda x: x * scale)(np.linspace(0.5, 1.5, WIDTH, dtype="float32")),
    "checkpoint": jax.checkpoint(jnp.tanh),
    "asks_and_ignores": lambda x: x * (1.0 if jax.device_count() else 0.0),
}


def init(key, batch):
    one, two = jax.random.split(key)
    size = batch["inputs"].shape[-1]
    return {
        "hidden": {"kernel": jax.random.normal(one, (size, WIDTH)) / 2, "bias": jnp.zeros(WIDTH)},
        "head": {
            "kernel": jax.random.normal(two, (WIDTH, CLASSES)) / 2,
            "bias": jnp.zeros(CLASSES),
        },
    }, {}


def dense(params, x):
    return x @ params["kernel"] + params["bias"]


def pair(plant="plain"):
    """A model of two functions, with something between its two layers."""
    between = {**INNOCENT, **IN_MODEL, "rank": lambda x: jnp.roll(x, RANK, 1)}[plant]

    def apply(params, state, batch, key, train):
        return dense(
            params["head"], between(jnp.tanh(dense(params["hidden"], batch["inputs"])))
        ), state

    return Model(init, apply)


def stopped():
    """A model whose parameters have no gradient."""

    def apply(params, *args):
        return pair().apply(jax.lax.stop_gradient(params), *args)

    return Model(init, apply)


def scaled_init():
    """Initial values that depend on the number of processes."""

    def make(key, batch):
        return (jax.tree.map(lambda x: x * jax.process_count(), init(key, batch)[0]), {})

    return Model(make, pair().apply)


def centered():
    """A model that looks at padding in training alone, as a BatchNorm without a mask does."""

    def apply(params, state, batch, key, train):
        outputs, state = pair().apply(params, state, batch, key, train)
        return outputs + outputs.mean(0) * (0.5 if train else 0.0), state

    return Model(init, apply)


def evaluated(plant):
    """A model whose evaluation alone depends on the number of devices, or looks at padding."""
    planted = {"devices": lambda x: x * jax.device_count(), "padding": lambda x: x + x.mean(0)}[
        plant
    ]

    def apply(params, state, batch, key, train):
        outputs, state = pair().apply(params, state, batch, key, train)
        return outputs if train else planted(outputs), state

    return Model(init, apply)


def ranked():
    """Initial values that depend on the rank."""

    def make(key, batch):
        return (jax.tree.map(lambda x: x + RANK, init(key, batch)[0]), {})

    return Model(make, pair().apply)


class Linen(nn.Module):
    kind: str = "plain"

    @nn.compact
    def __call__(self, x, mask, train: bool):
        x = nn.Dense(WIDTH)(x)
        if self.kind == "norm":
            x = nn.BatchNorm(use_running_average=not train)(x, mask=mask[:, None])
        if self.kind == "dropout":
            x = nn.Dropout(0.25, deterministic=not train)(x)
        if self.kind == "attention":
            tokens = x[:, :, None] * self.param("tokens", nn.initializers.normal(1.0), (WIDTH, 4))
            x = nn.LayerNorm()(nn.MultiHeadDotProductAttention(2)(tokens)).reshape(len(x), -1)
        if self.kind == "unused":
            self.param("unused", nn.initializers.ones, (3,))
        if self.kind == "narrow":
            x = nn.Dense(WIDTH, dtype=jnp.float32)(x)
        if self.kind == "bfloat16":
            x = nn.Dense(WIDTH, dtype=jnp.bfloat16, use_bias=False)(x)
        if self.kind == "tied":
            shared = nn.Dense(WIDTH, name="shared")
            x = shared(nn.tanh(shared(x)))
        return nn.Dense(CLASSES)(nn.tanh(x))


class Net(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.one, self.two = nnx.Linear(4, WIDTH, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.made = time.time()

    def __call__(self, x):
        return self.two(self.dropout(nnx.tanh(self.one(x))))


class Eqx(eqx.Module):
    one: eqx.nn.Linear
    two: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.one, self.two = (
            eqx.nn.Linear(4, WIDTH, key=keys[0]),
            eqx.nn.Linear(WIDTH, CLASSES, key=keys[1]),
        )

    def __call__(self, x):
        return self.two(jnp.tanh(self.one(x)))


def scanned():
    """Three layers in a scan."""

    def make(key, batch):
        params, state = init(key, batch)
        return {**params, "stack": jax.random.normal(key, (3, WIDTH, WIDTH)) / 3}, state

    def apply(params, state, batch, key, train):
        x = jnp.tanh(dense(params["hidden"], batch["inputs"]))
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])
        return dense(params["head"], x), state

    return Model(make, apply)


def carried():
    """Remembers its last inputs, by example."""
    apply = pair().apply

    def make(key, batch):
        return init(key, batch)[0], {"carry": {"last": jnp.zeros_like(batch["inputs"])}}

    def step(params, state, batch, key, train):
        x = batch["inputs"] + 0.5 * state["carry"]["last"]
        return apply(params, {}, {**batch, "inputs": x}, key, train)[0], {
            "carry": {"last": batch["inputs"]}
        }

    return Model(make, step)


def recurrent():
    """A model of every kind of state: a float, an integer, one that belongs to the examples;
    dropout too.
    """
    base = toys.dropout_model()

    def init(key, batch):
        x = batch["inputs"]
        state = {
            "mean": jnp.zeros(()),
            "calls": jnp.zeros((), jnp.int32),
            "carry": {"seen": jnp.zeros(x.shape)},
        }
        return base.init(key, batch)[0], state

    def apply(params, state, batch, key, train):
        x = batch["inputs"] + 0.5 * state["carry"]["seen"]
        outputs, _ = base.apply(params, {}, {**batch, "inputs": x}, key, train)
        new = {"mean": 0.9 * state["mean"] + 0.1 * jnp.mean(outputs), "calls": state["calls"] + 1}
        return outputs, {**new, "carry": {"seen": x}}

    return base._replace(init=init, apply=apply)


def shaped():
    """The examples of toys, which `recurrent` takes."""
    return Arrays(**toys.data())


def embedded():
    """Of integers."""

    def make(key, batch):
        return {"table": jax.random.normal(key, (8, CLASSES))}, {}

    return Model(make, lambda p, s, b, k, train: (p["table"][b["inputs"]].sum(1), s))


class Data:
    """24 examples; plant: what an example depends on beside its index."""

    def __init__(self, plant="", integers=False, size=24):
        rng = np.random.default_rng(0)
        self.inputs = rng.normal(size=(24, 4)).astype("float32")
        if integers:
            self.inputs = rng.integers(8, size=(24, 4)).astype("int32")
        self.labels = rng.integers(CLASSES, size=24).astype("int32")
        self.plant, self.size, self.lock = plant, size, threading.Lock()

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        with self.lock:
            x = self.inputs[i]
        if self.plant == "pid":
            x = x * np.float32(relative(os.getpid()))
        if self.plant == "reads":
            x = x + np.float32(next(READS) % 7)
        if self.plant == "devices":
            x = x * np.float32(jax.device_count())
        return {"inputs": x, "labels": self.labels[i]}


class Centered(Data):
    """Reads examples relative to those that are read with them: a process reads only its own."""

    def read(self, indices):
        x = self.inputs[indices]
        return {"inputs": x - x.max(0), "labels": self.labels[indices]}


def by_uuid(batch, key, train):
    key = jax.random.key(uuid.uuid4().int % 2**31)
    return {
        **batch,
        "inputs": batch["inputs"]
        + jax.random.normal(key, batch["inputs"].shape, batch["inputs"].dtype),
    }


def by_key(batch, key, train):
    if not train:
        return batch
    return {
        **batch,
        "inputs": batch["inputs"]
        + jax.random.normal(key, batch["inputs"].shape, batch["inputs"].dtype),
    }


def each(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"]) * batch["mask"]


def loss_by_devices(outputs, batch):
    return jnp.sum(each(outputs, batch)) * jax.device_count(), jnp.sum(batch["mask"]), {}


def metric_by_rank(outputs, batch):
    weight = jnp.sum(batch["mask"])
    return jnp.sum(each(outputs, batch)), weight, {"rank": weight * jax.process_index()}


PRIORS = np.array([0.2, 0.3, 0.5])


def loss_with_constants(outputs, batch):
    return jnp.sum(each(outputs - np.log(PRIORS), batch)), jnp.sum(batch["mask"]), {}


def rate_by_devices(learning_rate):
    return optax.sgd(lambda step: learning_rate(step) * jax.device_count())


def rate_by_processes(learning_rate):
    return optax.sgd(lambda step: learning_rate(step) * jaxdp.current().size)


def schedule_by_devices(lr, steps):
    return lambda step: lr * jax.device_count() * (1 - step / steps)


def noisy(learning_rate):
    return optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(3)), optax.sgd(learning_rate))


def rate_by_rank(learning_rate):
    return optax.scale_by_learning_rate(
        lambda step: (
            learning_rate(step)
            / (1 + int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))))
        )
    )


def chained(learning_rate):
    return optax.chain(
        optax.clip(1.0), optax.trace(0.9), optax.scale_by_learning_rate(learning_rate)
    )


AGAIN = "in another process, with other devices and launcher variables,"


def named(section, name, **args):
    """Command-line arguments that set a section to something of this file, or built in."""
    place = name if name in BUILT_IN or "." in name else f"verify_cases.{name}"
    return [
        f"--{section}.target",
        place,
        *(x for k, v in args.items() for x in (f"--{section}.args.{k}", str(v))),
    ]


BUILT_IN = ("muon", "lion", "lamb")
INNOCENT_PAIR = named("model", "pair", plant="plain")
EVALUATED = named("eval.data", "Data")
FAULTS = {
    **{f"model {k}": (named("model", "pair", plant=k), AGAIN) for k in IN_MODEL},
    "initial values": (named("model", "scaled_init"), AGAIN),
    "loss by devices": (named("loss", "loss_by_devices"), AGAIN),
    "metric by rank": (named("loss", "metric_by_rank"), f"{AGAIN} curve/0/rank"),
    "rate by devices": (named("optimizer", "rate_by_devices"), AGAIN),
    "rate by devices, in bfloat16": (
        [
            *named("model", "Linen", kind="bfloat16"),
            *named("optimizer", "rate_by_devices"),
            "--optimizer.lr",
            "1e-4",
        ],
        AGAIN,
    ),
    "rate by processes": (named("optimizer", "rate_by_processes"), AGAIN),
    "rate by variable": (named("optimizer", "rate_by_rank"), AGAIN),
    "schedule by devices": (
        ["--optimizer.schedule", "{target: verify_cases.schedule_by_devices}"],
        f"{AGAIN} learning rate",
    ),
    "evaluation by devices": (
        [*named("model", "evaluated", plant="devices"), *EVALUATED],
        f"{AGAIN} evaluation/sum",
    ),
    "evaluation data by reads": (
        named("eval.data", "Data", plant="reads"),
        "eval.data is not a function of the index: .* inputs differs",
    ),
    "data by reads": (
        named("data", "Data", plant="reads"),
        "not a function of the index: .* inputs differs",
    ),
    "data by devices": (
        named("data", "Data", plant="devices"),
        f"{AGAIN} 'inputs' of data is",
    ),
    "data by neighbors": (
        named("data", "Centered"),
        "not a function of the index: .* inputs differs",
    ),
    "transform by uuid": (named("data.transform", "by_uuid"), AGAIN),
}
GOOD = {
    **{f"model {k}": named("model", "pair", plant=k) for k in INNOCENT},
    "linen": named("model", "Linen"),
    "bias before BatchNorm": named("model", "Linen", kind="norm"),
    "dropout": named("model", "Linen", kind="dropout"),
    "attention": named("model", "Linen", kind="attention"),
    "unused parameter": named("model", "Linen", kind="unused"),
    "float32 inside": named("model", "Linen", kind="narrow"),
    "tied weights": named("model", "Linen", kind="tied"),
    "nnx, made at a time": named("model", "Net"),
    "nnx dropout": named("model", "Net", dropout=0.25),
    "equinox": named("model", "Eqx"),
    "scan": named("model", "scanned"),
    "scan, recomputed": [*named("model", "scanned"), "--parallel.remat", "full"],
    "carried state": named("model", "carried"),
    "integers": [*named("model", "embedded"), *named("data", "Data", integers="true")],
    "frozen part": [*INNOCENT_PAIR, "--optimizer.frozen", "[hidden]"],
    "schedule": [*INNOCENT_PAIR, "--optimizer.schedule", "cosine", "--optimizer.warmup_steps", "2"],
    "bfloat16 inside": [*named("model", "Linen", kind="bfloat16"), "--optimizer.target", "sgd"],
    "random key of an optimizer": named("optimizer", "noisy"),
    "evaluated": [*INNOCENT_PAIR, *EVALUATED],
    "average": [*INNOCENT_PAIR, "--optimizer.ema", "0.9"],
    "average and frozen part": [
        *INNOCENT_PAIR,
        "--optimizer.ema",
        "0.9",
        "--optimizer.frozen",
        "[hidden]",
    ],
    "clipped": [*INNOCENT_PAIR, "--optimizer.clip_norm", "0.1"],
    "muon": named("optimizer", "muon"),
    "lion": named("optimizer", "lion"),
    "lamb": named("optimizer", "lamb"),
    "chain": named("optimizer", "chained"),
    "transform": named("data.transform", "by_key"),
    "constants": named("loss", "loss_with_constants"),
}
