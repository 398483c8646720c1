"""Print {name: whether it has NumPy's bits} of float32 operations whose rounding XLA leaves to the
processor, as exact mode computes them.

NumPy rounds each operation, and its root correctly. A product adds in order, each term to the sum
before it is rounded: in float64, a product of two float32 is exact.
"""

# ruff: noqa: E402
import json

from jaxdp.exact import flags

flags.set_flags()

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.exact.products import lower_on_cpu


def product(x, w):
    total = np.zeros((len(x), w.shape[1]), np.float32)
    for k in range(len(w)):
        term = np.multiply(x[:, k : k + 1], w[k], dtype=np.float64)
        total = (total + term).astype(np.float32)
    return total


OPERATIONS = {  # name: (of XLA, of NumPy, shapes)
    "sum of products": (lambda x, y: x * y + y * y * x, None, (1003,), (1003,)),
    "reciprocal root": (
        lambda x: jax.lax.rsqrt(jnp.abs(x)),
        lambda x: np.float32(1) / np.sqrt(np.abs(x)),
        (1003,),
    ),
    "product": (jnp.dot, product, (8, 300), (300, 16)),
    "small product": (jnp.dot, product, (3, 8), (8, 5)),
}


def main():
    lower_on_cpu()
    rng, equal = np.random.default_rng(0), {}
    for name, (f, expected, *shapes) in OPERATIONS.items():
        args = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        got, want = np.asarray(jax.jit(f)(*args)), (expected or f)(*args)
        equal[name] = got.dtype == want.dtype and got.tobytes() == want.tobytes()
    print(json.dumps(equal))


if __name__ == "__main__":
    main()
