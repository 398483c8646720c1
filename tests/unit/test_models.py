"""Adapters: whatever a Flax module is made of trains, and the same on one device and on eight."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import toys
from covering import first
from jaxdp.errors import UsageError
from jaxdp.losses import MeanSquaredError, SoftmaxCrossEntropy, compute_logits
from jaxdp.models import MODELS, as_model
from jaxdp.targets import locate


class Tied(nnx.Module):
    """Token embeddings, shared with the output; a list, a dict and two RNG streams inside."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.parts = nnx.Dict(
            a=nnx.List([nnx.Linear(8, 8, rngs=rngs)]), b=nnx.LayerNorm(8, rngs=rngs)
        )
        self.first, self.second = nnx.Dropout(0.2, rngs=rngs.fork()), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, inputs):
        x = self.second(nnx.relu(self.parts["a"][0](self.first(self.embed(inputs)))))
        return self.embed.attend(self.parts["b"](x))


class LinenTied(linen.Module):
    @linen.compact
    def __call__(this, tokens, deterministic: bool):  # no argument is called self
        embed = linen.Embed(11, 8)
        x = linen.Dropout(0.2, deterministic=deterministic)(
            linen.relu(linen.Dense(8)(embed(tokens)))
        )
        return embed.attend(x)


def tokens(size=40):
    rng = np.random.default_rng(1)
    inputs = rng.integers(11, size=(size, 6)).astype(np.int32)
    mask = rng.integers(2, size=(size, 6)).astype(np.float32)
    return {"inputs": inputs, "labels": np.roll(inputs, -1, 1), "mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", first(1, [as_model(Tied), as_model(LinenTied())]), ids=["nnx", "linen"]
)
def test_embeddings_and_token_masks_ignore_devices(model):
    with jax.enable_x64(True):
        states = [
            toys.train(
                model, tokens(), backend=backend, devices=n, steps=5, batch_size=16, dtype="float64"
            )[1]
            for backend, n in (("pmap", 1), ("pjit", 3))
        ]
    assert (
        states[0].params["embed" if "embed" in states[0].params else "Embed_0"]["embedding"].dtype
        == np.float64
    )
    for state in states[1:]:
        assert toys.relative_error(state.params, states[0].params)[0] < 1e-12


@pytest.mark.slow
def test_an_embedding_computes_in_the_policys_dtype():
    """Flax fixes an Embed's dtype to float32; in float64 that would cost eight digits."""
    model, batch = as_model(Tied), tokens(4)
    params, state = model.init(jax.random.key(0), batch)
    for dtype in (jnp.bfloat16, jnp.float32):
        cast = jax.tree.map(lambda x, d=dtype: x.astype(d), params)
        assert model.apply(cast, state, batch, jax.random.key(0), False)[0].dtype == dtype


SIZES = {
    "MLP": {"hidden": [8]},
    "CNN": {"widths": [4, 8]},
    "ResNet9": {"width": 4},
    "ResNet9 dawnbench": {"width": 4, "variant": "dawnbench"},
    "ViT": {"layers": 1, "heads": 2, "dim": 8},
    "GPT": {"layers": 1, "heads": 2, "dim": 8},
    "LSTM": {"dim": 8, "hidden": 8},
    "RNN": {"dim": 8, "hidden": 8},
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", SIZES)
def test_products_are_computed_in_the_policys_dtype(name):
    """Forward and backward, in training and evaluation, though BatchNorm's averages are float32 and
    stay so.
    """
    target, *_ = name.split()
    words = target in ("GPT", "LSTM", "RNN")
    shape = (6,) if words else (32, 32, 3)
    inputs = jnp.zeros((4, *shape), jnp.int32 if words else jnp.bfloat16)
    batch = {
        "inputs": inputs,
        "labels": inputs,
        "mask": jnp.ones((4, *shape[: 1 if words else 0]), bool),
    }
    made = locate("model", target, MODELS)
    model = as_model(lambda rngs: made(input_shape=shape, num_classes=16, **SIZES[name], rngs=rngs))
    params, state = jax.eval_shape(model.init, jax.random.key(0), batch)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)

    for train in (True, False):

        def total(params, state, train=train):
            outputs, state = model.apply(params, state, batch, jax.random.key(0), train)
            return compute_logits(outputs).astype(jnp.float32).sum(), state

        jaxpr, (_, after) = jax.make_jaxpr(jax.grad(total, has_aux=True), return_shape=True)(
            params, state
        )
        found = list(products(jaxpr))
        assert len(found) > 4 and set(found) == {"bfloat16"}
        assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


def products(jaxpr):
    """The dtypes of what is multiplied."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            yield from (x.aval.dtype.name for x in eqn.invars)
        for value in jax.tree.leaves(
            tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(value, "eqns"):
                yield from products(getattr(value, "jaxpr", value))


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        lambda rngs: nnx.Sequential(
            nnx.Linear(32, 8, rngs=rngs), nnx.relu, nnx.Linear(8, toys.CLASSES, rngs=rngs)
        ),
        linen.Sequential([linen.Dense(8), linen.relu, linen.Dense(toys.CLASSES)]),
    ],
    ids=["nnx", "linen"],
)
def test_sequential_modules_get_the_inputs(made):
    examples = toys.data(24)
    examples["inputs"] = examples["inputs"].reshape(24, -1)
    _, _, metrics, *_ = toys.train(as_model(made), examples, devices=2, steps=20, batch_size=24)
    assert metrics[-1]["loss"] < 0.9 * metrics[0]["loss"]


class Flags(nnx.Module):
    """Boolean and integer state beside the parameters."""

    def __init__(self, rngs):
        self.head = nnx.Linear(32, toys.CLASSES, rngs=rngs)
        self.flag, self.calls = (
            nnx.Variable(jnp.array([True, False])),
            nnx.Variable(jnp.zeros((), jnp.int32)),
        )

    def __call__(self, x):
        self.calls[...] += 1
        return self.head(x.reshape(len(x), -1)) * self.flag[0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", first(1, ["pjit", "pmap"]))
def test_boolean_and_integer_state_keep_their_types(backend):
    _, state, *_ = toys.train(as_model(Flags), toys.data(24), backend=backend, devices=4, steps=3)
    assert state.model_state["flag"].dtype == bool and state.model_state["flag"].tolist() == [
        True,
        False,
    ]
    assert state.model_state["calls"].dtype == np.int32 and state.model_state["calls"] == 3


def test_an_error_averages_over_what_the_mask_has_not():
    rng = np.random.default_rng(0)
    outputs, labels = rng.normal(size=(5, 4, 3)), rng.normal(size=(5, 4, 3))
    squares = (outputs - labels) ** 2
    for mask, per in (
        (np.array([1.0, 0, 1, 1, 0]), squares.mean((1, 2))),
        (rng.integers(2, size=(5, 4)), squares.mean(2)),
    ):
        total, weight, _ = MeanSquaredError()(
            jnp.asarray(outputs), {"labels": labels, "mask": jnp.asarray(mask, float)}
        )
        np.testing.assert_allclose(total, (per * mask).sum(), rtol=1e-5)
        assert weight == mask.sum()
    with pytest.raises(UsageError, match="mask"):
        MeanSquaredError()(
            jnp.zeros((5, 4)), {"labels": jnp.zeros((5, 4)), "mask": jnp.zeros((5, 3))}
        )


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, batch: jnp.mean(outputs),
        lambda outputs, batch: (jnp.sum(outputs), len(outputs), {}),
        lambda outputs, batch: (outputs, jnp.sum(batch["mask"]), {}),
        lambda outputs, batch: (jnp.sum(outputs), jnp.sum(batch["mask"]), {"a": outputs}),
        lambda outputs, batch: (jnp.sum(outputs), jnp.sum(batch["mask"])),
    ],
    ids=["mean", "number as weight", "vector", "vector metric", "no metrics"],
)
def test_a_loss_that_is_none_says_what_it_returned(loss):
    with pytest.raises(
        UsageError, match=r"loss: it returned .* a loss returns \(sum \[\], weight \[\]"
    ):
        toys.train(toys.MODELS["mlp"](), toys.data(24), loss=loss, steps=1)


def test_missing_labels_and_arguments_are_named():
    with pytest.raises(UsageError, match="it needs 'labels', and the data has"):
        SoftmaxCrossEntropy()(jnp.zeros((2, 3)), {"mask": jnp.ones(2)})

    class Wants(nnx.Module):
        def __init__(self, rngs): ...

        def __call__(self, x, context):
            return x

    with pytest.raises(UsageError, match="no value for its argument 'context'; the data has"):
        toys.train(as_model(Wants), toys.data(24), steps=1)


class Lookup(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = (
            nnx.Embed(11, 8, rngs=rngs),
            nnx.Linear(8, 11, use_bias=False, rngs=rngs),
        )

    def __call__(self, inputs):
        return self.head(self.embed(inputs))


@pytest.mark.slow
def test_an_embeddings_gradient_sums_over_its_tokens():
    """By NumPy, for one update of plain gradient descent: most places hold one token, and one token
    is nowhere.
    """
    examples = tokens(20)
    examples["inputs"] = np.where(examples["inputs"] < 6, 3, examples["inputs"] % 10).astype(
        np.int32
    )
    with jax.enable_x64(True):
        for backend, layout in (("pmap", None), ("pjit", {"zero": 3})):
            first, last, *_ = toys.train(
                as_model(Lookup), examples, steps=1, backend=backend, devices=8, layout=layout, dtype="float64",
                optimizer=(optax.sgd(1.0), None),
            )  # fmt: skip
            table, head = first.params["embed"]["embedding"], first.params["head"]["kernel"]
            scores = np.exp(table[examples["inputs"]] @ head)
            error = scores / scores.sum(-1, keepdims=True) - np.eye(11)[examples["labels"]]
            error *= (examples["mask"].astype(float) / examples["mask"].sum())[..., None]
            gradient = np.zeros_like(table)
            np.add.at(gradient, examples["inputs"], error @ head.T)
            np.testing.assert_allclose(
                table - last.params["embed"]["embedding"], gradient, rtol=1e-10, atol=1e-14
            )
            assert not gradient[10].any() and np.abs(gradient[3]).max() > 0.01


@pytest.mark.quick(1)
@pytest.mark.parametrize("name, args", [("CNN", {"widths": [4]}), ("ResNet9", {"width": 4})])
def test_dropout_is_for_training(name, args):
    model = locate("model", name, MODELS)(
        input_shape=(8, 8, 1), num_classes=3, dropout=0.5, rngs=nnx.Rngs(0), **args
    )
    output = nnx.jit(lambda model: model(jax.random.normal(jax.random.key(0), (8, 8, 8, 1))))
    model.train()
    assert not np.array_equal(output(model), output(model))
    model.eval()
    assert np.array_equal(output(model), output(model))
