"""Collectives of one process: what they give without others, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.interop import kernels


def test_alone_every_collective_gives_back_what_it_got():
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    for f in (
        jaxdp.allreduce,
        jaxdp.allgather,
        jaxdp.reduce,
        jaxdp.reduce_scatter,
        jaxdp.broadcast,
        jaxdp.gather,
    ):
        np.testing.assert_array_equal(f(x), x)
    for f in (jaxdp.scatter, jaxdp.all_to_all):
        np.testing.assert_array_equal(f([x, jnp.ones(4, jnp.bfloat16)])[0], x)


def test_a_timeout_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("JAXDP_TIMEOUT", "soon")
    with pytest.raises(jaxdp.UsageError, match="JAXDP_TIMEOUT='soon'"):
        jaxdp.allreduce(np.ones(2, np.float32))


def test_a_collective_needs_init_in_a_job_of_several(monkeypatch):
    monkeypatch.setattr("jaxdp.process.context._current", None)
    for name, value in {
        "JAXDP_COORDINATOR": "h:1",
        "JAXDP_NUM_PROCESSES": "2",
        "JAXDP_PROCESS_ID": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for call in (jaxdp.allreduce, jaxdp.broadcast, lambda x: jaxdp.send(x, 0)):
        with pytest.raises(
            jaxdp.UsageError, match=r"call jaxdp\.init\(\) first: there are 2 processes"
        ):
            call(np.ones(2, np.float32))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jaxdp.allreduce(np.array(["a"])), "cannot be sent"),
        (lambda: jaxdp.allreduce({"a": 1}), "cannot be sent"),
        (lambda: jaxdp.allreduce(None), "cannot be sent"),
        (lambda: jaxdp.allreduce(np.ones(2, np.int64) << 40), "int64 would be cut to int32"),
        (lambda: jaxdp.allreduce(np.ones(2, np.float32), op="mean"), "is not one of"),
        (lambda: jaxdp.allreduce(np.ones(2, np.int32), op="avg"), "the average of int32"),
        (lambda: jaxdp.reduce(np.ones(2, np.float32), root="a"), "root='a' is not a rank"),
        (lambda: jaxdp.broadcast(np.ones(2, np.float32), root=1), "root=1 is not a rank"),
        (lambda: jaxdp.broadcast(np.ones(2, np.float32), root=None), "root=None is not a rank"),
        (lambda: jaxdp.broadcast(None), "cannot be sent"),
        (lambda: jaxdp.allreduce(np.ones(2, np.float32), op=["sum"]), "is not one of sum"),
        (lambda: jaxdp.allgather(np.ones(2, np.float32), axis=1), "has no dim 1"),
        (lambda: jaxdp.allreduce(np.ones(2, np.float32), groups=[0, 1]), "give lists of ranks"),
        (lambda: jaxdp.allreduce(np.ones(2, np.float32), groups=[[0, 1]]), "1 is not a rank"),
        (lambda: jaxdp.send(np.ones(2, np.float32), 0), "cannot send to itself"),
    ],
)
def test_what_cannot_work_is_refused_in_words(call, words):
    with pytest.raises(jaxdp.UsageError) as error:
        call()
    assert words in str(error.value)


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "float4_e2m1fn", "float8_e5m2", "bool", "bfloat16", "complex64"]
)
def test_the_bits_of_numbers_of_any_width_come_back(dtype):
    """As they do on GPUs, where an array is not packed on the host."""
    x = jnp.arange(8).astype(dtype) * jnp.asarray(
        -1 if dtype not in ("uint4", "bool") else 1, dtype
    )
    bits = jax.jit(kernels.to_bits)(x)
    assert jnp.issubdtype(bits.dtype, jnp.unsignedinteger)
    got = jax.jit(kernels.from_bits, static_argnums=1)(bits, x.dtype)
    assert got.dtype == x.dtype and np.asarray(got).tobytes() == np.asarray(x).tobytes()


def test_an_eager_collective_in_jit_names_the_module():
    with pytest.raises(jaxdp.UsageError, match=r"use jax\.lax"):
        jax.jit(jaxdp.allreduce)(np.ones(2, np.float32))
