"""Warnings at the start about data that does not suit the model; none for models and data that are
sound.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from covering import only
from jaxdp import cli
from jaxdp.models.layers import ConvBN
from jaxdp.run.components import make_parts, state_maker
from jaxdp.run.preflight import data_warnings

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(800, 8)).astype(np.float32), np.arange(800, dtype=np.int32) % 3
IMAGES = RNG.integers(0, 256, (100, 8, 8, 1), np.uint8)
MASKED, PADDING, ROWS, SCALE = (
    "an argument mask",
    "counts padding",
    "BatchNorm normalizes",
    "as it is",
)


class Norm(nnx.Module):
    """A layer, a normalization, a layer."""

    def __init__(self, norm, masks=False, *, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)
        self.norm, self.masks = norm(16, rngs=rngs), masks

    def __call__(self, x, mask=None):
        return self.down(self.norm(self.up(x), **({"mask": mask[:, None]} if self.masks else {})))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        return linen.Dense(3)(linen.BatchNorm(use_running_average=not train)(linen.Dense(8)(x)))


class Tracker(nnx.Module):
    """Has an average that its outputs do not depend on, or a state that does not depend on the
    examples.
    """

    def __init__(self, of="inputs", *, rngs):
        self.layer, self.mean, self.of = (
            nnx.Linear(8, 3, rngs=rngs),
            nnx.BatchStat(jnp.zeros(8)),
            of,
        )

    def __call__(self, x, mask):
        rows = jnp.where(mask[:, None], x, 0).sum(0) / jnp.maximum(mask.sum(), 1)
        self.mean[...] = 0.9 * self.mean[...] + (
            rows if self.of == "inputs" else self.layer.kernel[...].sum(1)
        )
        return self.layer(x)


class Flat(nnx.Module):
    """Products of the inputs after a function of them."""

    def __init__(self, before=lambda x: x, size=64, *, rngs):
        self.before, self.layer = before, nnx.Linear(size, 3, rngs=rngs)

    def __call__(self, x):
        return self.layer(self.before(x).reshape(len(x), -1))


class Tokens(nnx.Module):
    def __init__(self, one_hot=False, *, rngs):
        self.embed, self.layer, self.one_hot = (
            nnx.Embed(256, 256, rngs=rngs),
            nnx.Linear(256, 3, rngs=rngs),
            one_hot,
        )

    def __call__(self, x):
        x = x.reshape(len(x), -1)
        return self.layer((jax.nn.one_hot(x, 256) if self.one_hot else self.embed(x)).mean(1))


def warnings(model, data, batch_size=80, microbatches=8, steps=100, transform=None, **args):
    words = [
        "--model.target",
        "net",
        "--data.target",
        "set",
        "--batch_size",
        batch_size,
        "--steps",
        steps,
    ]
    words += ["--microbatches", microbatches, "--parallel.devices", 1]
    config, _, _ = cli.load(
        [*map(str, words), *(["--data.transform.target", transform] if transform else [])]
    )
    objects = {"model": {"net": lambda rngs: model(rngs=rngs, **args)}, "data": {"set": data}}
    if model is Linen:
        objects["model"]["net"] = Linen()
    parts = make_parts(config, objects)
    return data_warnings(config, parts, jax.eval_shape(state_maker(config, parts)), 1)


BATCH_NORM, MASKED_NORM, LAYER_NORM = (
    {"norm": nnx.BatchNorm},
    {"norm": nnx.BatchNorm, "masks": True},
    nnx.LayerNorm,
)
STATES = {
    "padding in each batch": (Norm, BATCH_NORM, (100, 8), [PADDING]),
    "padding in the last batch": (Norm, BATCH_NORM, (128, 8), [PADDING]),
    "no padding so far": (Norm, BATCH_NORM, (128, 8, 6), []),
    "no padding": (Norm, BATCH_NORM, (80, 8), []),
    "the mask is used": (Norm, MASKED_NORM, (100, 8), []),
    "linen": (Linen, {}, (90, 8), [PADDING]),
    "few rows": (Norm, BATCH_NORM, (16, 8), [ROWS]),
    "few rows, and padding": (Norm, BATCH_NORM, (20, 8), [PADDING, ROWS]),
    "few rows and a mask": (Norm, MASKED_NORM, (20, 8), [ROWS]),
    "few rows, linen": (Linen, {}, (20, 4), [ROWS]),
    "no state": (Norm, {"norm": LAYER_NORM}, (20, 8), []),
    "an average of the examples": (Tracker, {}, (20, 8), []),
    "an average of parameters": (Tracker, {"of": "parameters"}, (20, 8), []),
}


@pytest.mark.parametrize(
    "name",
    only(["few rows, and padding", "the mask is used", "an average of the examples"], STATES),
)
def test_a_batch_norm_on_padding_or_few_rows_is_named(name):
    model, args, sizes, words = STATES[name]
    texts = warnings(model, (X, Y), *sizes, **args)
    assert len(texts) == len(words) and all(word in text for word, text in zip(words, texts)), texts
    for text in texts:
        assert "set batch_size to" in text or "batch_size to " in text


class Images(nnx.Module):
    def __init__(self, *, rngs):
        self.conv, self.head = ConvBN(1, 4, 3, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x, mask):
        return self.head(self.conv(x, mask).mean((1, 2)))


PIXELS = {
    "uint8": (Flat, {}, IMAGES, True),
    "a convolution": (Images, {}, IMAGES, True),
    "floats from 0 to 255": (Flat, {}, IMAGES.astype(np.float32), True),
    "int32": (Flat, {}, IMAGES.reshape(100, 64).astype(np.int32), True),
    "mirrored and cast": (
        Flat,
        {"before": lambda x: x[:, ::-1].astype(jnp.bfloat16)},
        IMAGES,
        True,
    ),
    "scaled by the model": (Flat, {"before": lambda x: x / 255}, IMAGES, False),
    "standardized by the model": (
        Flat,
        {"before": lambda x: (x - x.mean()) / x.std()},
        IMAGES,
        False,
    ),
    "floats from 0 to 1": (Flat, {}, (IMAGES / 255).astype(np.float32), False),
    "floats of any size": (Flat, {}, 255 * RNG.normal(size=(100, 64)).astype(np.float32), False),
    "black and white": (Flat, {}, IMAGES > 127, False),
    "small counts": (Flat, {}, IMAGES % 17, False),
    "a few numbers": (Flat, {"size": 8}, RNG.integers(0, 256, (100, 8)).astype(np.float32), False),
    "tokens": (Tokens, {}, IMAGES.reshape(100, 64), False),
    "one-hot tokens": (Tokens, {"one_hot": True}, IMAGES.reshape(100, 64), False),
}


@pytest.mark.parametrize("name", only(["uint8", "scaled by the model", "tokens"], PIXELS))
def test_pixels_that_are_not_scaled(name):
    model, args, inputs, warned = PIXELS[name]
    texts = warnings(model, (inputs, Y[:100]), 80, 2, **args)
    assert len(texts) == warned and all(
        "'inputs' (" in text and "up to 25" in text for text in texts
    ), texts
    if name in ("uint8", "int32"):
        assert "with data.transform: {target: Scale}" in texts[0]
        assert not warnings(model, (inputs, Y[:100]), 80, 2, transform="Scale", **args)
