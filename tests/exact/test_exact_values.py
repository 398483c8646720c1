"""Values as integers: as precise as their dtype, and what is not finite is that of a sum of floats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.exact.fixed_point import restore_values, sum_values, value_exponents


def added(x, summands=None):
    """The sum of x [row, ...] as of two devices: the first rows, and the last."""
    x = jnp.asarray(x)
    summands = summands or len(x)
    exponent = value_exponents(x)
    one, two = (sum_values(part, exponent, summands) for part in (x[:1], x[1:]))
    total = two + one
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


@pytest.mark.quick(2)
@pytest.mark.parametrize("rows", [8, 2, 1000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_nonfinite_element_sums_as_floats_do(dtype, rows):
    inf, nan = np.inf, np.nan
    pairs = [(inf, 1), (1, inf), (inf, inf), (-inf, 3), (-inf, -inf), (inf, -inf), (-inf, inf)]
    pairs += [(nan, 1), (1, nan), (nan, -inf), (inf, nan), (1e-3, 2e-3), (0, 0)]
    x = np.zeros((rows, len(pairs)), dtype)
    x[[0, -1]] = np.array(pairs, dtype).T
    with jax.enable_x64(dtype == "float64"), np.errstate(invalid="ignore"):
        np.testing.assert_allclose(added(x), x.sum(0), rtol=2 * np.finfo(dtype).eps)
