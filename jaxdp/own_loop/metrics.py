"""A metric of all ranks is the mean of theirs, each counted by the examples behind it."""

import json
import math
from typing import Any

import jax
import numpy as np

from jaxdp.distributed import coordination
from jaxdp.distributed.context import joined
from jaxdp.errors import UsageError
from jaxdp.split import path_string


def allreduce_metrics(metrics: Any, weight: Any = 1.0) -> Any:
    """The mean over the ranks of each number in `metrics`, weighted, as Python floats: the same bits on every rank.

    metrics: a dict, or any pytree, of scalars (JAX's, NumPy's or Python's), the same on all ranks. weight: how much
    this rank's count, as a rule the number of examples behind them; a rank of weight 0 counts nothing, even with NaN.
    NaN where all weights are 0. They travel as text, in double precision, and are waited for: call it where something
    is printed, on all ranks together.

    Raises UsageError on every rank where one brings something else; DistributedError where one does not come within
    JAXDP_TIMEOUT seconds (60).
    """
    context = joined()
    paths, structure = jax.tree_util.tree_flatten_with_path(metrics)
    own: dict[str, Any] = {"names": [path_string(path) or "metrics" for path, _ in paths]}
    try:
        own["values"] = [_scalar(name, value) for name, (_, value) in zip(own["names"], paths)]
        own["weight"] = _scalar("weight", weight)
        if not 0 <= own["weight"] < math.inf:
            raise UsageError(f"weight: {own['weight']} is not a number of examples; give 0 or more")
    except UsageError as error:
        own["error"] = str(error)
    texts = context.exchange("allreduce_metrics", json.dumps(own), coordination.seconds())
    ranks = [json.loads(text) for text in texts]
    for rank, one in enumerate(ranks):
        if "error" in one:
            raise UsageError(f"allreduce_metrics: {context.title(rank)}: {one['error']}", rank=rank)
        if one["names"] != ranks[0]["names"]:
            raise UsageError(
                f"allreduce_metrics: {context.title(rank)} has {', '.join(one['names'])}, but {context.title(0)} has "
                f"{', '.join(ranks[0]['names'])}: they must be the same",
                rank=0,
            )
    counted = [one for one in ranks if one["weight"]]
    total = math.fsum(one["weight"] for one in counted)
    sums = [_sum(one["weight"] * one["values"][i] for one in counted) for i in range(len(paths))]
    return jax.tree.unflatten(structure, [s / total if counted else math.nan for s in sums])


def _sum(terms: Any) -> float:
    """Rounded once, so in any order; fsum itself refuses infinities of both signs."""
    listed = list(terms)
    return math.fsum(listed) if all(map(math.isfinite, listed)) else sum(listed)


def _scalar(name: str, value: Any) -> float:
    if isinstance(value, jax.core.Tracer):
        raise UsageError(f"{name!r} is traced: call allreduce_metrics outside jit")
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"{name!r} is {type(value).__name__}, not a number") from None
    if array.size != 1:
        raise UsageError(f"{name!r} has shape {array.shape}, not one number; take its mean first ([0] of pmap's)")
    return float(array.reshape(()))
