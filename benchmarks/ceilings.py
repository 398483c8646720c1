"""What the device can do at best: a product of two bfloat16 matrices, and a copy of its memory. Prints JSON.

python -m benchmarks.ceilings [--tiny]
"""

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

REPEATS = 9


def seconds(f: Callable, *args: jax.Array) -> float:
    """Of one call: the median, after compilation."""
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main(tiny: bool) -> None:
    size, length, turns = (256, 1 << 20, 2) if tiny else (8192, 1 << 30, 20)

    @functools.partial(jax.jit, static_argnums=2)
    def products(a: jax.Array, b: jax.Array, turns: int) -> jax.Array:
        return jax.lax.fori_loop(0, turns, lambda _, x: x @ b, a)

    @functools.partial(jax.jit, static_argnums=1)
    def copies(x: jax.Array, turns: int) -> jax.Array:
        return jax.lax.fori_loop(0, turns, lambda i, x: x ^ i.astype(x.dtype), x)

    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16) / size**0.5
    x = jnp.zeros(length // 4, jnp.uint32)
    flops = turns * 2 * size**3 / seconds(lambda a, b: products(a, b, turns), a, b)
    traffic = turns * 2 * length / seconds(lambda x: copies(x, turns), x)
    device = jax.devices()[0]
    print(
        json.dumps(
            {
                "device": device.device_kind,
                "jax": jax.__version__,
                "bf16_matmul_flops": flops,
                "copy_bytes_per_s": traffic,
            }
        )
    )


if __name__ == "__main__":
    main("--tiny" in sys.argv[1:])
