"""Strategies that pad the leaves which no dim divides."""

import jax
import numpy as np

import toys


def train(backend="pjit", zero=0, devices=1, buffer="sharded", pad=True, **settings):
    layout = {
        "zero": zero,
        "gradient_buffer": buffer,
        "pad": pad,
        "shard_size": settings.pop("group", None),
    }
    model = settings.pop("model", None) or toys.MODELS["blocks"](dropout=0.2)
    return toys.train(
        model, toys.data(), backend=backend, devices=devices, accumulate="scan", ema=0.9,
        steps=3, layout=layout, **settings,
    )  # fmt: skip


def is_padded(strategy):
    return any(
        x.shape != y.shape
        for x, y in zip(*map(jax.tree.leaves, (strategy.shapes, strategy.stored)))
    )


ROWS = [
    ("pjit", 3, 7, "sharded"),
    ("pmap", 1, 5, "sharded"),
    ("pjit", 2, 5, "sharded"),
    ("pjit", 1, 7, "sharded"),
]


ROWS += [("pjit", 3, 5, "replicated"), ("pjit", 2, 7, "replicated"), ("pmap", 1, 7, "sharded")]


def strategy_of(backend, devices, layout, **settings):
    model = toys.MODELS["blocks"]()
    return toys.build(
        model, toys.data(), backend=backend, devices=devices, ema=0.9, layout=layout, **settings
    )[0]


PLACES = [
    ("pjit", 5, {"zero": 3, "pad": True}),
    ("pmap", 7, {"zero": 1, "pad": True}),
    ("pjit", 2, {"zero": 3}),
]


PLACES += [("pjit", 6, {"zero": 2, "pad": True, "shard_size": 3}), ("pmap", 1, {})]


def drawn():
    """(a strategy of each place, a state of random numbers)"""
    strategies = [strategy_of(*place) for place in PLACES]
    noise = np.random.default_rng(0)

    def draw(x):
        return np.asarray(x + noise.normal(size=x.shape)).astype(x.dtype)

    return strategies, jax.tree.map(draw, strategies[0].export(strategies[0].init()))


def put(strategy, state):
    """An exported state, as the strategy stores it."""

    def place(x, like):
        return jax.device_put(x, like.sharding)

    return strategy.adopt(jax.tree.map(place, state, strategy.abstract()))
