"""Loss scaling, the average, frozen parameters, learning rates by path, rematerialization: each by
its formula, and the same in every layout."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import toys
from covering import cover, first, name, only, product
from jaxdp.config import Config, Optimizer
from jaxdp.errors import UsageError
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.models.base import Model
from jaxdp.optim import make_optimizer
from jaxdp.optim.optimizers import master_copy, with_master
from jaxdp.optim.optimizers import split as halves
from jaxdp.plan.hlo import collectives, summarize
from jaxdp.precision import LossScaling, Policy
from jaxdp.run.components import check_paths
from jaxdp.split import WHOLE, path_string, split_dims
from jaxdp.train.step import Forward, UpdateRule, make_step
from layouts import LAYOUTS, assert_same_bits, contents
from programs import compiled

F16 = Policy(jnp.float32, jnp.float16, jnp.float32)
every_layout = pytest.mark.parametrize("layout", only(["pjit-3"], LAYOUTS))


def overflowing(feature=5):
    """Data whose second batch has two rows, of different labels, with one large feature: whatever
    the model says, the gradient of that one row of `w` is too large for float16, and of nothing
    else."""
    examples = toys.data()
    flat = examples["inputs"].reshape(53, -1)
    flat[25:27, feature] = 6e4
    examples["labels"][25:27] = 0, 1
    return examples


def run(steps, *args, **settings):
    """(snapshots of the exported state before, after each update, metrics of each, the last state,
    strategy)
    """
    strategy, step, batch = toys.build(*args, devices=8, **settings)
    state, update = strategy.init(), strategy.compile(step).update

    def snapshot():
        return jax.tree.map(np.array, strategy.export(state))

    states, metrics = [snapshot()], []
    for i in range(steps):
        state, m = update(state, batch(i))
        states.append(snapshot())
        metrics.append(jax.device_get(m))
    return states, metrics, state, strategy


@functools.cache
def overflowed(layout):
    return run(
        8, toys.of_all_kinds(), overflowing(), policy=F16, scaling=LossScaling(16.0, interval=2), ema=0.9,
        **LAYOUTS[layout],
    )  # fmt: skip


@pytest.mark.slow
@every_layout
def test_an_overflow_skips_the_update_on_all_devices(layout):
    """The large gradient is in one device's slice of `w`, where that is split; none of the devices
    may update.
    """
    states, metrics, last, _ = overflowed(layout)
    bad = [i % 3 == 1 for i in range(8)]  # three batches an epoch
    for before, after, skipped in zip(states, states[1:], bad):
        assert after.step == before.step + 1
        if skipped:
            assert_same_bits(contents(after), contents(before))
        else:
            for a, b in zip(contents(after), contents(before)):
                assert toys.relative_error(a, b)[0] > 0
    assert [int(m["skipped"]) for m in metrics] == bad
    assert [0 < m["nonfinite_grads"] <= 3 for m in metrics] == bad  # of one row of three
    # Halved at 1, 4 and 7; doubled after 2 and 3, and after 5 and 6.
    assert [float(m["loss_scale"]) for m in metrics] == [16, 16, 8, 8, 16, 8, 8, 16]
    assert [float(s.loss_scale.value) for s in states[1:]] == [16, 8, 8, 16, 8, 8, 16, 8]
    assert [int(s.loss_scale.good) for s in states[1:]] == [1, 0, 1, 0, 0, 1, 0, 0]
    assert all(np.isfinite(m["loss"]) for m in metrics)
    assert (
        toys.relative_error(contents(states[-1]), contents(overflowed("pjit-0")[0][-1]))[0] < 1e-6
    )
    for x in jax.tree.leaves(
        (last.params, last.opt_state, last.loss_scale)
    ):  # the same wherever there is a copy
        copies = {}
        for shard in x.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for one, *others in copies.values():
            for other in others:
                np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_scale_never_falls_below_one():
    examples = toys.data(20)
    examples["inputs"][:, 0, 0, 0] = 6e4
    states, metrics, *_ = run(
        4, toys.of_all_kinds(), examples, policy=F16, scaling=LossScaling(4.0)
    )
    assert [int(m["skipped"]) for m in metrics[:3]] == [1, 1, 1]
    assert [float(s.loss_scale.value) for s in states] == [4, 2, 1, 1, 1]
    assert_same_bits(contents(states[3]), contents(states[0]))


@pytest.mark.slow
def test_a_static_scale_stays_and_skips_too():
    states, metrics, *_ = run(
        5,
        toys.of_all_kinds(),
        overflowing(),
        policy=F16,
        scaling=LossScaling(16.0, dynamic=False, interval=1),
    )
    assert [int(m["skipped"]) for m in metrics] == [0, 1, 0, 0, 1]
    assert {float(s.loss_scale.value) for s in states} == {16.0} and {
        int(s.loss_scale.good) for s in states
    } == {0}
    assert_same_bits(contents(states[2]), contents(states[1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "scaling", first(1, [LossScaling(2.0**10, dynamic=False, weight=20), LossScaling(2.0**10)])
)
def test_a_scale_of_a_power_of_two_changes_no_float32(scaling):
    """Nor does the weight that makes it one of the mean loss: a power of two is taken of that too."""
    plain, scaled = (
        run(4, toys.MODELS["mlp"](), toys.data(), scaling=s)[0][-1] for s in (None, scaling)
    )
    assert_same_bits((scaled.params, scaled.opt_state), (plain.params, plain.opt_state))


def losses(metrics):
    return np.array([m["loss"] for m in metrics])


@functools.cache
def float32_losses():
    return losses(run(12, toys.MODELS["blocks"](), toys.data(), optimizer="momentum")[1])


@pytest.mark.slow
@pytest.mark.parametrize("layout", first(1, ["pjit-3", "pmap-1", "pjit-0"]))
def test_float16_learns_as_float32_does(layout):
    """To 5e-3 of the loss: float16 rounds by up to 2^-11 = 5e-4, and 12 updates add up what that
    does.
    """
    _, metrics, *_ = run(
        12, toys.MODELS["blocks"](), toys.data(), optimizer="momentum", policy=F16, scaling=LossScaling(2.0**10),
        **LAYOUTS[layout],
    )  # fmt: skip
    assert not any(m["skipped"] for m in metrics)
    difference = np.abs(losses(metrics) / float32_losses() - 1)
    assert 1e-6 < difference.max() < 5e-3


@pytest.mark.parametrize("accumulate", first(1, ["vmap", "scan"]))
def test_sums_too_large_for_float16_do_not_overflow(accumulate):
    """Each of four microbatches has gradients that float16 can hold, and their sum is too large for
    it.
    """
    examples = toys.data(16)
    examples["inputs"].reshape(16, -1)[:4, 5] = 300.0
    examples["labels"][:4] = 0
    settings = {
        "batch_size": 4,
        "microbatches": 4,
        "policy": F16,
        "scaling": LossScaling(128.0),
        "steps": 4,
    }
    one, four = (
        toys.train(
            toys.MODELS["mlp"](),
            examples,
            devices=n,
            accumulate=accumulate,
            optimizer="momentum",
            **settings,
        )[2]
        for n in (1, 4)
    )
    for metrics in (one, four):
        assert [int(m["skipped"]) for m in metrics] == [0] * 4
        assert [float(m["loss_scale"]) for m in metrics] == [128.0] * 4
    np.testing.assert_allclose(losses(four)[:3], losses(one)[:3], rtol=1e-6)


def self_narrowing(dtype):
    """An MLP that computes in `dtype` of its own accord, whatever the policy says, as a Flax module
    may.
    """
    plain = toys.MODELS["mlp"]()

    def apply(params, model_state, batch, key, train):
        narrow = jax.tree.map(lambda x: x.astype(dtype), params)
        x = batch["inputs"].reshape(len(batch["inputs"]), -1).astype(dtype)
        hidden = jax.nn.relu(x @ narrow["layers"]["0"]["kernel"] + narrow["layers"]["0"]["bias"])
        return (hidden @ narrow["head"]["kernel"] + narrow["head"]["bias"]).astype(
            jnp.float32
        ), model_state

    return Model(plain.init, apply)


SIXTEEN_BITS = {
    "bfloat16": lambda: (
        toys.MODELS["mlp"](),
        {"policy": Policy(jnp.float32, jnp.bfloat16, jnp.float32)},
    ),
    "float16": lambda: (toys.MODELS["mlp"](), {"policy": F16, "scaling": LossScaling(interval=4)}),
    "bfloat16 in the model": lambda: (self_narrowing(jnp.bfloat16), {}),
    "float16 in the model": lambda: (self_narrowing(jnp.float16), {}),
    "bfloat16 blocks": lambda: (
        toys.MODELS["blocks"](),
        {"policy": Policy(jnp.float32, jnp.bfloat16, jnp.float32)},
    ),
    "float16 BatchNorm": lambda: (
        toys.MODELS["resnet"](),
        {"policy": F16, "scaling": LossScaling(interval=4)},
    ),
}


@functools.cache
def curve_of(kind, accumulate="vmap", steps=30, **where):
    model, settings = SIXTEEN_BITS[kind]()
    stage = {"layout": {"zero": where.pop("zero", 0)}}
    _, state, metrics, *_ = toys.train(
        model,
        toys.data(),
        accumulate=accumulate,
        optimizer="momentum",
        steps=steps,
        **settings,
        **stage,
        **where,
    )
    return (
        losses(metrics),
        [(int(m["skipped"]), float(m.get("loss_scale", 0))) for m in metrics],
        state.params,
    )


PLACES = [("pmap", n, zero) for n in (8, 2, 4, 1) for zero in (0, 1)]
PLACES += [("pjit", n, zero) for n in (4, 8, 2, 1) for zero in (3, 2, 1, 0)]
SETTINGS = {"kind": list(SIXTEEN_BITS), "accumulate": ["vmap", "scan"]}
COVER = cover(place=[*PLACES[:3], *PLACES[8:11]], **SETTINGS)


def check_sixteen_bits(kind, accumulate, place):
    """The same skips and scales, and the same curve to 1e-6: what is rounded is the same microbatch
    everywhere.
    """
    want, decisions, params = curve_of(kind)
    where = dict(zip(("backend", "devices", "zero"), place))
    curve, own_decisions, own_params = curve_of(kind, accumulate, **where)
    assert own_decisions == decisions
    np.testing.assert_allclose(curve, want, rtol=1e-6)
    assert toys.relative_error(own_params, params)[0] < 1e-5


@pytest.mark.parametrize("row", first(1, COVER), ids=name)
def test_sixteen_bits_end_at_the_microbatch(row):
    check_sixteen_bits(**row)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("row", product(place=PLACES, **SETTINGS), ids=name)
def test_sixteen_bits_end_at_the_microbatch_everywhere(row):
    check_sixteen_bits(**row)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["vmap", "scan"])
def test_what_overflows_does_not_depend_on_the_devices(accumulate):
    """On the verge of overflow."""
    settings = {
        "optimizer": "momentum",
        "policy": F16,
        "scaling": LossScaling(interval=4),
        "accumulate": accumulate,
    }
    one, eight = (
        toys.train(toys.MODELS["blocks"](), toys.data(), **settings, steps=16, **where)[2]
        for where in ({"devices": 1}, {"devices": 8, **LAYOUTS["pjit-3"]})
    )
    scales, skipped = (
        [[float(m[name]) for m in metrics] for metrics in (one, eight)] for name in WATCHED
    )
    assert scales[0] == scales[1] and skipped[0] == skipped[1] and sum(skipped[0]) > 2
    np.testing.assert_allclose(losses(eight), losses(one), rtol=1e-5)


WATCHED = ("loss_scale", "skipped")


class Faint(SoftmaxCrossEntropy):
    """A loss whose gradients are below float16's smallest number, 6e-8."""

    def __call__(self, outputs, batch):
        total, weight, metrics = super().__call__(outputs, batch)
        return 1e-8 * total, weight, metrics


@pytest.mark.slow
@pytest.mark.parametrize("layout", first(1, ["pmap-1", "pjit-3"]))
def test_the_scale_keeps_gradients_that_float16_loses(layout):
    def train(**settings):
        return run(
            1, toys.MODELS["mlp"](), toys.data(), optimizer=(optax.sgd(1e7), None), loss=Faint(), **LAYOUTS[layout],
            **settings,
        )[0]  # fmt: skip

    (first, want), (_, lost), (_, kept) = (
        train(), train(policy=F16), train(policy=F16, scaling=LossScaling(2.0**20)),
    )  # fmt: skip
    assert_same_bits(lost.params, first.params)

    def moved(state):
        return jax.tree.map(np.subtract, state.params, first.params)

    assert toys.relative_error(moved(kept), moved(want))[0] < 1e-2


@pytest.mark.slow
@every_layout
def test_the_average_follows_its_formula_in_evaluation(layout):
    """ema = decay x ema + (1 - decay) x params after each update, from the initial parameters."""
    with jax.enable_x64(True):
        strategy, step, batch = toys.build(
            toys.MODELS["blocks"](), toys.data(dtype="float64"), devices=8, ema=0.75, dtype="float64",
            **LAYOUTS[layout],
        )  # fmt: skip
        state, program = strategy.init(), strategy.compile(step)

        def exported():
            return jax.tree.map(np.array, strategy.export(state))

        want = exported().params
        for i in range(4):
            state, _ = program.update(state, batch(i))
            want = jax.tree.map(lambda e, p: 0.75 * e + 0.25 * p, want, exported().params)
        before = exported()
        assert toys.relative_error(before.extra["ema"], want)[0] < 1e-12
        assert toys.relative_error(before.params, want)[0] > 1e-2

        judge = jax.jit(
            toys.alone(
                make_step(
                    Forward(toys.MODELS["blocks"](), SoftmaxCrossEntropy()),
                    UpdateRule(optax.sgd(0.1)),
                ).evaluate,
                np.arange(8),
            )
        )
        one, _, rows = toys.build(
            toys.MODELS["blocks"](), toys.data(dtype="float64"), dtype="float64"
        )
        own = one.init().replace(params=jax.tree.map(jnp.asarray, want))
        whole = judge(own, {k: x[0] for k, x in rows(1).items()})
        got = program.evaluate(strategy.averaged(state), batch(1))
        own = program.evaluate(state, batch(1))
        np.testing.assert_allclose(got.loss / got.weight, whole.loss / whole.weight, rtol=1e-6)
        assert abs(own.loss / got.loss - 1) > 1e-3
        assert_same_bits(contents(exported()), contents(before))  # evaluating it took nothing away
        program.update(state, batch(4))


FROZEN = ("^embed/", "stack/up/")


def frozen_and_not(tree):
    """({path: leaf} of the frozen leaves, of the others)"""
    leaves = {path_string(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    frozen = {path for path in leaves if any(re.search(p, path) for p in FROZEN)}
    return {p: leaves[p] for p in frozen}, {p: x for p, x in leaves.items() if p not in frozen}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "accumulate"),
    [
        pytest.param(
            name,
            "vmap" if name == "pmap-1" else "scan",
            marks=[] if name == "pjit-3" else pytest.mark.slow,
        )
        for name in LAYOUTS
    ]
    + [pytest.param("pjit-3", "vmap", marks=pytest.mark.slow)],
)
def test_frozen_leaves_stay_and_cost_nothing(layout, accumulate):
    """No change of a bit, no optimizer state, no share in the norm; what trains is what trains
    without them as parameters."""
    settings = {"dtype": "float64", "microbatches": 16, "accumulate": accumulate, **LAYOUTS[layout]}
    with jax.enable_x64(True):
        model, examples = toys.MODELS["blocks"](), toys.data(dtype="float64")
        tx = optax.adam(1e-2)
        states, metrics, *_ = run(
            3, model, examples, optimizer=(tx, None), frozen=FROZEN, **settings
        )

        def grads(params):
            return jax.grad(mean_loss)(params, model, examples)

        still, moving = frozen_and_not(states[-1].params)
        assert_same_bits(still, frozen_and_not(states[0].params)[0])
        assert sorted(still) == [
            "blocks/stack/up/bias",
            "blocks/stack/up/kernel",
            "embed/embedding",
        ]

        own = frozen_and_not(grads(states[0].params))[1]
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in own.values()))
        np.testing.assert_allclose(metrics[0]["grad_norm"], norm, rtol=1e-12)
        moments = [x for x in jax.tree.leaves(states[-1].opt_state) if x.ndim]
        assert sorted(x.shape for x in moments) == sorted(2 * [x.shape for x in moving.values()])

        params, opt_state = (
            frozen_and_not(states[0].params)[1],
            tx.init(frozen_and_not(states[0].params)[1]),
        )
        updates, _ = tx.update(own, opt_state, params)
        first = frozen_and_not(states[1].params)[1]
        assert toys.relative_error(first, optax.apply_updates(params, updates))[0] < 1e-10


def mean_loss(params, model, examples):
    """Of the first batch of 20 rows."""
    batch = {**{k: v[:20] for k, v in examples.items()}, "mask": np.ones(20)}
    outputs, _ = model.apply(params, {}, batch, jax.random.key(0), True)
    return SoftmaxCrossEntropy()(outputs, batch)[0] / 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", only(["pjit-3"], [name for name in LAYOUTS if name != "hybrid-3"])
)
def test_frozen_gradients_are_not_on_the_wire(layout):
    """Bytes of what is reduced are those of what trains; only stage 3's forward pass needs the
    others whole.
    """
    strategy, step, _ = toys.build(
        toys.MODELS["blocks"](),
        toys.data(),
        devices=8,
        optimizer="momentum",
        frozen=FROZEN,
        **LAYOUTS[layout],
    )
    example = {"inputs": np.zeros((3, *toys.SHAPE), np.float32), "labels": np.zeros(3, np.int32)}
    lowered = strategy.compile(step).update.lower(
        *strategy.argument_shapes({**example, "mask": np.zeros(3, np.float32)})
    )
    rows = summarize(collectives(lowered.compile().as_text(), lowered.as_text()))

    dims = split_dims(strategy.shapes.params, 8, strategy.blocks)
    split = jax.tree.map(
        lambda x, dim: 0 if dim == WHOLE else x.size * 4, strategy.shapes.params, dims
    )
    frozen, trained = (sum(part.values()) for part in frozen_and_not(split))
    whole = sum(x.size * 4 for x in frozen_and_not(strategy.shapes.params)[1].values()) - trained
    assert frozen > trained > 10 * whole > 0
    if strategy.layout.opt_state:
        assert rows["reduce-scatter"].bytes == trained
        assert rows["all-gather"].bytes == trained + strategy.layout.params * frozen
        trained = 0
    assert (
        trained + whole <= rows["all-reduce"].bytes <= trained + whole + 64
    )  # the loss, the weight, the norm


@pytest.mark.slow
@pytest.mark.parametrize("layout", first(1, ["pmap-1", "pjit-0", "pjit-3"]))
def test_learning_rates_by_path_scale_the_updates(layout):
    factors = {
        "^embed/": 0.5,
        "down/kernel": 3.0,
        "embed": 100.0,
    }  # the first expression found decides

    def make(lr_scale):
        return make_optimizer(optax.adamw, lambda _: 0.1, 0.1, lr_scale=lr_scale)

    with jax.enable_x64(True):
        moved = []
        for lr_scale in ({}, factors):
            states, *_ = run(
                1, toys.MODELS["blocks"](), toys.data(dtype="float64"), optimizer=(make(lr_scale), None),
                dtype="float64", **LAYOUTS[layout],
            )  # fmt: skip
            moved.append(jax.tree.map(np.subtract, states[1].params, states[0].params))
    plain, scaled = moved
    want = jax.tree.map(np.copy, plain)
    want["embed"]["embedding"] *= 0.5
    want["blocks"]["stack"]["down"]["kernel"] *= 3.0
    assert toys.relative_error(scaled, want)[0] < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "policies"),
    [
        ("blocks", "pjit-3", ("full",)),
        pytest.param("blocks", "pjit-3", ("dots", "dots_no_batch"), marks=pytest.mark.slow),
        pytest.param("resnet", "pmap-0", ("full",), marks=pytest.mark.slow),
    ],
)
def test_what_is_computed_again_changes_no_number(model, layout, policies):
    """Of each block, where the same places are dropped again; or of a model without blocks as a
    whole.
    """
    arguments = {"dropout": 0.2} if model == "blocks" else {}
    with jax.enable_x64(True):
        plain, *others = (
            run(
                3, toys.MODELS[model](**arguments), toys.data(dtype="float64"), optimizer="adamw", dtype="float64",
                remat=remat, **LAYOUTS[layout],
            )[0][-1]
            for remat in ("none", *policies)
        )  # fmt: skip
    for state in others:
        assert toys.relative_error(contents(state)[:3], contents(plain)[:3])[0] < 1e-12


@pytest.mark.slow
def test_what_is_computed_again_is_not_kept():
    """Activations of 16 scanned blocks of 64 tokens, beside split gradients: less memory the less
    is kept.
    """
    temporaries = [
        compiled(
            zero=2, accumulate="vmap", slots=1, tokens=64, remat=remat
        ).memory.temp_size_in_bytes
        for remat in ("none", "dots", "dots_no_batch", "full")
    ]
    assert temporaries == sorted(temporaries, reverse=True)
    assert temporaries[-1] < 0.5 * temporaries[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", first(1, ["pjit-3", "pmap-1", "pjit-2"]))
def test_parameters_may_be_bfloat16(layout):
    """All of the state, and sums of gradients, in bfloat16: 16 microbatches added up in another
    order may round, by up to 2^-9, 16 times."""
    settings = {
        "optimizer": "momentum",
        "policy": toys.uniform("bfloat16"),
        "microbatches": 16,
        "accumulate": "scan",
    }
    states, metrics, *_ = run(
        4, toys.MODELS["blocks"](), toys.data(), ema=0.999, **settings, **LAYOUTS[layout]
    )
    assert {x.dtype.name for x in jax.tree.leaves((states[-1].params, states[-1].opt_state))} == {
        "bfloat16"
    }
    want = states[0].extra["ema"]
    for state in states[
        1:
    ]:  # biases are all movement, and a bfloat16 would not move by a thousandth of a step
        want = jax.tree.map(lambda e, p: e + 0.001 * (p.astype(np.float32) - e), want, state.params)
    assert (
        toys.relative_error(states[-1].extra["ema"], want)[0] < 2**-8
    )  # XLA may take the parameters before they are rounded
    _, one, want, *_ = toys.train(toys.MODELS["blocks"](), toys.data(), **settings, steps=4)
    assert toys.relative_error(states[-1].params, one.params)[0] < 2**-5
    np.testing.assert_allclose(losses(metrics), losses(want), rtol=1e-2)
    assert losses(metrics)[3] < losses(metrics)[0]


@functools.cache
def master_on_one_device(model):
    return with_master_copy(model, devices=1)


def with_master_copy(model, lr=1e-4, **where):
    """(losses, the float32 master copy, the exported state) of bfloat16 parameters"""
    tx = (with_master(optax.adamw(lr, weight_decay=0.1)), 1.0)
    settings = {"policy": toys.uniform("bfloat16"), "optimizer": tx, "steps": 10, **where}
    _, state, metrics, *_ = toys.train(toys.MODELS[model](), toys.data(), **settings)
    return losses(metrics), master_copy(state.params, state.opt_state), state


LEARNING = [
    ("mlp", "pmap-1"),
    ("blocks", "pjit-3"),
    ("blocks", "pmap-1"),
    ("mlp", "pjit-2"),
    ("mlp", "pmap-0"),
]
LEARNING += [("blocks", "hybrid-3")]


@pytest.mark.slow
@pytest.mark.parametrize("case", first(1, LEARNING), ids=str)
def test_bfloat16_parameters_learn_alike_in_any_layout(case):
    model, layout = case
    want, copy, _ = master_on_one_device(model)
    got, own_copy, state = with_master_copy(model, devices=8, **LAYOUTS[layout])
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert toys.relative_error(own_copy, copy)[0] < 1e-6
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"bfloat16"}
    jax.tree.map(np.testing.assert_array_equal, halves(own_copy)[0], state.params)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "blocks"])
def test_bfloat16_parameters_learn_as_float32_ones(model):
    """The forward pass reads the same bfloat16 values, but for ties."""
    tx, mixed = (
        (optax.adamw(1e-4, weight_decay=0.1), 1.0),
        Policy(jnp.float32, jnp.bfloat16, jnp.float32),
    )
    wide = losses(
        toys.train(toys.MODELS[model](), toys.data(), policy=mixed, optimizer=tx, steps=58)[2]
    )
    narrow, few = (
        with_master_copy(model, steps=58)[0],
        with_master_copy(model, steps=58, optimizer=tx)[0],
    )

    def fall(curve):
        return curve[0] - curve[57]  # of the same batch, of 3 in an epoch

    assert fall(wide) > 0.05 and abs(fall(narrow) / fall(wide) - 1) < 0.05
    assert fall(few) < 0.4 * fall(wide)  # without a master copy most of it is lost


MATCHLESS = {
    "frozen": (
        {"frozen": ["^embed/", "^nowhere"]},
        "optimizer.frozen: '^nowhere' matches no parameter; a path is such",
    ),
    "lr_scale": (
        {"lr_scale": {"kernell": 2.0}},
        "optimizer.lr_scale: 'kernell' matches no parameter; a path is such",
    ),
    "all frozen": ({"frozen": ["."]}, "optimizer.frozen: ['.'] leaves nothing to train"),
}


@pytest.mark.parametrize("case", MATCHLESS)
def test_expressions_that_match_nothing_are_refused(case):
    settings, words = MATCHLESS[case]
    params = jax.eval_shape(toys.MODELS["blocks"]().init, jax.random.key(0), toys.data(4))[0]
    check_paths(Config(optimizer=Optimizer(frozen=["^embed/"], lr_scale={"kernel$": 2.0})), params)
    with pytest.raises(UsageError, match=re.escape(words)):
        check_paths(Config(optimizer=Optimizer(**settings)), params)
