"""Products, convolutions and sums of exact mode: the values of JAX's own, the same bits on any
number of threads.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from convolutions import convolution
from jaxdp.exact import products
from launch import together

GEOMETRIES = {
    "strided": ((2, 9, 8, 3), (3, 3, 3, 4), {"window_strides": (2, 3)}),
    "grouped": ((2, 6, 6, 6), (3, 3, 3, 4), {"feature_group_count": 2}),
    "transposed": (
        (2, 4, 5, 3),
        (3, 3, 3, 4),
        {"lhs_dilation": (2, 3), "padding": ((1, 2), (-1, 2))},
    ),
    "same": ((2, 7, 6, 3), (3, 2, 3, 4), {}),
    "one position": ((2, 5, 5, 3), (5, 5, 3, 4), {"padding": "VALID"}),
    "1x1": ((2, 5, 4, 3), (1, 1, 3, 4), {}),
    "dilated": ((2, 9, 8, 3), (3, 2, 3, 4), {"rhs_dilation": (2, 3)}),
    "depthwise": ((2, 6, 6, 4), (3, 3, 1, 8), {"feature_group_count": 4}),
    "groups of the batch": ((4, 6, 6, 3), (3, 3, 3, 4), {"batch_group_count": 2}),
    "1d": ((2, 9, 3), (4, 3, 5), {}),
    "3d": ((2, 4, 5, 6, 2), (2, 3, 3, 2, 3), {}),
    "no position": ((2, 3, 6, 3), (5, 3, 3, 4), {"padding": "VALID"}),
    "no example": ((0, 7, 6, 3), (3, 2, 3, 4), {}),
    "no channel": ((2, 7, 6, 0), (3, 2, 0, 4), {}),
}


def by_products(f, *args):
    """f(*args), with each convolution, product and sum evaluated as `lower_on_cpu` lowers it."""
    closed = jax.make_jaxpr(f)(*args)
    values = dict(
        zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *args], strict=True)
    )
    replaced = {
        "conv_general_dilated": products._convolution,
        "dot_general": products._transposed_dot,
    }
    replaced["reduce_sum"] = products._sum
    count = 0
    for eqn in closed.jaxpr.eqns:
        count += eqn.primitive.name in replaced
        inputs = [x.val if isinstance(x, Literal) else values[x] for x in eqn.invars]
        bind = replaced.get(eqn.primitive.name) or eqn.primitive.bind
        out = bind(*inputs, **eqn.params)
        values.update(
            zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True)
        )
    assert count or not all(x.size for x in args)
    return [values[x] for x in closed.jaxpr.outvars]


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_convolution_and_its_gradients_equal_jaxs(name, dtype):
    x_shape, w_shape, more = GEOMETRIES[name]
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), dtype) for s in (x_shape, w_shape))

    def f(x, w):
        return convolution(x, w, **more)

    out = jnp.asarray(rng.standard_normal(f(x, w).shape), dtype)

    def backward(i):
        def pull(x, w, out):
            def of_one(t):
                return f(*(t if i == j else a for j, a in enumerate((x, w))))

            return jax.linear_transpose(of_one, (x, w)[i])(out)

        return pull

    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    for g, args in ((f, (x, w)), (backward(0), (x, w, out)), (backward(1), (x, w, out))):
        got, want = jax.jit(
            lambda *args, g=g: (*by_products(g, *args), *jax.tree.leaves(g(*args)))
        )(*args)
        assert got.dtype == want.dtype and got.shape == want.shape
        np.testing.assert_allclose(
            got.astype("float32"), want.astype("float32"), tolerance, 8 * tolerance
        )


PRODUCTS = {  # (shapes, the contracted and the batch dimensions of both)
    "kernel": ((5, 3), (5, 4), (((0,), (0,)), ((), ()))),
    "batch": ((2, 5, 3), (2, 5, 4), (((1,), (1,)), ((0,), (0,)))),
    "batch in the middle": ((3, 2, 5), (5, 2, 4), (((2,), (0,)), ((1,), (1,)))),
    "two contracted": ((5, 3, 6), (6, 5, 4), (((0, 2), (1, 0)), ((), ()))),
    "vector": ((5,), (5, 4), (((0,), (0,)), ((), ()))),
    "smaller first": ((2, 5, 3), (2, 5, 7, 4), (((1,), (1,)), ((0,), (0,)))),
    "outer": ((3,), (4,), (((), ()), ((), ()))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_that_of_jax(name):
    x_shape, y_shape, dimensions = PRODUCTS[name]
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (x_shape, y_shape))

    def f(x, y):
        return jax.lax.dot_general(x, y, dimensions)

    got, want = jax.jit(lambda x, y: (*by_products(f, x, y), f(x, y)))(x, y)
    np.testing.assert_allclose(got, want, 1e-5, 1e-6)


SUMS = {  # (shape, axes)
    "rows": ((2, 130, 40), (0, 1)),
    "rows of each": ((3, 2, 300, 33), (1, 2)),
    "more than a product's": ((70000, 32), (0,)),
    "few rows": ((8, 40), (0,)),
    "columns": ((40, 300), (1,)),
    "all": ((40, 300), (0, 1)),
    "apart": ((40, 50, 60), (0, 2)),
    "none": ((40, 50), ()),
    "empty": ((0, 50), (0,)),
}


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_sum_is_that_of_numpy(name, dtype):
    shape, axes = SUMS[name]
    x = jnp.asarray(3 * np.random.default_rng(0).standard_normal(shape), dtype)
    (got,) = by_products(lambda x: jax.lax.reduce_sum_p.bind(x, axes=axes, out_sharding=None), x)
    x = np.asarray(x).astype("float64")
    error = np.abs(np.asarray(got).astype("float64") - x.sum(axes))
    assert got.dtype == dtype and got.shape == error.shape
    assert np.all(
        error <= {"float32": 1e-5, "bfloat16": 2e-2, "int32": 0}[dtype] * np.abs(x).sum(axes)
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize(("threads", "each"), [(("2", "32"), 3), (("2", "5", "32"), 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_have_the_same_bits_on_any_threads(dtype, threads, each):
    job = [
        sys.executable,
        str(pathlib.Path(__file__).with_name("product_bits.py")),
        dtype,
        str(each),
    ]
    done = together([(job, {"NPROC": number}) for number in threads], timeout=600, devices=1)
    bits = [json.loads(run.stdout.splitlines()[-1]) for run in done]
    assert len(bits[0]) > 15 // each
    for other in bits[1:]:
        assert {name for name in bits[0] if bits[0][name] != other[name]} == set()


@pytest.mark.quick(1)
@pytest.mark.parametrize("isa", ["", "SSE4_2"])
def test_operations_have_the_bits_of_numpy(isa):
    """What the processor would decide: no product is left unrounded in a sum, a root is rounded
    correctly, and a product adds in order. `isa`: the instruction set that the environment names.
    """
    job = [sys.executable, str(pathlib.Path(__file__).with_name("numpy_bits.py"))]
    env = {"XLA_FLAGS": f"--xla_cpu_max_isa={isa}" if isa else ""}
    [done] = together([(job, env)], timeout=300)
    equal = json.loads(done.stdout.splitlines()[-1])
    assert len(equal) == 4 and all(equal.values()), equal
