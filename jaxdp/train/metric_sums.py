"""Sums and weights: a loss returns (sum, weight, metrics); a metric is a sum, divided by the loss's
weight, or a pair (sum, its own weight). Inside an update a pair becomes two entries, `name` and
`weight/name`, so that metrics are one dict of scalars everywhere.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.errors import UsageError
from jaxdp.metrics.writer import RESERVED
from jaxdp.precision import at_least_float32

WEIGHT = "weight/"
Scalars = dict[str, jax.Array]


def check_result(result: Any) -> tuple[jax.Array, jax.Array, Scalars]:
    """Return a loss's (sum, weight, metrics), with pairs as two entries. Raises UsageError for
    anything else.

    Floats become at least float32: a bfloat16 counts up to 256, and the order of the sums would
    change the result."""
    is_triple = isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], Mapping)
    for name in result[2] if is_triple else ():
        if not isinstance(name, str) or name in RESERVED or name.startswith(WEIGHT):
            raise UsageError(
                f"loss: a metric is called {name!r}, which every record contains already; give it another name"
            )
    metrics = flat(result[2]) if is_triple else {}

    def is_scalar(x: Any) -> bool:
        return getattr(x, "shape", None) == ()

    def kind(x: Any) -> str:
        is_array = hasattr(x, "shape")
        return f"{x.dtype}{list(x.shape)}" if is_array else f"a Python {type(x).__name__}"

    if not is_triple or not all(map(is_scalar, (*result[:2], *metrics.values()))):
        got = str(jax.tree.map(kind, result)).replace("'", "")
        raise UsageError(
            f"loss: it returned {got}; a loss returns (sum [], weight [], {{name: sum [] or (sum [], weight [])}}), "
            "e.g. jnp.sum(jnp.where(mask != 0, losses, 0) * mask) and jnp.sum(mask), with mask = batch['mask']"
        )
    loss, weight, _ = result
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise UsageError(
            f"loss: its sum is {loss.dtype}, which has no gradient; return a sum of real numbers"
        )
    for name, total in metrics.items():
        if (own_weight := metrics.get(WEIGHT + name)) is not None:
            counted = (own_weight != 0) | jnp.isfinite(total)
            metrics[name] = jnp.where(counted, total, 0)  # else it would be 0 times infinity
    return jax.tree.map(at_least_float32, (loss, weight, metrics))


def flat(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a loss with each pair (sum, weight) as the entries `name` and
    `weight/name`.
    """
    result = dict[str, Any]()
    for name, value in metrics.items():
        pair = isinstance(value, tuple | list) and len(value) == 2
        result |= {name: value[0], WEIGHT + name: value[1]} if pair else {name: value}
    return result


def divide(metrics: Mapping[str, Any], weight: Any, xp: Any = jnp) -> dict[str, Any]:
    """Return the mean of each metric, NaN where its own weight is 0; and these weights, for
    `make_record`.

    xp: jax.numpy, or numpy for sums on the host.
    """

    def mean(name: str, value: Any) -> Any:
        if name.startswith(WEIGHT):
            return value
        if (own_weight := metrics.get(WEIGHT + name)) is None:
            return value / weight
        return xp.where(own_weight != 0, value / xp.where(own_weight != 0, own_weight, 1), xp.nan)

    return {name: mean(name, value) for name, value in metrics.items()}


def make_record(
    means: Mapping[str, float], derive: Callable[..., Mapping[str, float]]
) -> dict[str, float]:
    """Return the numbers to report: the means that `divide` returns, and the numbers that `derive`
    computes from them.

    A metric whose own weight is 0 is NaN for `derive` and omitted from the report, as are derived
    numbers that are NaN."""
    weights = {name for name in means if name.startswith(WEIGHT)}
    empty = {name.removeprefix(WEIGHT) for name in weights if means[name] == 0}
    means = {name: float(means[name]) for name in means if name not in weights}
    derived = derive(means)
    unknown = {name for name, value in derived.items() if empty and math.isnan(value)}
    record = {**means, **derived}
    return {name: record[name] for name in record if name not in empty | unknown}
