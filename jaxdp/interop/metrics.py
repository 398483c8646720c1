"""Averages of metrics over all ranks, weighted by the number of examples."""

import json
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from jaxdp.errors import UsageError, one_line
from jaxdp.process import protocol
from jaxdp.process.context import joined
from jaxdp.split import path_string


def allreduce_metrics(metrics: Any, weight: Any = 1.0) -> Any:
    """Return the weighted mean over the ranks of each number in `metrics`, as Python floats,
    bit-equal on every rank.

    metrics: a dict, or any pytree, of scalars (JAX, NumPy or Python), with the same names on all
    ranks. weight: the weight of this rank, usually its number of examples; or a tree like
    `metrics`, or a prefix of it, with a weight for each metric (for the accuracy of a class, its
    examples). A rank of
    weight 0 is ignored, even with NaN; if all weights are 0, the mean is NaN. The values are
    exchanged as text in double precision, and the call blocks: call it on all ranks together, where
    metrics are printed.

    Raises UsageError on every rank if names differ or a value is not a number; DistributedError if
    a rank does not call it within JAXDP_TIMEOUT seconds (60).
    """
    context = joined()
    message: dict[str, Any] = {"names": []}
    try:
        paths, structure = jax.tree_util.tree_flatten_with_path(metrics)
        message["names"] = [path_string(path) or "metrics" for path, _ in paths]
        message["terms"] = [
            (_weight(number), _scalar(name, value))
            for number, name, (_, value) in zip(
                jax.tree.leaves(jax.tree.broadcast({"weight": weight}, {"weight": metrics})),
                message["names"],
                paths,
            )
        ]
    except (UsageError, ValueError) as error:  # names that cannot be sorted
        message["error"] = one_line(error)
    texts = context.exchange("allreduce_metrics", json.dumps(message), protocol.default_timeout())
    ranks = [json.loads(text) for text in texts]
    for rank, received in enumerate(ranks):
        if "error" in received:
            raise UsageError(
                f"allreduce_metrics: {context.title(rank)}: {received['error']}", rank=rank
            )
        if received["names"] != ranks[0]["names"]:
            raise UsageError(
                f"allreduce_metrics: {context.title(rank)} has {', '.join(received['names']) or 'none'}, but "
                f"{context.title(0)} has {', '.join(ranks[0]['names']) or 'none'}: they must be the same",
                rank=0,
            )
    means = map(_mean, zip(*(received["terms"] for received in ranks)))
    return jax.tree.unflatten(structure, means)


def _mean(terms: Sequence[tuple[float, float]]) -> float:
    """Return the mean of (weight, value) pairs with one rounding, ignoring weight 0; NaN if nothing
    is left.
    """
    counted = [(Fraction(weight), value) for weight, value in terms if weight]
    if not counted:
        return math.nan
    if infinite := [value for _, value in counted if not math.isfinite(value)]:
        return sum(infinite)
    total = sum(weight * Fraction(value) for weight, value in counted)
    return float(total / sum(weight for weight, _ in counted))


def _weight(value: Any) -> float:
    number = _scalar("weight", value)
    if not 0 <= number < math.inf:
        raise UsageError(f"weight: {number} is not a number of examples; give 0 or more")
    return number


def _scalar(name: str, value: Any) -> float:
    if isinstance(value, jax.core.Tracer):
        raise UsageError(f"{name!r} is traced: call allreduce_metrics outside jit")
    try:
        if isinstance(value, np.ma.MaskedArray) or np.asarray(value).dtype.kind in "cSUmM":
            raise TypeError("give a real number")
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(
            f"{name!r} is {type(value).__name__}, not a number: {one_line(error)}"
        ) from None
    if array.size != 1:
        raise UsageError(
            f"{name!r} has shape {array.shape}, not one number; take its mean first ([0] of pmap's)"
        )
    return array.item()
