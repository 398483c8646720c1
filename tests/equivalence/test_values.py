"""What is summed besides gradients, and what the mask excludes: model state of all sizes, infinities, NaN in padding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import toys
from jaxdp.parallel.fixed_point import largest_exponent, quantize_values, restore_values


# --- values as integers ---------------------------------------------------------------------------------------------


def added(x, summands=None):
    """The sum of x [row, ...] as of two devices: the first rows, and the last."""
    x = jnp.asarray(x)
    summands = summands or len(x)
    exponent = largest_exponent(x, 0)
    one, two = (quantize_values(part, exponent, summands).sum(0) for part in (x[:1], x[1:]))
    total = two.astype(one.dtype) + one
    assert total.dtype == (jnp.int64 if x.dtype == jnp.float64 else jnp.int32)
    return np.asarray(restore_values(total, exponent, summands))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_element_has_the_precision_of_its_dtype(dtype):
    info = np.finfo(dtype)
    with jax.enable_x64(dtype == "float64"):
        exponents = np.linspace(np.log2(info.tiny) + 60, np.log2(info.max) - 4, 200)
        rng = np.random.default_rng(0)
        x = (rng.uniform(0.1, 1, (8, 200)) * 2**exponents).astype(dtype)
        for signs in (1, rng.choice([-1, 1], 200)):
            want = (signs * x).astype(np.longdouble).sum(0)
            np.testing.assert_allclose(added(signs * x), want.astype(dtype), rtol=2 * info.eps)
        tiny, largest = np.full((8, 1), info.tiny), np.full((8, 1), info.max, dtype)
        assert added(tiny.astype(dtype))[0] == dtype_of(dtype, 8 * info.tiny)
        assert np.isinf(added(largest)).all() and added(largest[:1], 8) == info.max
        assert added(np.zeros((8, 3), dtype)).tolist() == [0, 0, 0]


def dtype_of(dtype, value):
    return np.dtype(dtype).type(value)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [2, 8, 1000])
def test_what_is_not_finite_concerns_one_element_and_is_that_of_a_sum_of_floats(dtype, rows):
    inf, nan = np.inf, np.nan
    pairs = [(inf, 1), (1, inf), (inf, inf), (-inf, 3), (-inf, -inf), (inf, -inf), (-inf, inf)]
    pairs += [(nan, 1), (1, nan), (nan, -inf), (inf, nan), (1e-3, 2e-3), (0, 0)]
    x = np.zeros((rows, len(pairs)), dtype)
    x[[0, -1]] = np.array(pairs, dtype).T
    with jax.enable_x64(dtype == "float64"), np.errstate(invalid="ignore"):
        np.testing.assert_allclose(added(x), x.sum(0), rtol=2 * np.finfo(dtype).eps)


# --- model state ----------------------------------------------------------------------------------------------------


def expected(examples, rows):
    """The state after one update, from the real rows of each microbatch, in float64."""
    x = examples["inputs"][rows].reshape(len(rows), -1).astype(np.float64)
    pieces = [x[m::8] for m in range(min(8, len(rows)))]
    mean = lambda f: sum(len(x) / len(rows) * f(x) for x in pieces)
    squares = mean(lambda x: (x * x).mean(0)) * toys.SIZES
    phase = mean(lambda x: (np.cos(x[:, :2]) + 1e-6j * np.sin(x[:, :2])).mean(0))
    least, most = mean(lambda x: x[:, :3].min(0)), mean(lambda x: x[:, :3].max(0))
    extremes = {"least": [*least, np.inf], "most": [*most, -np.inf]}
    return {"squares": squares, **extremes, "phase": phase, "calls": 1}


def alike(got, want, rtol=1e-6):
    for name, value in want.items():
        for part in (np.real, np.imag):
            np.testing.assert_allclose(part(got[name]), part(value), rtol=rtol, err_msg=name)


SETTINGS = [{"devices": 1}, {"devices": 3, "backend": "pjit", "layout": {"zero": 2}}]


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [53, 5])  # 5: microbatches that have no example
@pytest.mark.parametrize("reduction", ["exact", "bucket", "exact8"])
def test_state_of_all_sizes_and_infinities_is_averaged_element_by_element(reduction, size):
    """Squares of sizes from 1e-30 to 1e30 in one leaf."""
    examples, states = toys.data(size), []
    for settings in SETTINGS:
        _, state, metrics, *_ = toys.train(
            toys.tracking(), examples, steps=1, reduction=reduction, optimizer=(optax.sgd(0.1), None), **settings
        )
        assert metrics[0]["skipped"] == 0
        states.append(state.model_state)
        alike(state.model_state, expected(examples, np.arange(min(20, size))))
    if reduction == "exact":
        jax.tree.map(np.testing.assert_array_equal, *states)
