"""What the scripts of collectives share: this process, values to send, and comparisons, which are
counted.
"""

import os
import warnings

import jax.numpy as jnp
import numpy as np

import jaxdp

warnings.simplefilter("error")
context = jaxdp.init(backend=os.environ.get("BACKEND"))
rank, size = context.rank, context.size
done = 0
FLOATS = ["float16", "bfloat16", "float32"]
INTEGERS = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]
NUMPY = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def same(got, want, what):
    """Equal in type, shape and bits."""
    global done
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape, (
        what,
        got.dtype,
        want.dtype,
        got.shape,
        want.shape,
    )
    assert got.tobytes() == want.tobytes(), (what, got, want)
    done += 1


def values(dtype, r, shape=(2 * size, 3)):
    """Small integers that every type and every sum of them holds exactly; different on each rank."""
    x = np.random.default_rng(7 + r).integers(0 if dtype.startswith(("u", "b")) else -3, 4, shape)
    return (
        (x + 1j * x[::-1]).astype(dtype)
        if dtype.startswith("complex")
        else x.astype(jnp.dtype(dtype))
    )


def reduced(op, arrays):
    dtype = arrays[0].dtype
    out = arrays[0]
    for x in arrays[1:]:
        out = NUMPY["sum" if op == "avg" else op](out, x)
    return (
        (out.astype(np.float64) / len(arrays)).astype(dtype) if op == "avg" else out.astype(dtype)
    )


def group_of(groups):
    return [0, 1, 2, 3] if groups is None else next((g for g in groups if rank in g), [rank])


def fails(kind, call, *parts, speaker=None):
    """Every rank that takes part gets this error, and knows who prints it."""
    global done
    try:
        call()
    except kind as error:
        for part in parts:
            assert part in str(error), (part, str(error))
        assert speaker is None or error.rank == speaker, (error.rank, speaker)
        done += 1
    else:
        raise AssertionError(f"no {kind.__name__} ({parts})")
