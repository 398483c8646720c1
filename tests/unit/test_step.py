"""The step by itself: padding, kinds of model state, carry, clipping, non-finite gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import toys
from checks import check_shared_programs
from covering import first
from jaxdp.data.dataset import Arrays
from jaxdp.data.example_order import EpochOrder
from jaxdp.data.prefetch import read_batches
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.models import as_model
from jaxdp.models.base import Model
from jaxdp.models.cnn import CNN
from jaxdp.models.nnx import Carry
from jaxdp.models.resnet9 import ResNet9
from jaxdp.split import path_string
from jaxdp.train.state import mean_state, weighted_state
from jaxdp.train.step import Forward, UpdateRule, init_state, make_step


class Norm(nnx.Module):
    """BatchNorm alone, on the inputs."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(toys.SHAPE[-1], momentum=0.5, rngs=rngs)
        self.head = nnx.Linear(toys.SHAPE[-1], toys.CLASSES, rngs=rngs)

    def __call__(self, x, mask):
        return self.head(self.norm(x, mask=mask.reshape(-1, 1, 1, 1)).mean((1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("where", first(1, [("pjit", 3), ("pmap", 1), ("pmap", 8)]), ids=str)
def test_running_statistics_are_those_of_the_real_rows(where):
    """13 rows in 8 microbatches of 2 places: some full, some with one row; then 5 rows: three with
    none.
    """
    backend, devices = where
    for size in (13, 5):
        examples = toys.data(size, dtype="float64")
        with jax.enable_x64(True):
            _, state, *_ = toys.train(
                as_model(Norm),
                examples,
                backend=backend,
                devices=devices,
                steps=1,
                batch_size=16,
                dtype="float64",
            )
        x, rows = examples["inputs"], min(size, 8)
        pieces = [x[m::8] for m in range(rows)]
        share = np.array([len(p) / size for p in pieces])
        mean = 0.5 * np.zeros(2) + 0.5 * sum(s * p.mean((0, 1, 2)) for s, p in zip(share, pieces))
        var = 0.5 * np.ones(2) + 0.5 * sum(s * p.var((0, 1, 2)) for s, p in zip(share, pieces))
        np.testing.assert_allclose(state.model_state["norm"]["mean"], mean, rtol=1e-12)
        np.testing.assert_allclose(state.model_state["norm"]["var"], var, rtol=1e-12)
        np.testing.assert_allclose(
            mean, 0.5 * x.mean((0, 1, 2)), rtol=1e-12
        )  # the mean of all real rows


@pytest.mark.slow
@pytest.mark.parametrize("where", first(1, [("pjit", 4), ("pmap", 2)]), ids=str)
def test_without_padding_the_masks_are_left_out(where):
    """The same numbers; the masks are not looked at any more, in training alone."""
    backend, devices = where
    made, examples = toys.MODELS["resnet"](), toys.data(40)
    losses = []
    for padded in (True, False):
        strategy, step, batch = toys.build(
            made, examples, backend=backend, devices=devices, batch_size=16, padded=padded
        )
        program, state = strategy.compile(step), strategy.init()
        for i in range(2):
            state, metrics = program.update(state, batch(i))
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    half = dict(batch(2))  # 8 of its 16 places are examples
    assert float(program.evaluate(state, half).weight) == 8
    assert float(program.update(state, half)[1]["weight"]) == 16


@pytest.mark.slow
@pytest.mark.parametrize("model", first(1, ["dropout", "resnet"]))
@pytest.mark.parametrize("accumulate", ["vmap", "scan"])
def test_a_microbatch_of_padding_changes_nothing(model, accumulate):
    examples, made = toys.data(6), toys.MODELS[model]()
    forward, rule = Forward(made, SoftmaxCrossEntropy()), UpdateRule(optax.sgd(0.1))
    step, state = (
        make_step(forward, rule, accumulate),
        init_state(forward, rule, 8, {k: v[:2] for k, v in examples.items()}),
    )
    batch = read_batches(
        Arrays(**examples),
        EpochOrder(6, 6, 4, 0, shuffle=False),
        [0],
        np.array([0, 1, 2, 3, -1, -1]),
    )

    def grads(state, batch, numbers):
        return jax.jit(toys.alone(step.grads, numbers))(state, batch)

    with_padding = grads(state, batch, [0, 1, 2, 3, 5, -1])
    without = grads(state, {k: v[:4] for k, v in batch.items()}, np.arange(4))
    assert int(with_padding.weight) == int(without.weight) == 6
    assert toys.relative_error(with_padding, without)[0] < 1e-6
    nothing = grads(state, {k: v[4:] for k, v in batch.items()}, [5, -1])
    assert all(float(jnp.abs(x).max()) == 0 for x in jax.tree.leaves(nothing))


def test_a_model_without_vmap_scans_its_microbatches():
    """JAX has no rule for `vmap` of this function on the host."""

    def apply(params, state, batch, key, train):
        x = batch["inputs"].reshape(len(batch["mask"]), -1)
        host = jax.pure_callback(np.cos, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return (x * host) @ params["w"], state

    examples = toys.data(8)

    def init(key, batch):
        return ({"w": jnp.ones((examples["inputs"][0].size, toys.CLASSES))}, {})

    forward, rule = Forward(Model(init, apply), SoftmaxCrossEntropy()), UpdateRule(optax.sgd(0.1))
    state = init_state(forward, rule, 4, {k: v[:2] for k, v in examples.items()})
    batch = read_batches(
        Arrays(**examples), EpochOrder(8, 8, 4, 0, shuffle=False), [0], np.arange(4)
    )
    for accumulate, number in (("vmap", 1), ("scan", 4)):
        step, some = make_step(forward, rule, accumulate), {k: v[:number] for k, v in batch.items()}
        for f in (step.grads, step.evaluate):
            assert jax.eval_shape(toys.alone(f, np.arange(number)), state, some).loss.shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("backend", first(1, ["pjit", "pmap"]))
@pytest.mark.parametrize("devices", first(1, [3, 1, 8]))
@pytest.mark.parametrize("accumulate", ["vmap", "scan"])
def test_carry_stays_in_its_rows_counters_count_once(backend, devices, accumulate):
    examples = toys.data(53)
    _, state, _, strategy, _ = toys.train(
        toys.counting(),
        examples,
        backend=backend,
        devices=devices,
        accumulate=accumulate,
        steps=4,
        optimizer="momentum",
    )
    assert int(state.model_state["calls"]) == 4
    want = np.zeros((8, 3, 32), np.float32)
    for step in range(4):  # batches of 20, 20, 13, 20 rows
        rows = examples["inputs"][(step % 3) * 20 :][:20].reshape(-1, 32)
        for r, row in enumerate(rows):
            want[r % 8, r // 8] += row
    np.testing.assert_allclose(state.kept["carry"]["seen"], want, rtol=1e-5, atol=1e-5)
    exported = jax.tree.map(jnp.asarray, state)
    again = strategy.export(
        strategy.adopt(jax.device_put(exported, strategy.abstract().step.sharding))
    )
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, again), state)


@pytest.mark.parametrize(
    "old, new",
    [
        (np.int8(100), np.int8(-56)),
        (np.int32(7), np.int32(7 + 2**30)),
        (np.uint32(5), np.uint32(2**32 - 1)),
        (np.bool_(True), np.bool_(False)),
        (np.array([0.5 - 2j], np.complex64), np.array([0.25 + 3j], np.complex64)),
        (np.zeros((0, 3), np.int32), np.zeros((0, 3), np.int32)),
    ],
)
def test_state_of_any_dtype_after_many_microbatches(old, new):
    """The sum of all changes does not fit into 32 bits, and complex numbers keep their imaginary
    part.
    """
    sums = weighted_state(jnp.asarray(old), jnp.asarray(new), jnp.float32(2), jnp.bool_(True))
    total, weight = jax.tree.map(lambda x: x * 8, sums), jnp.float32(16)
    result, disagreeing = mean_state(jnp.asarray(old), total, weight)
    assert result.dtype == new.dtype and np.array_equal(result, new) and not disagreeing
    none = jax.tree.map(jnp.zeros_like, total)
    assert np.array_equal(mean_state(jnp.asarray(old), none, jnp.float32(0))[0], old)


def test_state_no_microbatch_changes_keeps_its_bits():
    old = jnp.array([0.1, 1e-9, -jnp.inf, 1 / 3])
    sums = [weighted_state(old, old, jnp.float32(w), jnp.bool_(True)) for w in (3, 5, 7)]
    assert np.array_equal(
        mean_state(old, jax.tree.map(lambda *x: sum(x), *sums), jnp.float32(15))[0], old
    )


def test_a_64_bit_counter_beyond_32_bits():
    with jax.enable_x64(True):
        old, new = jnp.int64(2**40), jnp.int64(2**40 + 2**35)
        sums = weighted_state(old, new, jnp.float64(1), jnp.bool_(True))
        assert int(mean_state(old, sums, jnp.float64(1))[0]) == new


@pytest.mark.slow
def test_integers_that_disagree_are_counted():
    model = toys.counting(lambda batch: (batch["labels"][0] > 0).astype(jnp.int32))
    *_, metrics, _, _ = toys.train(model, toys.data(53), steps=2, devices=2)
    assert all(int(m["disagreeing_state"]) == 1 for m in metrics)
    *_, metrics, _, _ = toys.train(toys.counting(), toys.data(53), steps=2, devices=2)
    assert all(int(m["disagreeing_state"]) == 0 for m in metrics)


class Standardized(nnx.Module):
    """Divides by the deviation of a microbatch; the derivative of a deviation of equal examples is
    not finite.
    """

    def __init__(self, rngs):
        self.up = nnx.Linear(32, 5, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(5, toys.CLASSES, rngs=rngs)

    def __call__(self, x):
        h = self.up(x.reshape(len(x), -1))
        return self.head((h - h.mean(0)) / (h.std(0) + 1e-5))


@pytest.mark.slow
def test_padding_microbatches_have_finite_gradients():
    """Three devices have nine places for eight microbatches."""
    settings = {"steps": 2, "optimizer": "momentum"}
    ways = [
        toys.train(as_model(Standardized), toys.data(40), devices=n, **settings) for n in (1, 3)
    ]
    assert all(m["skipped"] == 0 for _, _, metrics, *_ in ways for m in metrics)
    assert toys.relative_error(ways[1][1].params, ways[0][1].params)[0] < 1e-5


@pytest.mark.slow
def test_many_microbatches_add_up_in_bfloat16_too():
    examples = {k: np.repeat(v[:1], 512, 0) for k, v in toys.data(1).items()}
    settings = {
        "steps": 1,
        "batch_size": 512,
        "microbatches": 512,
        "dtype": "bfloat16",
        "optimizer": "momentum",
    }

    def norm(how):
        return toys.train(toys.MODELS["mlp"](), examples, accumulate=how, **settings)[2][0][
            "grad_norm"
        ]

    assert norm("scan") == pytest.approx(float(norm("vmap")), rel=0.02)


def test_a_batch_without_weight_makes_no_update():
    examples = toys.data(40)
    examples["mask"] = (np.arange(40) >= 20).astype(np.float32)
    first, last, metrics, *_ = toys.train(toys.MODELS["mlp"](), examples, steps=1, devices=2)
    assert (
        np.isnan(metrics[0]["loss"])
        and np.isnan(metrics[0]["accuracy"])
        and metrics[0]["skipped"] == 1
    )
    jax.tree.map(np.testing.assert_array_equal, first.params, last.params)


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(32, toys.CLASSES, rngs=rngs)
        self.seen = Carry(jnp.zeros(32))

    def __call__(self, x):
        self.seen[...] = jax.lax.stop_gradient(self.seen[...]) + x.reshape(len(x), -1)
        return self.head(self.seen[...])


class LinenRecurrent(linen.Module):
    @linen.compact
    def __call__(self, x):
        seen = self.variable("carry", "seen", lambda: jnp.zeros((len(x), 32)))
        if not self.is_initializing():
            seen.value = jax.lax.stop_gradient(seen.value) + x.reshape(len(x), -1)
        return linen.Dense(toys.CLASSES)(seen.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", first(1, [as_model(Recurrent), as_model(LinenRecurrent())]), ids=["nnx", "linen"]
)
def test_modules_carry_state_by_place(model):
    examples = toys.data(60)
    _, state, *_ = toys.train(model, examples, devices=4, steps=2)
    want = np.zeros((8, 3, 32), np.float32)
    for step in range(2):
        for r, row in enumerate(examples["inputs"][step * 20 :][:20].reshape(-1, 32)):
            want[r % 8, r // 8] += row
    np.testing.assert_allclose(state.kept["carry"]["seen"], want, rtol=1e-5, atol=1e-5)
    assert state.model_state == {}


class LinenNet(linen.Module):
    """Linen's BatchNorm and Dropout, with their own argument names."""

    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.Conv(4, (3, 3), use_bias=False)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = linen.Dropout(0.3, deterministic=not train)(linen.relu(x).mean((1, 2)))
        return linen.Dense(toys.CLASSES)(x)


@pytest.mark.slow
def test_a_linen_module_trains_alike_on_eight_devices():
    with jax.enable_x64(True):
        runs = [
            toys.train(
                as_model(LinenNet()), toys.data(48, dtype="float64"), backend=backend, devices=n, steps=4,
                batch_size=16, dtype="float64",
            )
            for backend, n in (("pmap", 1), ("pjit", 8))
        ]  # fmt: skip
    first, one, eight = runs[0][0], runs[0][1], runs[1][1]
    assert "batch_stats" in one.model_state
    assert toys.relative_error(eight.params, one.params)[0] < 1e-12
    assert toys.relative_error(eight.model_state, one.model_state)[0] < 1e-12
    assert toys.relative_error(first.model_state, one.model_state)[0] > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [as_model(LinenNet()), toys.MODELS["resnet"]()], ids=["linen", "nnx"]
)
def test_evaluation_uses_no_dropout_changes_no_state(model):
    examples = toys.data(16)
    params, state = model.init(jax.random.key(0), examples)
    batch = {**examples, "mask": np.ones(16, bool)}
    outputs = [model.apply(params, state, batch, jax.random.key(i), False) for i in (1, 2)]
    np.testing.assert_array_equal(outputs[0][0], outputs[1][0])
    jax.tree.map(np.testing.assert_array_equal, outputs[0][1], state)
    trained = [model.apply(params, state, batch, jax.random.key(i), True)[1] for i in (1, 1)]
    assert toys.relative_error(trained[0], state)[0] > 1e-3
    assert toys.relative_error(trained[0], trained[1])[0] == 0


@pytest.mark.slow
def test_clipping_is_by_the_mean_gradients_global_norm():
    examples, model = toys.data(16), toys.MODELS["mlp"]()
    forward = Forward(model, SoftmaxCrossEntropy())
    state = init_state(forward, UpdateRule(optax.sgd(1.0)), 8, examples)
    batch = read_batches(Arrays(**examples), EpochOrder(16, 16, 8, 0), [0], np.arange(8))
    updates = {}
    for clip in (None, 1e-3, 1e3):
        step = make_step(forward, UpdateRule(optax.sgd(1.0), clip))
        sums = toys.alone(step.grads, np.arange(8))(state, batch)
        new, metrics = step.apply(state, sums)
        updates[clip] = optax.tree.norm(jax.tree.map(jnp.subtract, new.params, state.params))
        norm = optax.tree.norm(jax.tree.map(lambda g, w=sums.weight: g / w, sums.grads))
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(updates[1e-3], 1e-3, rtol=1e-4)
    np.testing.assert_allclose(updates[1e3], updates[None], rtol=1e-6)


@pytest.mark.parametrize(
    "tx", [optax.sgd(0.1, momentum=0.9), optax.adamw(0.1)], ids=["sgd", "adamw"]
)
def test_an_update_that_may_be_skipped_copies_no_moments(tx):
    examples, forward = toys.data(16), Forward(toys.MODELS["mlp"](), SoftmaxCrossEntropy())
    state = init_state(forward, UpdateRule(tx), 8, examples)
    batch = read_batches(Arrays(**examples), EpochOrder(16, 16, 8, 0), [0], np.arange(8))
    step = make_step(forward, UpdateRule(tx))
    sums = jax.eval_shape(toys.alone(step.grads, np.arange(8)), state, batch)
    program = jax.jit(step.apply, donate_argnums=0).lower(state, sums).compile()
    assert program.memory_analysis().alias_size_in_bytes > 0
    assert not re.findall(r"f32\[\d+,\d+\]\S* copy\(", program.as_text())


@pytest.mark.slow
def test_gradients_that_are_not_finite_are_counted():
    examples = toys.data(16)
    examples["inputs"][3] = np.nan
    *_, metrics, _, _ = toys.train(
        toys.MODELS["mlp"](), examples, steps=1, devices=2, batch_size=16
    )
    assert metrics[0]["nonfinite_grads"] > 0
    *_, metrics, _, _ = toys.train(
        toys.MODELS["mlp"](), toys.data(16), steps=1, devices=2, batch_size=16
    )
    assert metrics[0]["nonfinite_grads"] == 0


def shapes(model, shape):
    params, _ = jax.eval_shape(model.init, jax.random.key(0), {"inputs": jnp.zeros((1, *shape))})
    return {path_string(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}


def test_resnet9_has_needles_shape():
    kernels = [
        s
        for p, s in shapes(as_model(lambda rngs: ResNet9(rngs=rngs)), (32, 32, 3)).items()
        if "kernel" in p
    ]
    want = [
        (7, 7, 3, 16), (3, 3, 16, 32), (3, 3, 32, 32), (3, 3, 32, 32), (3, 3, 32, 64), (3, 3, 64, 128),
        (3, 3, 128, 128), (3, 3, 128, 128), (128, 128), (128, 10),
    ]  # fmt: skip
    assert sorted(kernels) == sorted(want)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["needle", "dawnbench"])
def test_resnet9_gives_logits_for_any_image_size(variant):
    for shape in ((32, 32, 3), (28, 28, 1)):
        model = as_model(lambda rngs, s=shape: ResNet9(s, 7, variant, 4, rngs=rngs))
        params, state = jax.eval_shape(
            model.init, jax.random.key(0), {"inputs": jnp.zeros((2, *shape))}
        )
        batch = {
            "inputs": jax.ShapeDtypeStruct((2, *shape), jnp.float32),
            "mask": jax.ShapeDtypeStruct((2,), bool),
        }
        outputs, _ = jax.eval_shape(
            functools.partial(model.apply, train=True), params, state, batch, jax.random.key(0)
        )
        assert outputs.shape == (2, 7)


@pytest.mark.slow
def test_synchronized_batchnorm_sees_all_devices():
    """With one microbatch a device, the synchronized statistics are those of the whole batch."""
    examples = toys.data(16, dtype="float64")
    states = {}
    with jax.enable_x64(True):
        for sync in (True, False):
            model = as_model(
                lambda rngs, s=sync: CNN(toys.SHAPE, toys.CLASSES, (4,), sync=s, rngs=rngs)
            )
            _, state, *_ = toys.train(
                model, examples, devices=8, steps=1, batch_size=16, dtype="float64"
            )
            states[sync] = state.model_state["blocks"]["0"]["norm"]
        one = toys.train(
            model, examples, devices=1, microbatches=1, steps=1, batch_size=16, dtype="float64"
        )[1]
    whole = one.model_state["blocks"]["0"]["norm"]
    assert toys.relative_error(states[True], whole)[0] < 1e-12
    assert toys.relative_error(states[False], whole)[0] > 1e-3


def test_runs_that_differ_in_seed_share_their_programs(tmp_path):
    check_shared_programs("pmap", 1, "xla", 0, tmp_path)


@pytest.mark.slow
def test_the_seed_decides_what_dropout_drops():
    examples, forward = toys.data(8), Forward(toys.MODELS["dropout"](), SoftmaxCrossEntropy())
    step = make_step(forward, UpdateRule(optax.sgd(0.1)))
    state = init_state(
        forward, UpdateRule(optax.sgd(0.1)), 8, {k: v[:1] for k, v in examples.items()}
    )
    batch = read_batches(
        Arrays(**examples), EpochOrder(8, 8, 8, 0, shuffle=False), [0], np.arange(8)
    )
    grads = jax.jit(toys.alone(step.grads, np.arange(8)))
    losses = [
        float(grads(state.replace(seed=np.uint32(seed)), batch).loss)
        for seed in (0, 0, 1, 2**32 - 1)
    ]
    assert losses[0] == losses[1] and len({*losses}) == 3
