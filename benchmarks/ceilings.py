"""What the device can do at best: a product of two bfloat16 matrices, and a copy of its memory; and
which attention GPT-2's shapes get there. Prints JSON.

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

from jaxdp.errors import one_line
from jaxdp.models.attention import fused

REPEATS = 9


def seconds(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Of one call, which takes what the last one gave: the median, after compilation."""
    x = jax.block_until_ready(f(x))
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        x = jax.block_until_ready(f(x))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def attention(heads: int, tokens: int) -> str:
    """cudnn where its kernel runs forward and backward, else why not."""

    def total(x: jax.Array) -> jax.Array:
        return fused(x, x, x).astype(jnp.float32).sum()

    try:
        x = jnp.ones((2, tokens, heads, 64), jnp.bfloat16)
        jax.block_until_ready(jax.jit(jax.grad(total))(x))
    except Exception as error:
        return f"not cudnn: {type(error).__name__}: {one_line(error)[:500]}"
    return "cudnn"


def main(argv: list[str]) -> None:
    tiny = "--tiny" in argv
    size, length, turns = (256, 1 << 20, 2) if tiny else (8192, 1 << 30, 20)

    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16) / size**0.5

    @functools.partial(jax.jit, donate_argnums=0)
    def products(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, turns, lambda _, x: x @ b, a)

    @functools.partial(jax.jit, donate_argnums=0)
    def copies(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, turns, lambda i, x: x ^ i.astype(x.dtype), x)

    flops = turns * 2 * size**3 / seconds(lambda a: products(a, b), a)
    traffic = turns * 2 * length / seconds(copies, jnp.zeros(length // 4, jnp.uint32))
    device = jax.devices()[0]
    print(
        json.dumps(
            {
                "device": device.device_kind,
                "jax": jax.__version__,
                "bf16_matmul_flops": flops,
                "copy_bytes_per_s": traffic,
                "attention": attention(*(2, 64) if tiny else (12, 1024)),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
