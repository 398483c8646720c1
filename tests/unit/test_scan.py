"""Blocks in every way that a model may use them: split parameters are whole where they are read,
and right.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import toys
from covering import only
from jaxdp.models import as_model
from jaxdp.models.base import Model
from jaxdp.models.nnx import Blocks
from jaxdp.models.scan import scan_blocks

WIDTH, COUNT = 16, 4


def block(p, x, _):
    return x + jnp.tanh(x @ p["w"] + p["b"]), None


def scanned(stack, x):
    return scan_blocks(block, stack, x)[0]


def outside(stack, x):
    """One leaf in the blocks, and beside them."""
    return scanned(stack, x) * jnp.sum(jnp.square(stack["w"]))


def changed(stack, x):
    return scanned(jax.tree.map(lambda w: w[::-1] * 0.5, stack), x)


def halves(stack, x):
    for part in (slice(0, 2), slice(2, 4)):
        x = scanned(jax.tree.map(lambda w, part=part: w[part], stack), x)
    return x


def twice(stack, x):
    return scanned(stack, scanned(stack, x))


def unscanned(stack, x):
    return jax.lax.scan(lambda x, p: block(p, x, None), x, stack)[0]


inner_jit = jax.jit(
    scanned
)  # traced once for all strategies: it must not keep anything of the first


def plain(use, key="s", nest=lambda s, rest: {"s": s, "rest": rest}, path="s"):
    """A model of plain functions around `use(stack, x)`."""

    def init(rng, batch):
        shape = (int(np.prod(batch["inputs"].shape[1:])), WIDTH)

        def draw(i, *s):
            return jax.random.normal(jax.random.fold_in(rng, i), s, jnp.float32) * 0.1

        stack = {"w": draw(0, COUNT, WIDTH, WIDTH), "b": draw(1, COUNT, WIDTH)}
        return nest(stack, {"i": draw(2, *shape), "o": draw(3, WIDTH, toys.CLASSES)}), {}

    def apply(params, state, batch, rng, train):
        stack, rest = (
            (params["s"], params["rest"]) if isinstance(params, dict) else (params[0][0], params[1])
        )
        x = batch["inputs"].reshape(len(batch["inputs"]), -1) @ rest["i"]
        return use(stack, x) @ rest["o"], state

    return Model(init, apply, (path,))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.l = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + nnx.tanh(self.l(x))


class Outer(nnx.Module):
    """Blocks inside of a block."""

    def __init__(self, rngs):
        self.inner = Blocks(Layer, 3, rngs=rngs)

    def __call__(self, x):
        return self.inner(x) * 0.5


class Nested(nnx.Module):
    def __init__(self, rngs):
        self.i = nnx.Linear(int(np.prod(toys.SHAPE)), WIDTH, rngs=rngs)
        self.outer, self.more = Blocks(Outer, 2, rngs=rngs), Blocks(Layer, 2, rngs=rngs)
        self.o = nnx.Linear(WIDTH, toys.CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.more(self.outer(self.i(x.reshape(len(x), -1))))
        return self.o(x) * self.more.stack.l.kernel[0, 0, 0]


class Shared(nnx.Module):
    """Blocks that are read twice, and blocks under a condition."""

    def __init__(self, rngs):
        self.i = nnx.Linear(int(np.prod(toys.SHAPE)), WIDTH, rngs=rngs)
        self.twice, self.maybe = Blocks(Layer, 3, rngs=rngs), Blocks(Layer, 2, rngs=rngs)
        self.o = nnx.Linear(WIDTH, toys.CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.twice(self.twice(self.i(x.reshape(len(x), -1))))
        is_large = jnp.sum(x) > 0
        x = nnx.cond(is_large, lambda model, x: model(x), lambda model, x: x, self.maybe, x)
        return self.o(x)


class Dropped(Shared):
    """Blocks under a condition that differs between microbatches, and so between devices."""

    def __call__(self, x):
        x = self.twice(self.i(x.reshape(len(x), -1)))
        is_odd = jnp.floor(1e4 * jnp.abs(jnp.sum(x))) % 2 == 1
        x = nnx.cond(is_odd, lambda model, x: model(x), lambda model, x: x, self.maybe, x)
        return self.o(x)


MODELS = {
    **{f.__name__: plain(f) for f in (scanned, outside, changed, halves, twice, unscanned)},
    "inner jit": plain(inner_jit),
    "in tuples": plain(scanned, nest=lambda s, rest: ((s,), rest), path="0/0"),
    "a path that is not there": plain(scanned)._replace(blocks=("elsewhere",)),
    "nested": as_model(Nested),
    "shared": as_model(Shared),
    "dropped": as_model(Dropped),
}
LAYOUTS = {
    "0": ({}, "scan"),
    "1": ({"zero": 1}, "scan"),
    "2": ({"zero": 2}, "vmap"),
    "3": ({"zero": 3}, "vmap"),
    "3 whole": ({"zero": 3, "gradient_buffer": "replicated"}, "scan"),
}


def trained(model, devices, layout=None, accumulate="vmap"):
    out = toys.train(
        MODELS[model], toys.data(dtype="float64"), backend="pjit", devices=devices, accumulate=accumulate,
        steps=2, dtype="float64", layout=layout,
    )  # fmt: skip
    return out[1]


@pytest.mark.slow
@pytest.mark.parametrize("model", only(["outside", "shared", "dropped"], MODELS))
def test_blocks_are_right_in_every_layout(model):
    with jax.enable_x64(True):
        want = trained(model, 1)
        for layout, accumulate in LAYOUTS.values():
            got = trained(model, 4, layout, accumulate)
            error, where = toys.relative_error(got.params, want.params)
            assert error < 1e-12, (layout, where)
