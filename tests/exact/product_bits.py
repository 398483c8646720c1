"""Print {name: SHA-256 of the value and the gradients} of products, convolutions, sums and
elementwise functions of a dtype (the first argument), as exact mode computes them; of every n-th of
them (the second).

The sums are long and their results small, so libraries divide the sums among threads; XLA divides
the loops of elementwise functions, and the ends of each part are computed with scalar instructions.
"""

# ruff: noqa: E402
import functools
import hashlib
import json
import pathlib
import sys

from jaxdp.exact import flags

flags.set_flags()

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from convolutions import convolution
from jaxdp.exact.products import lower_on_cpu

SHAPES = {  # name: (einsum, shapes)
    "kernel": ("nk,km->nm", (16384, 64), (64, 64)),
    "wide kernel": ("nk,km->nm", (8192, 256), (256, 256)),
    "three inputs": ("nk,km->nm", (60000, 3), (3, 32)),
    "vectors": ("k,k->", (70000,), (70000,)),
    "heads": ("btd,dhk->bthk", (16, 512, 64), (64, 4, 16)),
    "experts": ("ecd,edf->ecf", (4, 2048, 32), (4, 32, 64)),
    "scores": ("bqhd,bkhd->bhqk", (4, 256, 4, 32), (4, 256, 4, 32)),
}
CONVOLUTIONS = {  # name: (shape of the input, of the kernel, other arguments)
    "small": ((8, 8, 8, 3), (3, 3, 3, 8), {}),
    "strided": ((32, 32, 32, 3), (7, 7, 3, 64), {"window_strides": (2, 2)}),
    "grouped": ((32, 16, 16, 16), (3, 3, 4, 32), {"feature_group_count": 4}),
    "depthwise": ((32, 16, 16, 16), (3, 3, 1, 16), {"feature_group_count": 16}),
    "1d": ((64, 512, 16), (5, 16, 32), {}),
    "3d": ((4, 16, 16, 16, 4), (3, 3, 3, 4, 8), {}),
}
SUMS = {  # name: (shape, axes)
    "rows": ((64, 512, 128), (0, 1)),
    "columns": ((16, 70000), (1,)),
    "all": ((300000,), (0,)),
}


def smooth(x):
    y = jnp.exp(-x * x) + x * jax.lax.erf(x)
    return jnp.tanh(y) * jnp.log1p(jnp.abs(x)) + jnp.exp(0.3 * x) * y


ELEMENTWISE = {  # name: (function, shape)
    "vector": (smooth, (30007,)),
    "few columns": (smooth, (4000, 7)),
    "logarithm": (lambda x: jnp.log(x * x + 1) * x + jnp.exp(x) * 0.7, (4000, 7)),
}


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(f, *args):
    value, pull = jax.vjp(f, *args)
    return value, *pull(jnp.cos(value))


def main():
    lower_on_cpu()
    functions = {
        k: (lambda x, w, f=f: jnp.einsum(f, x, w), a, b) for k, (f, a, b) in SHAPES.items()
    }
    functions |= {
        k: (lambda x, w, m=m: convolution(x, w, **m), a, b) for k, (a, b, m) in CONVOLUTIONS.items()
    }
    functions |= {
        f"sum of {k}": (lambda x, axes=axes: jnp.sum(jnp.sin(x), axes), a)
        for k, (a, axes) in SUMS.items()
    }
    functions |= {f"elementwise {k}": (f, a) for k, (f, a) in ELEMENTWISE.items()}
    rng, bits = np.random.default_rng(0), {}
    for name, (f, *shapes) in [*functions.items()][:: int(sys.argv[2])]:
        args = [jnp.asarray(rng.standard_normal(s), sys.argv[1]) for s in shapes]
        digest = hashlib.sha256()
        for x in value_and_gradients(f, *args):
            digest.update(np.asarray(x).tobytes())
        bits[name] = digest.hexdigest()
    print(json.dumps(bits))


if __name__ == "__main__":
    main()
