"""Configs that depend on their surroundings (devices, ranks, variables of launchers,
chance), and others that only look so, for `jaxdp verify`. As a command: verify cases with the
devices of this process, and print JSON lines."""

import collections
import datetime
import functools
import json
import os
import pathlib
import random
import sys
import tempfile
import threading
import time
import uuid

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

import jaxdp
import verify_cases
from jaxdp.data.example_order import EpochOrder
from jaxdp.models.base import Model
from verify_cases import CLASSES, GOOD, WIDTH, Data, each, init, named, pair

CONFIG = """
model: {target: verify_cases.pair}
data: {target: verify_cases.Data}
steps: 1000
batch_size: 8
microbatches: 4
optimizer: {target: adam, lr: 1.0e-2}
verify: {strategies: 1}
"""


def variable(name):
    return lambda: int(os.environ.get(name, "0"))


class Held:
    """Something that has a number of devices."""

    table = {"devices": jax.device_count}

    @staticmethod
    def count():
        return jax.device_count()

    @property
    def asked(self):
        return jax.device_count()

    def __call__(self):
        return len(jax.devices())


def by_default():
    def count(n=jax.device_count()):  # noqa: B008
        return n

    return count()


def by_closure():
    n = jax.device_count()
    return (lambda: n)()


NUMBERS = {  # what may depend on the surroundings -> a number
    "device_count": jax.device_count,
    "default argument": by_default,
    "partial of a count": lambda: functools.partial(jax.device_count, "cpu")(),
    "dict": lambda: Held.table["devices"](),
    "static method": Held.count,
    "property": lambda: Held().asked,
    "callable object": Held(),
    "closure": by_closure,
    "get_backend": lambda: jax.extend.backend.get_backend().device_count(),
    "last device": lambda: jax.devices()[-1].id,
    "XLA_FLAGS": lambda: int(os.environ["XLA_FLAGS"].rpartition("device_count=")[2].split()[0]),
    "process_index": jax.process_index,
    "rank of jaxdp": lambda: jaxdp.current().rank,
    **{
        name: variable(name)
        for name in (
            "LOCAL_RANK",
            "SLURM_LOCALID",
            "SLURM_PROCID",
            "SLURM_NTASKS",
            "PMIX_RANK",
            "PMI_RANK",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "MPI_LOCALRANKID",
            "WORLD_SIZE",
            "JAXDP_LOCAL_RANK",
            "GROUP_RANK",
        )
    },
    "time zone": lambda: (
        datetime.datetime.now().astimezone().utcoffset().total_seconds() // 3600 + 24
    ),
    "host": lambda: sum(os.environ.get("HOSTNAME", "").encode()),
    "process": os.getpid,
    "hash": lambda: hash("a name") % 1009,
    "random": lambda: random.randrange(1009),
    "NumPy's random": lambda: int(np.random.randint(1009)),  # noqa: NPY002
    "urandom": lambda: int.from_bytes(os.urandom(2), "big"),
    "uuid": lambda: uuid.uuid4().int % 1009,
}


def number(of):
    """Another float for each number, near 1."""
    return 1.0 + (float(NUMBERS[of]()) * 0.6180339887 % 1.0)


def model(of):
    """Its hidden layer is multiplied by a number."""

    def apply(params, state, batch, key, train):
        x = jnp.tanh(verify_cases.dense(params["hidden"], batch["inputs"])) * number(of)
        return verify_cases.dense(params["head"], x), state

    return Model(init, apply)


def initial(of):
    """Its initial values are multiplied by a number."""
    return Model(
        lambda key, batch: (jax.tree.map(lambda x: x * number(of), init(key, batch)[0]), {}),
        pair().apply,
    )


def evaluated(of):
    """Its evaluation alone depends on a number."""

    def apply(params, state, batch, key, train):
        outputs, state = pair().apply(params, state, batch, key, train)
        return outputs if train else outputs * number(of), state

    return Model(init, apply)


def late(learning_rate, of, update=50):
    """Wrong from an update on."""
    wrong = number(of)
    return optax.sgd(lambda step: learning_rate(step) * jnp.where(step < update, 1.0, wrong))


def decayed(learning_rate, of):
    return optax.adamw(learning_rate, weight_decay=0.01 * number(of))


def boundary(lr, steps, of):
    """A schedule whose boundary depends on a number."""
    at = int(steps * number(of) / 2.5)
    return lambda step: jnp.where(step < at, lr, lr / 10)


def last(lr, steps, of):
    """A schedule whose last rate alone depends on a number."""
    end = lr * number(of)
    return lambda step: jnp.where(step < steps - 1, lr, end)


class Rows(Data):
    """Examples, their number or their order depend on a number."""

    def __init__(self, of, what, **more):
        super().__init__(**more)
        self.of, self.what = of, what

    def __len__(self):
        return 18 + int(number(self.of) * 9973) % 7 if self.what == "length" else 24

    def __getitem__(self, i):
        row = super().__getitem__(i)
        return (
            {**row, "inputs": row["inputs"] * np.float32(number(self.of))}
            if self.what == "rows"
            else row
        )


class Ordered(Data):
    def __init__(self, of=None):
        super().__init__()
        self.of = of

    def read(self, indices):
        return {"inputs": self.inputs[indices], "labels": self.labels[indices]}

    def example_order(self, batch_size, microbatches, seed):
        return EpochOrder(
            24, batch_size, microbatches, seed + int(number(self.of) * 1e6) if self.of else seed
        )


def transform(of):
    return lambda batch, key, train: {**batch, "inputs": batch["inputs"] * number(of)}


class Moved:
    def __init__(self, of):
        self.of = of

    def __call__(self, batch, key, train):
        return transform(self.of)(batch, key, train)


class Scaled:
    """A loss."""

    def __init__(self, of):
        self.of = of

    def __call__(self, outputs, batch):
        return jnp.sum(each(outputs, batch)) * number(self.of), jnp.sum(batch["mask"]), {}


def of(section, name, number, **args):
    return named(section, f"elsewhere_cases.{name}", of=number, **args)


def schedule(name, number):
    return ["--optimizer.schedule", f"{{target: elsewhere_cases.{name}, args: {{of: {number!r}}}}}"]


FAULTS = {
    **{f"model, {k}": of("model", "model", k) for k in NUMBERS},
    "initial values, SLURM_LOCALID": of("model", "initial", "SLURM_LOCALID"),
    "evaluation, PMI_RANK": [*of("model", "evaluated", "PMI_RANK"), *verify_cases.EVALUATED],
    "optimizer from update 50, device_count": of("optimizer", "late", "device_count"),
    "optimizer from update 50, LOCAL_RANK": of("optimizer", "late", "LOCAL_RANK"),
    "optimizer from update 990, RANK": of("optimizer", "late", "PMIX_RANK", update=990),
    "weight decay, SLURM_NTASKS": of("optimizer", "decayed", "SLURM_NTASKS"),
    "boundary, device_count": schedule("boundary", "device_count"),
    "boundary, WORLD_SIZE": schedule("boundary", "WORLD_SIZE"),
    "last rate, PMIX_RANK": schedule("last", "PMIX_RANK"),
    "length, device_count": of("data", "Rows", "device_count", what="length"),
    "length, WORLD_SIZE": of("data", "Rows", "WORLD_SIZE", what="length"),
    "order, device_count": of("data", "Ordered", "device_count"),
    "order, GROUP_RANK": of("data", "Ordered", "GROUP_RANK"),
    "rows, MPI_LOCALRANKID": of("data", "Rows", "MPI_LOCALRANKID", what="rows"),
    "rows, time zone": of("data", "Rows", "time zone", what="rows"),
    "evaluation rows, hash": of("eval.data", "Rows", "hash", what="rows"),
    "evaluation length, last device": of("eval.data", "Rows", "last device", what="length"),
    "transform, SLURM_PROCID": of("data.transform", "Moved", "SLURM_PROCID"),
    "loss, GROUP_RANK": of("loss", "Scaled", "GROUP_RANK"),
}


class Cached(Data):
    """Examples in a file of a temporary folder."""

    def __init__(self, shared):
        super().__init__()
        folder = (
            pathlib.Path(tempfile.gettempdir(), "elsewhere_cases") if shared else tempfile.mkdtemp()
        )
        file = pathlib.Path(folder) / "inputs.npy"
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            np.save(file, self.inputs)
        self.inputs = np.load(file, mmap_mode="r")


class Threaded(Data):
    """Reads with a number of threads that depends on the host."""

    def read(self, indices):
        import concurrent.futures

        with concurrent.futures.ThreadPoolExecutor(
            min(4, os.cpu_count() + jax.device_count())
        ) as pool:
            rows = list(pool.map(self.__getitem__, indices.tolist()))
        return {k: np.stack([row[k] for row in rows]) for k in rows[0]}


class Opaque:
    """Its text has its address."""

    def __init__(self, scale):
        self.scale, self.lock, self.made = scale, threading.Lock(), time.time()


@functools.partial(jax.jit, static_argnums=1)
def static(x, opaque):
    return x * opaque.scale


OPAQUE = Opaque(0.5)
LOG = collections.deque(maxlen=9)
TABLE = np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)
UNUSED = {"devices": jax.device_count, "today": datetime.date.today}


@jax.custom_jvp
def jumped(x):
    return jnp.sin(x)


jumped.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), jnp.cos(primals[0]) * tangents[0]))


def record(x):
    LOG.append((time.time(), datetime.datetime.now(), x))


def logged(x):
    jax.debug.callback(record, x.sum())
    return x


def written(x):
    io_callback(lambda n: record(n), None, jnp.asarray(float(jax.device_count())))
    return x


def scoped(x):
    with jax.named_scope(f"at_{int(time.time())}_on_{jax.device_count()}"):
        return x * 2


def on_host(method):
    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    more = {"vmap_method": method} if method else {}
    return lambda x: x * jax.pure_callback(np.cos, shape(x), jax.lax.stop_gradient(x), **more)


def ordered_names(x):
    scales = dict.fromkeys(["b", "a", "c"], 1.1)
    for name in sorted({*scales}):
        x = x * scales[name]
    return x


BETWEEN = {
    "opaque": lambda x: static(x, OPAQUE),
    "logs the date": lambda x: (print(datetime.datetime.now(), jax.device_count()), x)[1],
    "debug callback": logged,
    "io_callback": written,
    "named scope": scoped,
    "callback, sequential": on_host("sequential"),
    "callback, expand_dims": on_host("expand_dims"),
    "callback, broadcast_all": on_host("broadcast_all"),
    "callback, no method": on_host(None),
    "table of NumPy": lambda x: x * TABLE,
    "custom_jvp": jumped,
    "sorted names": ordered_names,
    "constant date": lambda x: x * (datetime.date(2020, 5, 17).toordinal() % 7),
    "same for all dates": lambda x: (
        x * (1.0 if datetime.datetime.now() > datetime.datetime(2001, 1, 1) else 0.0)
    ),
    "seeded": lambda x: x * float(np.random.default_rng(3).random() + random.Random(5).random()),
    "a label": lambda x: (f"{uuid.uuid4()} {os.getpid()} {time.time()}", x)[1],
    "checkpoint name": lambda x: checkpoint_name(x * 2, f"x{id(x)}"),
    "dates are dates": lambda x: (
        x * (1.0 if isinstance(datetime.datetime.now(), datetime.datetime) else 3.0)
    ),
}


def between(what):
    """A model with something harmless between its layers."""

    def apply(params, state, batch, key, train):
        x = BETWEEN[what](jnp.tanh(verify_cases.dense(params["hidden"], batch["inputs"])))
        return verify_cases.dense(params["head"], x), state

    return Model(init, apply)


class Listed(nn.Module):
    """Layers in a dict."""

    @nn.compact
    def __call__(self, x, mask, train: bool):
        for layer in {
            "one": nn.Dense(WIDTH),
            "norm": nn.LayerNorm(),
            "two": nn.Dense(WIDTH),
        }.values():
            x = nn.relu(layer(x))
        return nn.Dense(CLASSES)(nn.Dropout(0.1, deterministic=not train)(x))


def stepped(lr, steps):
    return optax.piecewise_constant_schedule(lr, {steps // 2: 0.1, steps - 2: 0.1})


INNOCENT = {
    **{
        k: v for k, v in GOOD.items() if k not in ("float32 inside", "attention", "bfloat16 inside")
    },
    **{
        f"model, {k}": named("model", "elsewhere_cases.between", what=k)
        for k in BETWEEN
        if "no method" not in k
    },
    "callback without a method, scan": [
        *named("model", "elsewhere_cases.between", what="callback, no method"),
        "--parallel.accumulate",
        "scan",
    ],
    "layers in a dict": named("model", "elsewhere_cases.Listed"),
    "cached": named("data", "elsewhere_cases.Cached", shared="false"),
    "cached in a shared folder": named("data", "elsewhere_cases.Cached", shared="true"),
    "threads": named("data", "elsewhere_cases.Threaded"),
    "own order": named("data", "elsewhere_cases.Ordered"),
    "steps": ["--optimizer.schedule", "elsewhere_cases.stepped"],
}


def verified(argv, devices=None, updates=1):
    """The report on a case, on this number of devices of this process."""
    from jaxdp.cli import load
    from jaxdp.verify import verify
    from jaxdp.verify.problem import make_problem

    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "config.yaml")
        file.write_text(CONFIG)
        config = load(["--config", str(file), *argv], "verify")[0]
    return verify(make_problem(config), jax.devices()[:devices], updates=updates)


if __name__ == "__main__":
    for case in sys.argv[1:] or [*FAULTS, *INNOCENT]:
        try:
            report = verified({**FAULTS, **INNOCENT}[case])
            causes, failed = report.causes, [c.text for c in report.checks if c.verdict == "FAILED"]
        except Exception as error:
            causes, failed = [f"{type(error).__name__}: {error}"], ["raised"]
        print(
            json.dumps({"case": case, "causes": causes, "failed": failed}),
            file=sys.__stdout__,
            flush=True,
        )
