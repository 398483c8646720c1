"""Rows of objects of which no two may be taken for the same; as a program, print the fingerprint of each."""

import collections
import dataclasses
import enum
import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from jaxdp.fingerprint import fingerprint

SCALE, x = np.arange(5.0), np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
changed = x.copy()
changed[431, 1] += 1e-6


def helper(x, s=2.0):
    return x * SCALE[0] * s


def other(x, s=2.5):
    return x * SCALE[0] * s


def closure(scale):
    return lambda outputs, batch: helper(outputs.sum()) * scale


def reads(n):
    space = {"SCALE": n}
    exec("def f(x): return [x * SCALE for _ in range(2)]", space)
    return space["f"]


class Net(nnx.Module):
    def __init__(self, width=4, *, rngs):
        self.layer = nnx.Linear(3, width, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.layer(x))


class Tanh(Net):
    def __call__(self, x):
        return nnx.tanh(self.layer(x))


class Linen(linen.Module):
    width: int = 4
    kinds: frozenset = frozenset({"a", "b", "c"})
    act: object = jax.nn.relu

    @linen.compact
    def __call__(self, x, train: bool = False):
        return linen.Dense(self.width)(self.act(x))


class Eqx(eqx.Module):
    w: jax.Array
    act: object = eqx.field(static=True, default=jax.nn.relu)

    def __init__(self, n=3, *, key):
        self.w = jax.random.normal(key, (n,))

    def __call__(self, x):
        return self.act(x @ self.w)


class Loss:
    def __init__(self, scale):
        self.scale, self.names = scale, {"x", "y", "z"}

    def __call__(self, outputs, batch):
        return helper((outputs * self.scale).sum()), batch["mask"].sum(), {}


@dataclasses.dataclass
class Weighted:
    weight: float = 1.0
    per_class: dict = dataclasses.field(default_factory=dict)

    def __call__(self, outputs, batch):
        return outputs.sum() * self.weight


class Hidden(Loss):
    def __getstate__(self):
        return None


class Kind(enum.Enum):
    A = 1
    B = 2


class Slots:
    __slots__ = ("a",)

    def __init__(self, a):
        self.a = a


class Data:
    def __init__(self, x, f):
        self.x, self.f, self.me = x, f, self

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.f(self.x[i])


@jax.custom_vjp
def straight(x):
    return jnp.round(x)


straight.defvjp(lambda x: (jnp.round(x), None), lambda r, g: (g,))


@jax.custom_vjp
def scaled(x):
    return jnp.round(x)


scaled.defvjp(lambda x: (jnp.round(x), None), lambda r, g: (g * 2,))
cosine = lambda n: optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, n)
two = lambda rate: optax.multi_transform({"a": optax.adam(1.0), "b": optax.sgd(rate)}, lambda p: "a")
named = lambda net, n: functools.partial(net, n)
rows = {
    "optimizer": [
        optax.adam(1e-2),
        optax.adam(1.0),
        optax.adam(1e-2, b1=0.8),
        optax.adamw(1e-2),
        optax.sgd(1e-2),
        optax.adam(cosine(100)),
        optax.adam(cosine(101)),
        optax.chain(optax.clip(1.0), optax.adam(1e-2)),
        optax.chain(optax.clip(2.0), optax.adam(1e-2)),
        optax.chain(optax.adam(1e-2), optax.clip(1.0)),
        two(1.0),
        two(2.0),
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
        optax.inject_hyperparams(optax.adam)(learning_rate=0.2),
        optax.masked(optax.sgd(1.0), {"a": True}),
        optax.masked(optax.sgd(1.0), {"a": False}),
        optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        optax.contrib.muon(1e-2),
        optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 2, p)),
        optax.MultiSteps(optax.sgd(1.0), 4),
        optax.MultiSteps(optax.sgd(1.0), 2),
        optax.apply_if_finite(optax.sgd(1.0), 4),
    ],
    "loss": [
        closure(2.0),
        closure(3.0),
        closure(SCALE),
        closure(SCALE + 1),
        closure(jnp.ones(3, jnp.bfloat16)),
        closure(jnp.ones(3)),
        closure(np.ones(3)),
        Loss(2.0),
        Loss(3.0),
        Loss(2),
        Hidden(2.0),
        Hidden(3.0),
        Loss(2.0).__call__,
        Weighted(),
        Weighted(2.0),
        Weighted(1.0, {1: 2.0}),
        functools.partial(helper, s=3.0),
        functools.partial(helper, s=4.0),
        helper,
        other,
        straight,
        scaled,
        jax.jit(helper),
        jax.jit(other),
        lambda o, b: o.sum() * 2.0,
        lambda o, b: o.sum() * 3.0,
        reads(2),
        reads(3),
        functools.cache(helper),
        lambda o, b: jax.random.normal(jax.random.key(0), o.shape) * np.prod(o.shape),
    ],
    "model": [
        Net,
        Tanh,
        Linen(4),
        Linen(5),
        Linen(kinds=frozenset("ab")),
        Linen(kinds=frozenset("abd")),
        Linen(act=jax.nn.gelu),
        linen.Dense(2),
        linen.Dense(2, use_bias=False),
        Eqx,
        Eqx(key=jax.random.key(0)),
        Eqx(key=jax.random.key(1)),
        linen.Sequential([linen.Dense(3), jax.nn.relu]),
        named(Net, 2),
        named(Net, 3),
        linen.Dense(2, kernel_init=jax.nn.initializers.normal(0.1)),
        named(Tanh, 2),
        Net(rngs=nnx.Rngs(0)),
        Net(rngs=nnx.Rngs(1)),
        linen.Dense(2, kernel_init=jax.nn.initializers.normal(0.2)),
        (helper, other),
        (other, helper),
    ],
    "data": [
        (x, x[:, 0]),
        (changed, x[:, 0]),
        [x, x[:, 0]],
        {"inputs": x},
        {"inputs": changed},
        {"inputs": x.astype(float)},
        x.reshape(3000),
        np.asfortranarray(x).T,
        Data(x, helper),
        Data(changed, helper),
        Data(x, other),
        [{"a": v} for v in x],
        [{"a": v} for v in changed],
        np.ma.masked_array(x, x > 0),
        np.ma.masked_array(x, x > 1),
        Slots(1),
        Slots(2),
        {1: "a", 2: "b"},
        {2: "b", 1: "a"},
        0.0,
        -0.0,
        0,
        False,
        None,
        "0",
        Kind.A,
        Kind.B,
        jax.random.key(0),
        jax.random.key(1),
        collections.deque([1]),
        collections.deque([2]),
        {"a", "b", "c"},
        {"a", "b"},
        x.astype("datetime64[s]"),
        x[:0],
    ],
}
if __name__ == "__main__":
    print(json.dumps({key: [fingerprint(value) for value in row] for key, row in rows.items()}))


def decay_to(lr, factor=0.5):
    """A learning-rate schedule."""
    return lambda step: lr * factor**step


def pair():
    """No learning-rate schedule: it returns two numbers."""
    return lambda step: np.stack([1.0, 2.0])
