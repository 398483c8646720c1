"""Ways to compute a layer side by side: forward and backward, each against the first of its table, which is in use.

    taskset -c 0 python benchmarks/kernels.py [--json FILE] [TABLE ...]

TABLE: product, attention, convolution, normalization, loss, embedding; all where left out. Milliseconds are
the smallest and the median of interleaved repeats; `differs` is the largest difference of values and gradients from the
first way's, over their largest. On one core with NPROC=1; where JAX finds a GPU, on that.
"""

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxdp
from jaxdp.cpu import convolve, product
from jaxdp.logits import Logits
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.models.attention import causal
from jaxdp.models.gpt import look_up
from jaxdp.models.normalization import standardize

REPEATS, CALLS = 11, 4
MICROBATCHES = 8
DIMS = lax.conv_dimension_numbers((1, 1, 1, 1), (1, 1, 1, 1), ("NHWC", "HWIO", "NHWC"))
Ways = dict[str, Callable[..., jax.Array]]  # (x, *weights) -> y of a microbatch


def normal(i: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(i), shape)


def products() -> dict[str, tuple[Ways, tuple, tuple]]:
    """{case: (ways, arguments with microbatches, weights)}"""

    def apart(x: jax.Array, w: jax.Array) -> jax.Array:
        """The gradient is turned once it is made."""
        turned = lax.optimization_barrier(lax.optimization_barrier(w).T)
        return lax.dot_general(x, turned, (((x.ndim - 1,), (1,)), ((), ())))

    ways: Ways = {"product": product, "jax": jnp.matmul, "turned afterwards": apart}
    sizes = [(256, 1024), (1024, 256), (256, 256), (768, 3072), (3072, 768)]
    return {f"256 tokens x 8, {a} to {b}": (ways, (normal(0, 8, 2, 128, a),), (normal(1, a, b),)) for a, b in sizes}


def attentions() -> dict[str, tuple[Ways, tuple, tuple]]:
    def interleaved(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        scores = jnp.einsum("etkw,eskw->ekts", query, key) / query.shape[-1] ** 0.5
        seen = jnp.tri(query.shape[1], dtype=bool)
        return jnp.einsum("ekts,eskw->etkw", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), value)

    jaxs = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    ways: Ways = {"heads together": causal, "heads interleaved, jax's softmax": interleaved, "jax.nn": jaxs}
    shape = lambda tokens: (8, 2048 // 8 // 128, tokens, 4, 64) if tokens == 128 else (4, 1, tokens, 4, 64)
    return {f"{t} tokens": (ways, tuple(normal(i, *shape(t)) for i in range(3)), ()) for t in (128, 512)}


def convolutions() -> dict[str, tuple[Ways, tuple, tuple]]:
    """The layers of Needle's ResNet-9, 16 images a microbatch."""
    cases: dict[str, tuple[Ways, tuple, tuple]] = {}
    layers = [(32, 3, 16, 7, 4), (8, 16, 32, 3, 2), (4, 32, 32, 3, 1), (4, 32, 64, 3, 2), (2, 64, 128, 3, 2)]
    for side, inputs, outputs, window, stride in [*layers, (1, 128, 128, 3, 1)]:
        pad = (window - 1) // 2

        def run(f: Callable, x: jax.Array, w: jax.Array, stride: int = stride, pad: int = pad) -> jax.Array:
            return f(x, w, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=DIMS)

        ways: Ways = {
            "convolve": functools.partial(run, convolve),
            "lax": functools.partial(run, lax.conv_general_dilated),
        }
        name = f"{side}x{side}x{inputs} by {window}x{window} / {stride} to {outputs}"
        weights = (normal(1, window, window, inputs, outputs) / window,)
        cases[name] = ways, (normal(0, MICROBATCHES, 16, side, side, inputs),), weights
    return cases


def normalizations() -> dict[str, tuple[Ways, tuple, tuple]]:
    def centred(x: jax.Array, scale: jax.Array) -> jax.Array:
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale

    def own(x: jax.Array, scale: jax.Array) -> jax.Array:
        return standardize(x, 1e-5, True) * scale

    def moments(x: jax.Array, scale: jax.Array) -> jax.Array:
        """As Flax's."""
        mean = x.mean(-1, keepdims=True)
        variance = jnp.maximum(0, jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean))
        return (x - mean) * (lax.rsqrt(variance + 1e-5) * scale)

    ways: Ways = {"own derivative": own, "moments": moments, "centred": centred}
    return {"2048 x 256": (ways, (normal(0, 8, 2, 128, 256),), (1 + normal(1, 256),))}


def losses() -> dict[str, tuple[Ways, tuple, tuple]]:
    labels = jax.random.randint(jax.random.key(2), (8, 2, 128), 0, 256)

    def own(x: jax.Array, labels: jax.Array, kernel: jax.Array) -> jax.Array:
        batch = {"labels": labels, "mask": jnp.ones(labels.shape)}
        return SoftmaxCrossEntropy()(Logits(x, kernel, 256), batch)[0]

    def one_hot(x: jax.Array, labels: jax.Array, kernel: jax.Array) -> jax.Array:
        logits = x @ kernel.T
        return jnp.sum(jax.nn.logsumexp(logits, -1) - jnp.sum(jax.nn.one_hot(labels, 256) * logits, -1))

    def pick(x: jax.Array, labels: jax.Array, kernel: jax.Array) -> jax.Array:
        logits = x @ kernel.T
        return jnp.sum(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0])

    ways: Ways = {"with accuracy": own, "gather": pick, "one-hot": one_hot}
    return {"2048 tokens of 256": (ways, (normal(0, 8, 2, 128, 256), labels), (normal(1, 256, 256) / 16,))}


def embeddings() -> dict[str, tuple[Ways, tuple, tuple]]:
    tokens = jax.random.randint(jax.random.key(0), (8, 2, 128), 0, 256)
    one_hot = lambda tokens, table: jax.nn.one_hot(tokens, len(table)) @ table
    ways: Ways = {"take": lambda tokens, table: look_up(table, tokens), "one-hot": one_hot}
    return {"2048 tokens of 256 x 256": (ways, (tokens,), (normal(1, 256, 256),))}


TABLES: dict[str, Callable[[], dict[str, tuple[Ways, tuple, tuple]]]] = {
    "product": products,
    "attention": attentions,
    "convolution": convolutions,
    "normalization": normalizations,
    "loss": losses,
    "embedding": embeddings,
}


def backward(way: Callable, mapped: tuple, weights: tuple) -> Callable:
    """The values and the gradients along fixed directions, over microbatches at once, as a step takes them."""
    arguments = (*mapped, *weights)
    axes = (*[0] * len(mapped), *[None] * len(weights))
    floats = tuple(i for i, x in enumerate(arguments) if jnp.issubdtype(x.dtype, jnp.floating))
    all_of = jax.vmap(way, axes)
    shape = jax.eval_shape(all_of, *arguments).shape
    direction = normal(9, *shape)

    def run(direction: jax.Array, *arguments: jax.Array) -> Any:
        def total(*arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = all_of(*arguments)
            return jnp.sum(y * direction), y

        (_, y), found = jax.value_and_grad(total, floats, has_aux=True)(*arguments)
        return y, found

    return functools.partial(jax.jit(run), direction, *arguments)


def measure(case: str, ways: Ways, mapped: tuple, weights: tuple) -> list[dict[str, Any]]:
    """A row for each way."""
    runs = {name: backward(way, mapped, weights) for name, way in ways.items()}
    values = {name: jax.block_until_ready(run()) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(REPEATS):
        for name in list(runs)[:: 1 if repeat % 2 else -1]:
            began = time.perf_counter()
            for _ in range(CALLS):
                found = runs[name]()
            jax.block_until_ready(found)
            times[name].append(1e3 * (time.perf_counter() - began) / CALLS)
    first = jax.tree.leaves(values[next(iter(runs))])
    away = lambda a, b: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))
    return [
        {
            "case": case,
            "way": name,
            "min_ms": round(min(times[name]), 3),
            "median_ms": round(statistics.median(times[name]), 3),
            "differs": max(map(away, jax.tree.leaves(values[name]), first)),
        }
        for name in runs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE")
    parser.add_argument("--json")
    asked = parser.parse_args()
    if unknown := set(asked.tables) - set(TABLES):
        parser.error(f"{unknown} are not among {', '.join(TABLES)}")
    jaxdp.init()
    rows = []
    for table in asked.tables or TABLES:
        for case, setup in TABLES[table]().items():
            rows += [{"table": table, **row} for row in measure(case, *setup)]
            for row in rows[-len(setup[0]) :]:
                print("{table:14} {case:34} {way:34} {min_ms:8.3f} {median_ms:8.3f} ms {differs:.0e}".format(**row))
    wrong = [f"{row['table']}, {row['case']}, {row['way']}" for row in rows if row["differs"] > 1e-4]
    where = {"device": jax.devices()[0].device_kind, "cores": len(os.sched_getaffinity(0)), "jax": jax.__version__}
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump({**where, "rows": rows}, file, indent=1)
    if wrong:
        raise SystemExit(f"they do not agree: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
