"""Bfloat16 parameters follow their float32 master copy, whatever the optimizer and however small
the updates.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp.optim import check_elementwise
from jaxdp.optim.optimizers import Master, join, master_copy, split, with_master

RNG = np.random.default_rng(0)
VALUES = (RNG.normal(size=4096) * np.exp(8 * RNG.normal(size=4096))).astype(np.float32)
PARAMS = {
    "w": jnp.asarray(0.1 * RNG.normal(size=(64, 48)), jnp.bfloat16),
    "b": jnp.zeros(48, jnp.bfloat16),
}
BITS = np.array(
    [0x3F808000, 0x3F818000, 0xBF808000, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0x7F800000], np.uint32
)


def test_the_halves_join_and_the_upper_is_the_nearest():
    """Also of ties, of numbers below the normal ones, and of infinity."""
    for x in (VALUES, BITS.view(np.float32)):
        high, low = jax.jit(split)(x)
        np.testing.assert_array_equal(
            np.asarray(join(high, low)).view(np.uint32), x.view(np.uint32)
        )
        finite = np.isfinite(np.asarray(high, np.float32))
        nearest = np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float32)
        errors = [np.abs(np.asarray(y, np.float64)[finite] - x[finite]) for y in (high, nearest)]
        assert (errors[0] <= errors[1]).all(), x[finite][errors[0] > errors[1]]


def gradients(steps, scale=lambda i: 1.0):
    rng = np.random.default_rng(1)

    def draw(x):
        return jnp.asarray(rng.normal(size=x.shape), jnp.bfloat16)

    return [
        jax.tree.map(lambda x, i=i: draw(x) * jnp.bfloat16(scale(i)), PARAMS) for i in range(steps)
    ]


def descend(tx, dtype, grads):
    """(the first values, the last ones, parameters, optimizer state)"""
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    state = tx.init(params)
    first = master_copy(params, state)

    @jax.jit
    def update(params, state, grads):
        updates, state = tx.update(
            jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params), state, params
        )
        return optax.apply_updates(params, updates), state

    for g in grads:
        params, state = update(params, state, g)
    return first, master_copy(params, state), params, state


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-5, weight_decay=0.1),
    "sgd": lambda: optax.sgd(1e-5, 0.9, nesterov=True),
    "lion": lambda: optax.lion(1e-6),
    "adafactor": lambda: optax.adafactor(1e-5, min_dim_size_to_factor=8),
    "muon": lambda: optax.contrib.muon(1e-5),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_float32_parameters(name):
    """To a few roundings of float32; and parameters are the master copy, rounded."""
    grads = gradients(9)  # odd: steps of one size do not cancel out
    _, want, *_ = descend(OPTIMIZERS[name](), jnp.float32, grads)
    first, got, params, state = descend(with_master(OPTIMIZERS[name]()), jnp.bfloat16, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), got, want)
    jax.tree.map(np.testing.assert_array_equal, split(got)[0], params)
    assert {x.dtype.name for x in jax.tree.leaves(state.inner) if x.ndim} == {"float32"}
    assert all((a != b).mean() > 0.99 for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(got)))


def test_without_a_master_copy_few_elements_move():
    tx, moved = optax.adam(1e-5), lambda a, b: float((a["w"] != b["w"]).mean())
    first, last, *_ = descend(tx, jnp.bfloat16, gradients(20))
    assert moved(first, last) < 0.1
    first, last, *_ = descend(with_master(tx), jnp.bfloat16, gradients(1))
    assert moved(first, last) > 0.99


def test_a_second_moment_falls_again():
    grads = gradients(200, scale=lambda i: 1.0 if i == 0 else 1e-3)

    def after(tx, steps):
        return descend(tx, jnp.bfloat16, grads[:steps])[3]

    tx, nu = optax.adam(1e-3), lambda state: np.asarray(state.nu["b"], np.float32)
    first = nu(after(tx, 1)[0])
    large = first > 1e-4
    np.testing.assert_array_equal(
        nu(after(tx, 200)[0])[large], first[large]
    )  # in bfloat16 it never does
    falls = nu(after(with_master(tx), 200).inner[0]) / nu(after(with_master(tx), 1).inner[0])
    np.testing.assert_allclose(falls[large], 0.999**199, rtol=1e-2)


def test_slices_padding_and_wide_parameters():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    check_elementwise(with_master(optax.adamw(1e-3)), shapes, 8)
    check_elementwise(
        with_master(optax.adamw(1e-3)),
        {"a": jax.ShapeDtypeStruct((1031,), jnp.bfloat16)},
        2,
        pad=True,
    )
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), PARAMS)
    state = with_master(optax.adam(1e-3)).init(wide)
    assert isinstance(state, Master) and state.low is None and master_copy(wide, state) is wide
