"""Every optimizer and schedule of the tables, by contract."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp.optim import OPTIMIZERS, SCHEDULES, decay_mask, make_optimizer, make_schedule

PARAMS = {"layer": {"kernel": jnp.full((4, 4), 2.0), "bias": jnp.full(4, 2.0)}, "norm": {"scale": jnp.ones(4) * 2}}
NO_DECAY = [r"(^|/)(bias|scale)$"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_descends_and_decays_only_kernels(name):
    tx = make_optimizer(OPTIMIZERS[name], optax.constant_schedule(0.01), 0.1, NO_DECAY)

    @jax.jit
    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(30):
        params, state = update(params, state, jax.tree.map(lambda p: 2 * p, params))
    assert all(float(jnp.abs(p).max()) < 2 for p in jax.tree.leaves(params))
    params, _ = update(PARAMS, tx.init(PARAMS), jax.tree.map(jnp.zeros_like, PARAMS))
    assert float(jnp.abs(params["layer"]["kernel"] - 2).min()) > 0
    np.testing.assert_array_equal(params["layer"]["bias"], PARAMS["layer"]["bias"])
    np.testing.assert_array_equal(params["norm"]["scale"], PARAMS["norm"]["scale"])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_warms_up_peaks_and_ends(name):
    lr = make_schedule(name, 0.5, 100, 10 if name != "one_cycle" else 0)
    values = np.array([lr(i) for i in range(101)])
    assert values.max() == pytest.approx(0.5, rel=1e-3)
    if name != "one_cycle":
        np.testing.assert_allclose(values[:10], np.arange(10) * 0.05, atol=1e-6)
    assert values[100] == pytest.approx(0.5 if name == "constant" else 0.0, abs=1e-3)
    assert make_schedule("cosine", 0.5, 100, 0, final=0.1)(100) == pytest.approx(0.05)


def test_the_decay_mask_goes_by_path():
    assert decay_mask(NO_DECAY)(PARAMS) == {"layer": {"kernel": True, "bias": False}, "norm": {"scale": False}}
    assert decay_mask(["^norm/"])(PARAMS)["layer"] == {"kernel": True, "bias": True}


def test_any_optax_transformation_is_a_target():
    tx = make_optimizer(optax.rmsprop, optax.constant_schedule(0.1), decay=0.8)
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert float(updates["layer"]["bias"][0]) < 0
    with pytest.raises(ValueError, match=r"weight_decay: 0\.1 but rmsprop takes none"):
        make_optimizer(optax.rmsprop, optax.constant_schedule(0.1), 0.1)
