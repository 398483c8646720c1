"""Whatever is split over the devices, the numbers are those of one device: against the oracle, and
for each optimizer against the run of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toys
from covering import cover, first, name, only, product
from jaxdp.models.base import Model
from jaxdp.precision import Policy
from judging import STAGES, THINNED, TOLERANCE, allowed, check_stage, layout, smallest, thinned


@pytest.mark.parametrize("row", first(1, sorted(cover(allowed, **STAGES), key=smallest)), ids=name)
def test_every_stage_agrees_with_the_oracle(row):
    check_stage(**row)


@pytest.mark.slow
@pytest.mark.parametrize("place", [("pmap", 1), ("pjit", 3)], ids=str)
def test_parameters_that_are_one_array_are_split(place):
    """Such a parameter has an empty path."""

    def flat(batch):
        return batch["inputs"].reshape(len(batch["inputs"]), -1)

    def init(key, batch):
        return (jax.random.normal(key, (flat(batch).shape[1], toys.CLASSES)), {})

    model = Model(init, lambda params, state, batch, key, train: (flat(batch) @ params, state))
    _, want, *_ = toys.train(model, toys.data(), steps=2)
    backend, zero = place
    _, state, *_ = toys.train(
        model, toys.data(), steps=2, backend=backend, devices=2, layout={"zero": zero}
    )
    assert toys.relative_error(state.params, want.params)[0] <= TOLERANCE["float32"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("row", product(thinned, **THINNED), ids=name)
def test_all_combinations_of_stages_agree_with_oracle(row):
    check_stage(**row)


OPTIMIZED = {
    "backend": ("pjit", "pmap"),
    "zero": (0, 1, 2, 3),
    "optimizer": tuple(toys.OPTIMIZERS),
    "place": ("8", "8/4", "8/2"),
    "gradient_buffer": ("sharded", "replicated"),
    "accumulate": ("scan", "vmap"),
}
ELEMENTWISE = ("adamw", "momentum", "lion")


def fits(row):
    """Under pmap's stage 1 an optimizer sees slices alone."""
    return allowed(row) and (row["backend"] == "pjit" or row["optimizer"] in ELEMENTWISE)


def everything(
    optimizer, backend="pjit", place="1", zero=0, gradient_buffer="sharded", accumulate="scan"
):
    """Dropout, microbatches of one row or two, two a device, clipping, EMA -> (what was computed,
    losses and norms).
    """
    _, state, metrics, *_ = toys.train(
        toys.MODELS["blocks"](dropout=0.2), toys.data(dtype="float64"), backend=backend, microbatches=16,
        accumulate=accumulate, optimizer=optimizer, ema=0.9, dtype="float64", steps=4,
        **layout(place, zero, gradient_buffer),
    )  # fmt: skip
    return (state.params, state.opt_state, state.extra["ema"]), [
        [m["loss"], m["grad_norm"]] for m in metrics
    ]


@functools.cache
def alone(optimizer):
    return everything(optimizer)


def check_optimizer(optimizer, **row):
    """One tolerance for all: each of them is smooth here, but Lion's sign, and what it takes the
    sign of is far from 0 (relative to float64), or, in rows of the embedding that no token looks
    up, exactly 0 on any number of devices."""
    with jax.enable_x64(True):
        want, want_metrics = alone(optimizer)
        got, metrics = everything(optimizer, **row)
        error, where = toys.relative_error(got, want)
    assert error <= 1e-12, f"{where}: {error:.2e}"
    np.testing.assert_allclose(metrics, want_metrics, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("row", first(1, cover(fits, **OPTIMIZED | {"zero": (1, 2, 3)})), ids=name)
def test_every_optimizer_agrees_with_one_device(row):
    check_optimizer(**row)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("row", product(fits, **OPTIMIZED), ids=name)
def test_every_optimizer_agrees_in_every_layout(row):
    check_optimizer(**row)


@pytest.mark.slow
def test_optimizers_move_weights_and_adafactor_factors():
    with jax.enable_x64(True):
        first = toys.train(
            toys.MODELS["blocks"](), toys.data(dtype="float64"), dtype="float64", steps=0
        )[0]
        for optimizer in toys.OPTIMIZERS:
            assert toys.relative_error(first.params, alone(optimizer)[0][0])[0] > 1e-3
        rows = alone("adafactor")[0][1][0].v_row
    assert rows["embed"]["embedding"].shape == (8,) and rows["blocks"]["stack"]["up"][
        "kernel"
    ].shape == (3, 24)


FEW = [
    ("pmap", "8", 1, "sharded"),
    ("pjit", "8", 1, "sharded"),
    ("pjit", "8/4", 2, "replicated"),
]
FEW += [("pjit", "8", 2, "sharded"), ("pjit", "8/2", 3, "sharded")]
BF16 = Policy(jnp.float32, jnp.bfloat16, jnp.float32)


def narrow(accumulate, backend="pjit", place="1", zero=0, gradient_buffer="sharded", **settings):
    return toys.train(
        toys.MODELS["blocks"](), toys.data(), backend=backend, microbatches=16, accumulate=accumulate,
        optimizer="momentum", steps=4, **layout(place, zero, gradient_buffer), **settings,
    )[1].params  # fmt: skip


@functools.cache
def narrow_alone(accumulate, policy):
    return narrow(accumulate, policy=policy)


@pytest.mark.slow
@pytest.mark.parametrize("stage", FEW, ids=str)
def test_bfloat16_agrees_with_bfloat16_on_one_device(stage):
    """bfloat16 rounds inside a microbatch only: what adds up is float32, and agrees as float32
    does.
    """
    one = narrow_alone("vmap", BF16)
    assert 1e-2 < toys.relative_error(one, narrow_alone("vmap", None))[0] < 1e-1  # it is bfloat16
    for accumulate in ("scan", "vmap"):
        error, where = toys.relative_error(narrow(accumulate, *stage, policy=BF16), one)
        assert error <= 1e-5, f"{accumulate} {where}: {error:.2e}"


@pytest.mark.slow
@pytest.mark.parametrize("stage", only([("pjit", "8", 2, "sharded")], FEW), ids=str)
def test_bfloat16_reduction_is_float32_to_its_rounding(stage):
    """bfloat16 rounds by up to 2^-9: each device's share, their sum, and what the sum over devices
    cancels.
    """
    got = narrow("scan", *stage, reduce_dtype=jnp.bfloat16)
    assert 2**-12 < toys.relative_error(got, narrow_alone("scan", None))[0] < 2**-6


@pytest.mark.parametrize("backend", ["pmap", "pjit"])
def test_gradients_sent_in_bfloat16_are_computed_at_once(backend):
    """What is only sent in 16 bits, here inside the derivative of each block, is no computation in
    16 bits: microbatches do not wait for each other, on any number of devices."""

    def loops(accumulate="vmap", **settings):
        strategy, step, batch = toys.build(
            toys.MODELS["blocks"](), toys.data(), backend=backend, devices=2, accumulate=accumulate, **settings
        )  # fmt: skip
        update = strategy.compile(step).update
        return str(jax.make_jaxpr(update)(strategy.init(), batch(0))).count("scan[")

    at_once = loops()
    assert at_once < loops("scan")
    assert loops(reduce_dtype=jnp.bfloat16) == at_once < loops(policy=BF16)
