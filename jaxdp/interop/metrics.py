"""Average metrics over all ranks, each weighted by the number of examples behind it."""

import json
import math
from typing import Any

import jax
import numpy as np

from jaxdp.distributed import membership
from jaxdp.distributed.context import joined
from jaxdp.errors import UsageError
from jaxdp.split import path_string


def allreduce_metrics(metrics: Any, weight: Any = 1.0) -> Any:
    """The mean over the ranks of each number in `metrics`, weighted, as Python floats: the same bits on every rank.

    metrics: a dict, or any pytree, of scalars (JAX's, NumPy's or Python's), the same on all ranks. weight: how much
    this rank's count, as a rule the number of examples behind them; or a tree like `metrics`, with a weight for each
    (for the accuracy of a class, its examples). A rank of weight 0 counts nothing, even with NaN; NaN where all weights
    are 0. They travel as text, in double precision, and are waited for: call it where something is printed, on all
    ranks together.

    Raises UsageError on every rank where one brings something else; DistributedError where one does not come within
    JAXDP_TIMEOUT seconds (60).
    """
    context = joined()
    paths, structure = jax.tree_util.tree_flatten_with_path(metrics)
    own: dict[str, Any] = {"names": [path_string(path) or "metrics" for path, _ in paths]}
    try:
        own["values"] = [_scalar(name, value) for name, (_, value) in zip(own["names"], paths)]
        own["weights"] = [_weight(value) for value in _weights(weight, structure)]
    except UsageError as error:
        own["error"] = str(error)
    texts = context.exchange("allreduce_metrics", json.dumps(own), membership.default_timeout())
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
    means = [_mean([(one["weights"][i], one["values"][i]) for one in ranks]) for i in range(len(paths))]
    return jax.tree.unflatten(structure, means)


def _mean(terms: list[tuple[float, float]]) -> float:
    """Return the mean of (weight, value), without those of weight 0; NaN where there is no other."""
    counted = [(weight, value) for weight, value in terms if weight]
    total = math.fsum(weight for weight, _ in counted)
    return _sum(weight * value for weight, value in counted) / total if counted else math.nan


def _weights(weight: Any, structure: Any) -> list[Any]:
    """Return the weight of each metric. Raises UsageError where there is neither one for all nor one for each."""
    leaves, own = jax.tree.flatten(weight)
    if own == structure:
        return leaves
    if not jax.tree_util.treedef_is_leaf(own):
        raise UsageError(f"weight: {own} is not a tree like the metrics, {structure}; give one number, or one for each")
    return leaves * structure.num_leaves


def _weight(value: Any) -> float:
    number = _scalar("weight", value)
    if not 0 <= number < math.inf:
        raise UsageError(f"weight: {number} is not a number of examples; give 0 or more")
    return number


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
