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

WEIGHT = "weight/"
Scalars = dict[str, jax.Array]


def check_result(result: Any) -> tuple[jax.Array, jax.Array, Scalars]:
    """Return a loss's (sum, weight, metrics), with pairs as two entries. Raises UsageError for
    anything else.

    Floats become at least float32: a bfloat16 counts up to 256, and the order of the sums would
    change the result."""
    three = isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], Mapping)
    for name in result[2] if three else ():
        if not isinstance(name, str) or name in RESERVED or name.startswith(WEIGHT):
            raise UsageError(
                f"loss: a metric is called {name!r}, which every record contains already; give it another name"
            )

    def is_scalar(x):
        return getattr(x, "shape", None) == ()

    if not three or not all(map(is_scalar, (*result[:2], *flat(result[2]).values()))):

        def kind(x):
            return (
                f"{x.dtype}{list(x.shape)}"
                if hasattr(x, "shape")
                else f"a Python {type(x).__name__}"
            )

        got = str(jax.tree.map(kind, result)).replace("'", "")
        raise UsageError(
            f"loss: it returned {got}; a loss returns (sum [], weight [], {{name: sum [] or (sum [], weight [])}}), "
            "e.g. jnp.sum(jnp.where(mask != 0, losses, 0) * mask) and jnp.sum(mask), with mask = batch['mask']"
        )
    if not jnp.issubdtype(result[0].dtype, jnp.floating):
        raise UsageError(
            f"loss: its sum is {result[0].dtype}, which has no gradient; return a sum of real numbers"
        )
    metrics = flat(result[2])
    for name in metrics:
        if (
            own_weight := metrics.get(WEIGHT + name)
        ) is not None:  # what is not finite and was not counted
            metrics[name] = jnp.where(
                (own_weight != 0) | jnp.isfinite(metrics[name]), metrics[name], 0
            )
    return jax.tree.map(at_least_float32, (result[0], result[1], metrics))


def at_least_float32(x: Any) -> Any:
    return (
        x.astype(jnp.float32)
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        else x
    )


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
    empty = {
        name.removeprefix(WEIGHT)
        for name, value in means.items()
        if name.startswith(WEIGHT) and value == 0
    }
    means = {name: float(value) for name, value in means.items() if not name.startswith(WEIGHT)}
    derived = derive(means)
    unknown = {name for name, value in derived.items() if empty and math.isnan(value)}
    return {
        name: value for name, value in {**means, **derived}.items() if name not in empty | unknown
    }
