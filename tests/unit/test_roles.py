"""Weight decay and Muon go by what a model does with a parameter, however the parameter is called."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from optax.contrib import MuonDimensionNumbers

from jaxdp.config import Config
from jaxdp.config.training import DataTarget, ModelTarget, Optimizer, Precision
from jaxdp.optim import make_optimizer
from jaxdp.optim.muon import matrices as matrices_of
from jaxdp.optim.optimizers import OPTIMIZERS
from jaxdp.optim.roles import find_roles
from jaxdp.run.components import describe_groups, make_parts, state_maker
from jaxdp.split import path_string


class Equinox(eqx.Module):
    """`weight` is a kernel, a scale, or a table; a LayerNorm over three dims has three."""

    conv: eqx.nn.Conv2d
    norm: eqx.nn.LayerNorm
    group: eqx.nn.GroupNorm
    lookup: eqx.nn.Embedding
    rms: eqx.nn.RMSNorm
    cls: jax.Array
    attend: eqx.nn.MultiheadAttention
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.conv = eqx.nn.Conv2d(1, 4, 3, padding=1, key=keys[0])
        self.norm, self.group, self.rms = (
            eqx.nn.LayerNorm((4, 8, 8)),
            eqx.nn.GroupNorm(2, 4),
            eqx.nn.RMSNorm(8),
        )
        self.lookup = eqx.nn.Embedding(5, 8, key=keys[1])
        self.cls = jnp.ones((1, 8))
        self.attend = eqx.nn.MultiheadAttention(2, 8, use_query_bias=True, key=keys[2])
        self.out = eqx.nn.Linear(8, 10, key=keys[3])

    def __call__(self, x):
        x = self.group(self.norm(self.conv(x.transpose(2, 0, 1))))
        tokens = jnp.clip(x.astype(jnp.int32).mean(0).reshape(-1)[:6] + 2, 0, 4).astype(jnp.int32)
        x = jnp.concatenate([self.cls, jax.vmap(self.lookup)(tokens) + x.mean()])
        return self.out(jax.vmap(self.rms)(self.attend(x, x, x)).mean(0))


class Linen(linen.Module):
    """Positions and a class token by other names than usual, and biases of two dims."""

    @linen.compact
    def __call__(self, x):
        x = linen.Conv(8, (2, 2), strides=2, name="wte")(x).reshape(len(x), 16, 8)
        start = jnp.broadcast_to(
            self.param("bias_free", linen.initializers.ones, (1, 1, 8)), (len(x), 1, 8)
        )
        x = jnp.concatenate([start, x], 1) + self.param(
            "w", linen.initializers.normal(), (1, 17, 8)
        )
        x = self.param("kernel", linen.initializers.ones, (8,)) * linen.MultiHeadAttention(
            2, name="embedding"
        )(x)
        x = linen.DenseGeneral((2, 3), name="scale")(x)
        x = linen.DenseGeneral(4, axis=(-2, -1), name="positions")(x)
        return linen.Dense(10, name="embed")(x.mean(1))


class Flax(nnx.Module):
    """A depthwise convolution, a head of one output, and a matrix by which nothing is multiplied
    but elements.
    """

    def __init__(self, rngs):
        self.embed = nnx.Conv(1, 6, (3, 3), rngs=rngs)
        self.depthwise = nnx.Conv(6, 6, (3, 3), feature_group_count=6, use_bias=False, rngs=rngs)
        self.gamma, self.beta = nnx.Param(jnp.ones((8, 6))), nnx.Param(jnp.ones((8, 6)))
        self.alpha = nnx.Param(jnp.ones(()))
        self.score, self.head = nnx.Linear(6, 1, rngs=rngs), nnx.Linear(6, 10, rngs=rngs)

    def __call__(self, x):
        x = self.depthwise(nnx.relu(self.embed(x)))
        x = x * self.gamma[...] + self.beta[...]
        return self.head((x * nnx.softmax(self.score(x), (1, 2)) * self.alpha[...]).sum((1, 2)))


def init(key, inputs):
    def draw(*shape):
        return jax.random.normal(jax.random.fold_in(key, len(shape) + sum(shape)), shape) * 0.1

    return {
        "wte": draw(17, 6), "one_hot": draw(17, 6), "wpe": draw(64, 6), "relative": draw(3, 6),
        "layers": {"w": draw(3, 6, 6), "b": draw(3, 6), "g": draw(3, 6)},
        "unrolled": draw(2, 6, 6), "unrolled_b": draw(2, 6), "masked": draw(6, 6), "standard": draw(6, 6),
        "a": draw(6, 2), "b": draw(2, 6), "experts": draw(2, 6, 5), "experts_b": draw(2, 5), "back": draw(2, 5, 6),
        "v": draw(6, 1), "row": draw(1, 6), "latents": draw(4, 6), "head": [draw(6, 10), draw(10)],
    }  # fmt: skip


def apply(p, inputs):
    tokens = jnp.clip(inputs.reshape(len(inputs), -1), 0, 16).astype(jnp.int32)
    x = p["wte"][tokens] + jax.nn.one_hot(tokens, 17) @ p["one_hot"] + p["wpe"][: tokens.shape[1]]
    x = x + p["relative"][jnp.arange(64) % 3]
    x = jax.lax.scan(lambda x, p: (jnp.tanh(x * p["g"] @ p["w"] + p["b"]), None), x, p["layers"])[0]
    for i in range(2):
        x = x @ p["unrolled"][i] + p["unrolled_b"][i]
    x = x @ jnp.where(jnp.tri(6, dtype=bool), p["masked"], 0)
    centered = p["standard"] - p["standard"].mean(0)
    x = x @ (centered / jnp.sqrt(jnp.square(centered).mean(0) + 1e-5) + p["a"] @ p["b"])
    gates = jax.nn.one_hot(tokens[:, 0] % 2, 2)
    y = jnp.einsum("btd,edf->ebtf", x, p["experts"]) + p["experts_b"][:, None, None]
    x = jnp.einsum("ebtf,efd,be->btd", y, p["back"], gates) * p["row"]
    latents = jnp.broadcast_to(p["latents"], (len(x), 4, 6))
    x = jnp.concatenate([(latents - latents.mean(-1, keepdims=True)) @ p["masked"], x], 1)
    return (x * jax.nn.softmax(x @ p["v"], 1)).sum(1) @ p["head"][0] + p["head"][1]


# model: (paths without decay, {path of a matrix: (dims that it sums over, dims of its output)})
CASES = {
    "equinox": (
        lambda key: Equinox(key),
        "conv/bias norm/weight norm/bias group/weight group/bias rms/weight rms/bias cls attend/query_proj/bias "
        "out/bias",
        {
            "conv/weight": ((1, 2, 3), 0), "out/weight": (1, 0),
            **{f"attend/{name}_proj/weight": (1, 0) for name in ("query", "key", "value", "output")},
        },
    ),
    "linen": (
        Linen(),
        "wte/bias bias_free kernel embedding/query/bias embedding/key/bias embedding/value/bias embedding/out/bias "
        "scale/bias positions/bias embed/bias",
        {
            "wte/kernel": ((0, 1, 2), 3), "scale/kernel": (0, (1, 2)), "positions/kernel": ((0, 1), 2),
            "embed/kernel": (0, 1), "embedding/out/kernel": ((0, 1), 2),
            **{f"embedding/{name}/kernel": (0, (1, 2)) for name in ("query", "key", "value")},
        },
    ),
    "nnx": (
        Flax,
        "embed/bias gamma beta alpha score/bias head/bias",
        {"embed/kernel": ((0, 1, 2), 3), "depthwise/kernel": ((0, 1, 2), 3), "head/kernel": (0, 1)},
    ),
    "functions": (
        (init, apply),
        "layers/b layers/g unrolled_b experts_b row head/1",
        {
            "layers/w": (1, 2), "unrolled": (1, 2), "masked": (0, 1), "standard": (0, 1), "a": (1, 0), "b": (0, 1),
            "experts": (1, (0, 2)), "back": ((0, 1), 2), "head/0": (0, 1),
        },
    ),
}  # fmt: skip


def parts_of(model, **optimizer):
    config = Config(
        steps=1, batch_size=6, microbatches=2, model=ModelTarget("mine"), data=DataTarget("Digits"),
        optimizer=Optimizer(**optimizer), precision=Precision(state="float32"),
    )  # fmt: skip
    return config, make_parts(config, {"model": {"mine": model}})


def by_path(tree):
    return {path_string(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    model, spared, matrices = CASES[request.param]
    config, parts = parts_of(model, target="muon", weight_decay=0.1)
    shapes = jax.eval_shape(state_maker(config, parts)).params
    return (
        config,
        parts,
        jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes),
        {*spared.split()},
        matrices,
    )


def moved(tx, params):
    """The paths of what an update with zero gradients changes: that is decay."""
    updates, _ = tx.update(jax.tree.map(np.zeros_like, params), tx.init(params), params)
    return {path for path, x in by_path(updates).items() if np.any(x)}


def test_decay_spares_biases_scales_and_vectors_by_use(case):
    _, parts, params, spared, _ = case
    tx = make_optimizer(OPTIMIZERS["sgd"], lambda step: 1.0, 0.1, "auto", roles=parts.roles)
    assert moved(tx, params) == by_path(params).keys() - spared
    slices = jax.tree.map(
        lambda x: x[(slice(1),) * x.ndim], params
    )  # a row of a kernel looks like a vector
    assert moved(tx, slices) == by_path(params).keys() - spared


def test_muon_takes_kernels_and_adam_the_rest(case):
    _, parts, params, _, matrices = case
    found = matrices_of(roles=parts.roles)(params)

    def is_leaf(x):
        return x is None or isinstance(x, MuonDimensionNumbers)

    leaves = jax.tree_util.tree_leaves_with_path(found, is_leaf=is_leaf)
    assert {path_string(path): tuple(x) for path, x in leaves if x is not None} == matrices


def test_one_line_says_what_decays_and_what_muon_takes(case):
    config, parts, params, spared, matrices = case
    sizes = {path: x.size for path, x in by_path(params).items()}

    def count(names):
        return sum(sizes[name] for name in names)

    text = describe_groups(config, parts, params)
    assert text.count("\n") == 0
    assert (
        f"({count(sizes.keys() - spared):,} parameters), not for {len(spared)} vectors ({count(spared):,} "
        in text
    )
    assert f"muon for {len(matrices)} kernels ({count(matrices):,} parameters), adam for " in text


def test_expressions_count_and_frozen_arrays_do_not():
    config, parts = parts_of(
        Flax, target="sgd", weight_decay=0.1, no_decay=["^gamma$"], frozen=["^embed/"]
    )
    params = jax.eval_shape(state_maker(config, parts)).params
    params = parts.rule.trainable(jax.tree.map(lambda x: np.ones(x.shape, x.dtype), params))
    assert moved(parts.rule.tx, params) == by_path(params).keys() - {"gamma"}
    assert describe_groups(config, parts, params).endswith("not for 1 array (48 parameters)")
    plain = parts_of(Flax)
    assert (
        plain[1].roles == {} and describe_groups(*plain, params) == ""
    )  # without decay, the model is not traced


def test_a_model_that_cannot_be_traced_has_no_roles():
    def apply(params, inputs):
        raise TypeError("no such thing")

    _, parts = parts_of((init, apply), weight_decay=0.1)
    assert parts.roles == {}


LAYOUTS = {
    "a reshape that joins, then splits": lambda w, x: x @ w.reshape(2, 6, 6).reshape(12, 6),
    "a transpose": lambda w, x: x @ jnp.transpose(w, (2, 1, 0)).reshape(6, 12).T.reshape(12, 6),
    "a conditional": lambda w, x: jax.lax.cond(x.sum() > 0, *[lambda w: x @ w.reshape(12, 6)] * 2, w),
    "a loop": lambda w, x: jax.lax.fori_loop(0, 2, lambda i, y: y + x @ w.reshape(12, 6), jnp.zeros((3, 6))),
    "a checkpoint": lambda w, x: jax.checkpoint(lambda w: x @ w.reshape(12, 6))(w),
    "a custom derivative": lambda w, x: jax.nn.relu(w).reshape(12, 6).T @ x.T,
    "a map over examples": lambda w, x: jax.vmap(lambda x: w.reshape(12, 6).T @ x)(x),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_kernel_is_found_behind_a_change_of_layout(name):
    shapes = (
        {"w": jax.ShapeDtypeStruct((2, 6, 6), np.float32)},
        jax.ShapeDtypeStruct((3, 12), np.float32),
    )
    program = jax.make_jaxpr(lambda params, x: LAYOUTS[name](params["w"], x))(*shapes)
    role = find_roles(program, shapes[0])["w"]
    assert (role.kind, role.decays) == ("kernel", True)
