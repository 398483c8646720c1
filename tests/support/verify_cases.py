"""Small models, losses, data and optimizers for `jaxdp verify`: some depend on the host, some only look so."""

import datetime
import functools
import itertools
import os
import pathlib
import socket
import threading
import time
import uuid
import zlib
from os import getpid

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
from jaxdp.data.base import Arrays
from jaxdp.models.base import Model

DEVICES, STARTED = jax.device_count(), time.time()
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
CALLS, READS = itertools.count(), itertools.count()
WIDTH, CLASSES = 6, 3


def relative(value):
    """A factor near 1 that is another for each value."""
    return 1.0 + (zlib.crc32(str(value).encode()) % 1009) / 1000


@functools.lru_cache
def devices_once():
    return jax.device_count()


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
            f, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x), vmap_method="sequential"
        )
    )


IN_MODEL = {
    "device_count": lambda x: x * jax.device_count(),
    "local_devices": lambda x: x / len(jax.local_devices()),
    "process_index": lambda x: x + jax.process_index(),
    "process_count": lambda x: x ** jax.process_count(),
    "environment": lambda x: x * (1 + int(os.environ.get("SLURM_PROCID", "0"))),
    "pid": lambda x: x * relative(getpid()),
    "host_name": lambda x: x * relative(socket.gethostname()),
    "time": lambda x: x * relative(int(time.time())),
    "date": lambda x: x * relative(datetime.datetime.now().isoformat()),
    "devices_at_import": lambda x: x * DEVICES,
    "rank_at_import": lambda x: jnp.roll(x, RANK, 1),
    "key_of_startup": lambda x: x + jax.random.normal(jax.random.key(int(STARTED)), x.shape[1:], x.dtype),
    "imported_name": lambda x: x / device_count(),
    "cached": lambda x: x * devices_once(),
    "compiled": compiled,
    "context": lambda x: x * (1 + jaxdp.init().rank),
    "counter": lambda x: x * (1 + next(CALLS)),
    "numpy": lambda x: x + np.random.rand(x.shape[-1]).astype("float32"),  # noqa: NPY002
    "file": lambda x: x * (2.0 if pathlib.Path(f"/proc/{os.getpid()}/stat").exists() else 1.0),
    "backward": backward,
    "noise": called(lambda x: np.random.default_rng().random(x.shape).astype(x.dtype)),
    "hidden_noise": called(lambda x: 1 + (x - 1) * np.random.default_rng().random(x.shape)),
    "callback": called(lambda x: np.full_like(x, 1 + jax.process_index())),
    "hash": lambda x: x * relative(hash("layer")),
    "axis": lambda x: x * (1 + jax.process_index()) + 0 * jax.lax.axis_index("data"),
    "hardware address": lambda x: x * relative(uuid.getnode()),
    "chosen": lambda x: x if jax.device_count() > 4 else jnp.tanh(x),
    "wiring": lambda x: jnp.concatenate([x, 2 * x] if jax.process_index() % 2 else [2 * x, x], 1)[:, : x.shape[1]],
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
        "head": {"kernel": jax.random.normal(two, (WIDTH, CLASSES)) / 2, "bias": jnp.zeros(CLASSES)},
    }, {}


def dense(params, x):
    return x @ params["kernel"] + params["bias"]


def pair(plant="plain"):
    """A model of two functions, with something between its two layers."""
    between = {**INNOCENT, **IN_MODEL}[plant]

    def apply(params, state, batch, key, train):
        return dense(params["head"], between(jnp.tanh(dense(params["hidden"], batch["inputs"])))), state

    return Model(init, apply)


def scaled_init():
    """Initial values that depend on the number of processes."""
    make = lambda key, batch: (jax.tree.map(lambda x: x * jax.process_count(), init(key, batch)[0]), {})
    return Model(make, pair().apply)


def ranked():
    """Initial values that depend on the rank."""
    make = lambda key, batch: (jax.tree.map(lambda x: x + RANK, init(key, batch)[0]), {})
    return Model(make, pair().apply)


def evaluated():
    """Another model in evaluation, by the rank."""
    apply = pair().apply
    scale = lambda train: 1 if train else 1 + jax.process_index()
    return Model(init, lambda p, s, b, k, train: (apply(p, s, b, k, train)[0] * scale(train), s))


def constructed():
    """A model with a constant of the time at which it was constructed."""
    scale, apply = relative(int(time.time())), pair().apply
    return Model(init, lambda p, s, b, k, train: (apply(p, s, b, k, train)[0] * scale, s))


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


class Scaled(Net):
    """Keeps the number of devices that there were when it was constructed."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.devices = jax.device_count()

    def __call__(self, x):
        return super().__call__(x) / self.devices


class Eqx(eqx.Module):
    one: eqx.nn.Linear
    two: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.one, self.two = eqx.nn.Linear(4, WIDTH, key=keys[0]), eqx.nn.Linear(WIDTH, CLASSES, key=keys[1])

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
        return apply(params, {}, {**batch, "inputs": x}, key, train)[0], {"carry": {"last": batch["inputs"]}}

    return Model(make, step)


def recurrent():
    """A model of every kind of state: a float, an integer, one that belongs to the examples; dropout too."""
    base = toys.dropout_model()

    def init(key, batch):
        x = batch["inputs"]
        state = {"mean": jnp.zeros(()), "calls": jnp.zeros((), jnp.int32), "carry": {"seen": jnp.zeros(x.shape)}}
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

    def __init__(self, plant="", integers=False):
        rng = np.random.default_rng(0)
        self.inputs = rng.normal(size=(24, 4)).astype("float32")
        if integers:
            self.inputs = rng.integers(8, size=(24, 4)).astype("int32")
        self.labels = rng.integers(CLASSES, size=24).astype("int32")
        self.plant, self.lock = plant, threading.Lock()
        if plant == "shard":
            self.inputs = np.roll(self.inputs, int(os.environ.get("PMI_RANK", "0")), 0)

    def __len__(self):
        return 24

    def __getitem__(self, i):
        with self.lock:
            x = self.inputs[i]
        if self.plant == "pid":
            x = x * np.float32(relative(os.getpid()))
        if self.plant == "reads":
            x = x + np.float32(next(READS) % 7)
        if self.plant == "host":
            x = x + np.float32(len(os.uname().nodename) + relative(os.uname().nodename))
        return {"inputs": x, "labels": self.labels[i]}


def by_local_rank(batch, key, train):
    return {**batch, "inputs": batch["inputs"] + int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))}


def by_devices_in_evaluation(batch, key, train):
    return batch if train else {**batch, "inputs": batch["inputs"] * jax.device_count()}


def by_uuid(batch, key, train):
    key = jax.random.key(uuid.uuid4().int % 2**31)
    return {**batch, "inputs": batch["inputs"] + jax.random.normal(key, batch["inputs"].shape, batch["inputs"].dtype)}


def by_key(batch, key, train):
    if not train:
        return batch
    return {**batch, "inputs": batch["inputs"] + jax.random.normal(key, batch["inputs"].shape, batch["inputs"].dtype)}


def each(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"]) * batch["mask"]


def loss_by_devices(outputs, batch):
    return jnp.sum(each(outputs, batch)) * jax.device_count(), jnp.sum(batch["mask"]), {}


def loss_by_monotonic(outputs, batch):
    return jnp.sum(each(outputs, batch)) * relative(int(time.monotonic())), jnp.sum(batch["mask"]), {}


def metric_by_rank(outputs, batch):
    weight = jnp.sum(batch["mask"])
    return jnp.sum(each(outputs, batch)), weight, {"rank": weight * jax.process_index()}


def loss_derived(outputs, batch):
    return jnp.sum(each(outputs, batch)), jnp.sum(batch["mask"]), {}


loss_derived.derive = lambda means: {"total": means["loss"] * jax.device_count()}
PRIORS = np.array([0.2, 0.3, 0.5])


def loss_with_constants(outputs, batch):
    return jnp.sum(each(outputs - np.log(PRIORS), batch)), jnp.sum(batch["mask"]), {}


def rate_by_devices(learning_rate):
    return optax.sgd(lambda step: learning_rate(step) * jax.device_count())


def rate_by_rank(learning_rate):
    return optax.scale_by_learning_rate(
        lambda step: (
            learning_rate(step) / (1 + int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))))
        )
    )


def momentum_by_hour(learning_rate):
    return optax.sgd(learning_rate, 0.9 + 0.01 * (relative(datetime.datetime.now().isoformat()) - 1))


def chained(learning_rate):
    return optax.chain(optax.clip(1.0), optax.trace(0.9), optax.scale_by_learning_rate(learning_rate))


AGAIN = "not the same when it is traced again"
DEVICES_CAUSE = "depends on the number of devices or processes, or the rank"
VARIABLE = "depends on an environment variable"
NAME, TIME = "depends on the process id or the host's name", "depends on the time"
MODEL_CAUSES = {
    **dict.fromkeys(["environment", "rank_at_import"], VARIABLE),
    **dict.fromkeys(["pid", "host_name", "file", "hardware address"], NAME),
    "hash": "depends on the hash of a text",
    **dict.fromkeys(["time", "date", "key_of_startup"], f"{TIME}|{AGAIN}"),
    **dict.fromkeys(["counter", "numpy", "noise"], AGAIN),
    "hidden_noise": "one microbatch computed twice gives another",
}


def named(section, name, **args):
    """Command-line arguments that set a section to something of this file, or built in."""
    place = name if name in BUILT_IN else f"verify_cases.{name}"
    return [f"--{section}.target", place, *(x for k, v in args.items() for x in (f"--{section}.args.{k}", str(v)))]


BUILT_IN = ("muon", "lion", "lamb")
INNOCENT_PAIR = named("model", "pair", plant="plain")
FAULTS = {
    **{f"model {k}": (named("model", "pair", plant=k), MODEL_CAUSES.get(k, DEVICES_CAUSE)) for k in IN_MODEL},
    "initial values": (named("model", "scaled_init"), f"the model's init {DEVICES_CAUSE}"),
    "evaluation": (named("model", "evaluated"), f"the evaluation {DEVICES_CAUSE}"),
    "constructor": (named("model", "constructed"), f"{TIME}|{AGAIN}"),
    "attribute": (named("model", "Scaled"), DEVICES_CAUSE),
    "loss by devices": (named("loss", "loss_by_devices"), f"the model or the loss {DEVICES_CAUSE}"),
    "loss by time": (named("loss", "loss_by_monotonic"), f"the model or the loss ({TIME}|is {AGAIN})"),
    "metric by rank": (named("loss", "metric_by_rank"), f"the model or the loss {DEVICES_CAUSE}"),
    "derived by devices": (named("loss", "loss_derived"), f"what the loss derives {DEVICES_CAUSE}"),
    "rate by devices": (named("optimizer", "rate_by_devices"), f"the optimizer {DEVICES_CAUSE}"),
    "schedule by rank": (named("optimizer", "rate_by_rank"), f"the optimizer {VARIABLE}"),
    "momentum by time": (named("optimizer", "momentum_by_hour"), f"the optimizer ({TIME}|is {AGAIN})"),
    "data by process": (named("data", "Data", plant="pid"), f"the data {NAME}"),
    "data by host": (named("data", "Data", plant="host"), f"the data {NAME}"),
    "data by rank": (named("data", "Data", plant="shard"), f"the data {VARIABLE}"),
    "data by reads": (named("data", "Data", plant="reads"), "not a function of the index: 'inputs'"),
    "transform by rank": (named("data.transform", "by_local_rank"), f"the data's transform {VARIABLE}"),
    "transform of evaluation": (
        named("data.transform", "by_devices_in_evaluation"),
        f"the evaluation {DEVICES_CAUSE}",
    ),
    "transform by uuid": (named("data.transform", "by_uuid"), f"the data's transform is {AGAIN}"),
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
    "average": [*INNOCENT_PAIR, "--optimizer.ema", "0.9"],
    "clipped": [*INNOCENT_PAIR, "--optimizer.clip_norm", "0.1"],
    "muon": named("optimizer", "muon"),
    "lion": named("optimizer", "lion"),
    "lamb": named("optimizer", "lamb"),
    "chain": named("optimizer", "chained"),
    "transform": named("data.transform", "by_key"),
    "constants": named("loss", "loss_with_constants"),
}
