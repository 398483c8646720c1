"""What may be applied to slices of the parameters is told from what may not, by its operations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxdp.errors import UsageError
from jaxdp.optim import (
    OPTIMIZERS,
    check_elementwise,
    decay_mask,
    make_optimizer,
    scale_by_path,
    zero1,
)

F32 = np.float32
PARAMS = {
    "layer": {
        "kernel": jax.ShapeDtypeStruct((16, 8), F32),
        "bias": jax.ShapeDtypeStruct((8,), F32),
    },
    "head": {"kernel": jax.ShapeDtypeStruct((8, 24), F32), "bias": jax.ShapeDtypeStruct((3,), F32)},
}
MASK = decay_mask(["bias$"])


def BY_PATH(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: str(path[0].key), params)


ELEMENTWISE = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, 0.9),
    "nesterov": optax.sgd(0.1, 0.9, nesterov=True),
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3, weight_decay=0.1, mask=MASK),
    "a warm-up from zero": optax.adamw(optax.linear_schedule(0.0, 1e-3, 100)),
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-3, centered=True, momentum=0.9),
    "adagrad": optax.adagrad(0.1),
    "adabelief": optax.adabelief(1e-3),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-3),
    "labels by path": optax.multi_transform(
        {"layer": optax.sgd(0.1), "head": optax.adam(0.1)}, BY_PATH
    ),
    "masked": optax.masked(optax.adam(0.1), MASK),
    "clip by value": optax.chain(optax.clip(1.0), optax.adam(0.1)),
    "zero nans": optax.chain(optax.zero_nans(), optax.adam(0.1)),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "a state of another dtype": optax.adam(1e-3, mu_dtype=jnp.bfloat16),
    "accumulation": optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation(),
    "the loss as an argument": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
    "by path": optax.chain(optax.adam(0.1), scale_by_path({"bias$": 0.5})),
}
NOT = {
    "lars": optax.lars(1e-3),
    "noise": optax.add_noise(0.1, 0.5, 0),
    "centralize": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "block norm": optax.scale_by_param_block_norm(),
    "clip by block rms": optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)),
    "clip after adam": optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0)),
    "clip in one group": optax.multi_transform(
        {"layer": optax.sgd(0.1), "head": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))}, BY_PATH
    ),
    "clip, then accumulate": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), 4
    ).gradient_transformation(),
    "skip what is not finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "the slice's size": optax.stateless(lambda updates, params: jax.tree.map(lambda g: g / g.shape[0], updates)),
    **{
        f"clip at {x}": optax.chain(optax.clip_by_global_norm(x), optax.adam(1e-3))
        for x in (1e-3, 1.0, 1e3)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_ones_are_accepted(name):
    check_elementwise(ELEMENTWISE[name], PARAMS, 8)


@pytest.mark.parametrize("name", NOT)
def test_others_are_refused_in_one_line(name):
    operation = r"(\w+ of head/kernel \w+\[8,24\] differs on slices|.*depend on the shape of a parameter that is split)"
    with pytest.raises(
        UsageError, match=rf"^optimizer: it is not elementwise: {operation}; .*adamw.*pjit$"
    ):
        check_elementwise(NOT[name], PARAMS, 8)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_table_is_told_apart(name):
    tx = make_optimizer(OPTIMIZERS[name], optax.constant_schedule(1e-3), 0.1, ["bias$"])
    if name in ("lamb", "adafactor", "muon"):
        with pytest.raises(UsageError, match="not elementwise"):
            check_elementwise(tx, PARAMS, 8)
    else:
        check_elementwise(tx, PARAMS, 8)


def test_where_nothing_is_split_everything_is_accepted():
    odd = {"a": jax.ShapeDtypeStruct((3, 5), F32), "b": jax.ShapeDtypeStruct((), F32)}
    check_elementwise(optax.lamb(1e-3), odd, 2)
    check_elementwise(optax.lamb(1e-3), PARAMS, 1)
    whole_norm = optax.masked(
        optax.scale_by_trust_ratio(), {"a": False, "b": True}
    )  # of the leaf that is not split
    check_elementwise(
        whole_norm, {"a": jax.ShapeDtypeStruct((16,), F32), "b": jax.ShapeDtypeStruct((3,), F32)}, 2
    )


def test_adafactor_is_refused_for_its_factoring_alone():
    plain = optax.adafactor(1e-3, multiply_by_parameter_scale=False, clipping_threshold=None)
    with pytest.raises(UsageError, match="not elementwise"):
        check_elementwise(plain, {"a": jax.ShapeDtypeStruct((1024, 4096), F32)}, 8)
    check_elementwise(plain, {"a": jax.ShapeDtypeStruct((1024, 64), F32)}, 8)


def test_stacked_blocks_and_other_dtypes():
    params = {
        "blocks": {"kernel": jax.ShapeDtypeStruct((8, 6, 4), jnp.bfloat16)},
        "phase": jax.ShapeDtypeStruct((4,), np.complex64),
        "conv": jax.ShapeDtypeStruct((3, 3, 512, 512), np.float16),
        "age": jax.ShapeDtypeStruct((4,), np.int32),
    }
    check_elementwise(optax.sgd(0.1, 0.9), params, 2, ["blocks"])
    with pytest.raises(UsageError, match="not elementwise"):
        check_elementwise(optax.scale_by_trust_ratio(), params, 2, ["blocks"])


def test_what_fails_on_slices_is_refused_with_a_reason():
    def update(updates, state, params=None):
        if updates["head"]["kernel"].shape != (8, 24):
            raise TypeError("only for\n[8, 24]")
        return updates, state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with pytest.raises(
        UsageError,
        match=r"^optimizer: it fails on slices .*: TypeError: only for \[8, 24\]; .*pjit$",
    ):
        check_elementwise(tx, PARAMS, 8)


MESH = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
PLACES = {
    "pmap": lambda f: jax.pmap(f, "batch")(jnp.ones(8)),
    "shard_map": lambda f: jax.shard_map(
        f, mesh=MESH, in_specs=P("batch"), out_specs=P("batch"), check_vma=False
    )(jnp.ones(8)),
    "jit": lambda f: jax.jit(f)(jnp.ones(8)),
    "jit of shard_map in a mesh": lambda f: jax.jit(
        jax.shard_map(f, mesh=MESH, in_specs=P("batch"), out_specs=P("batch"), check_vma=False)
    )(jnp.ones(8)),
    "eval_shape": lambda f: jax.eval_shape(f, jnp.ones(8)),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(jnp.ones(8)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("place", "x64"), [*((place, False) for place in PLACES), ("pmap", True), ("jit", True)]
)
def test_it_works_wherever_it_is_called(place, x64):
    """While JAX traces something else, and under settings that forbid NaNs and transfers."""
    good, bad = (
        optax.sgd(optax.linear_schedule(0.0, 1e-3, 7)),
        optax.chain(optax.clip_by_global_norm(1.0)),
    )  # unseen
    seen = []

    def f(x):
        params = {"a": jnp.ones((8, 4), x.dtype) * x.sum()}
        check_elementwise(good, params, 8)
        with pytest.raises(UsageError, match="not elementwise"):
            check_elementwise(bad, params, 8)
        seen.append(x)
        return x * 2

    with jax.enable_x64(x64), jax.debug_nans(True):
        PLACES[place](f)
    assert seen


def constant(updates, params):
    return jax.tree.map(lambda g: g * np.linspace(0, 1, g.shape[0])[:, None], updates)


def power(updates, params):
    return jax.tree.map(lambda g: g ** g.shape[0], updates)


def later(updates, state, params=None):
    """The norm of a gradient counts in the next update only."""
    return jax.tree.map(lambda g: g * state, updates), optax.tree.norm(updates)


def looped(updates, params):
    return jax.tree.map(
        lambda g: jax.lax.scan(lambda total, row: (total + row, total), g[0], g)[1], updates
    )


FOUND = {
    "a constant": optax.stateless(constant),
    "a parameter of an operation": optax.stateless(power),
    "the state of the next update": optax.GradientTransformation(
        lambda params: jnp.ones(()), later
    ),
    "a loop over a split dim": optax.stateless(looped),
    "a loop inside a branch": optax.stateless(
        lambda g, params: jax.lax.cond(True, looped, looped, g, params)
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_depends_on_a_shape_is_found(name):
    with pytest.raises(UsageError, match="not elementwise"):
        check_elementwise(FOUND[name], {"a": jax.ShapeDtypeStruct((16, 3), F32)}, 4)


def test_a_padded_size_decides_nothing():
    """A leaf of 1,031 elements becomes 1,032 on two devices; an operation that only the padded leaf
    has is found.
    """
    leaf = {"a": jax.ShapeDtypeStruct((1031,), F32)}
    check_elementwise(optax.adam(1e-3), leaf, 2, pad=True)

    def negate(g):
        return -g if g.shape[0] > 1031 else g

    with pytest.raises(UsageError, match="not elementwise"):
        check_elementwise(
            optax.stateless(lambda u, params: jax.tree.map(negate, u)), leaf, 2, pad=True
        )


def test_zero1_refuses_while_it_is_traced():
    tx = zero1(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "batch")
    with pytest.raises(UsageError, match="not elementwise"):
        jax.pmap(tx.init, "batch")({"kernel": jnp.ones((8, 16, 8))})
