"""The arrays of a model, from shapes alone: paths, shapes, dtypes, sizes, and which of them are
trained. And the FLOPs of a traced program: its matrix products and convolutions, times the lengths
of loops."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax

from jaxdp.metrics.numbers import size, table
from jaxdp.optim.interpreter import inside
from jaxdp.split import path_string
from jaxdp.train.state import TrainState

# Products of cuDNN's attention, query[example, token, head, width]; backward does not count the
# scores again.
FUSED_ATTENTION = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 4}

REMATERIALIZED = {"checkpoint", "remat", "remat2"}  # depends on JAX's version


def count_flops(jaxpr: Any) -> int:
    """Count the multiplications and additions of products in a (closed) jaxpr. A `cond` counts its
    longest branch.

    Inside a `shard_map` shapes are those of one device, and so are the counts. A `while` counts
    once, unless the name of its scope is its length (`jaxdp.exact.rounding.scan_unfused`).
    """
    return sum(_flops_of(eqn) * _trips(eqn) for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _trips(eqn: Any) -> int:
    scope = re.search(r"\btimes_(\d+)$", str(eqn.source_info.name_stack))
    return int(scope[1]) if scope and eqn.primitive.name == "while" else 1


def model_flops(grads: Any, forward: Callable[[], Any]) -> int:
    """Count the model's FLOPs in a jaxpr of gradients, without recomputation by remat.

    forward: traces the same without gradients. If the jaxpr recomputes anything, the backward pass
    counts as twice the forward pass, as in Chowdhery et al., arXiv 2204.02311, appendix B; else the
    jaxpr's own products are counted."""
    counted = count_flops(grads)
    return min(counted, 3 * count_flops(forward())) if _recomputes(grads) else counted


def _recomputes(jaxpr: Any) -> bool:
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return any(
        eqn.primitive.name in REMATERIALIZED or any(map(_recomputes, inside(eqn))) for eqn in eqns
    )


def _flops_of(eqn: Any) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        lengths = [eqn.invars[0].aval.shape[d] for d in contracted]
        out = eqn.outvars[0].aval  # without dims: the square of a norm, not a layer's product
        return 2 * out.size * math.prod(lengths) if out.shape else 0
    if name == "conv_general_dilated":
        kernel, outputs = eqn.invars[1].aval, params["dimension_numbers"].rhs_spec[0]
        return 2 * eqn.outvars[0].aval.size * (kernel.size // kernel.shape[outputs])
    if name in FUSED_ATTENTION:
        query, key = (v.aval for v in eqn.invars[:2])
        return FUSED_ATTENTION[name] * 2 * query.size * key.shape[1]
    inner = [count_flops(j) for j in inside(eqn)]
    if name == "cond":
        return max(inner, default=0)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def arrays(shapes: TrainState, trainable: Any) -> list[dict[str, Any]]:
    """Return a row for each parameter and each array of the model state. trainable: the parameters
    without the frozen ones.
    """
    trained = {path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(trainable)}
    rows = []
    for kind, tree in (("frozen", shapes.params), ("state", shapes.model_state)):
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            name, count = path_string(path), math.prod(x.shape)
            is_trained = kind == "frozen" and name in trained
            rows.append(
                {
                    "path": name,
                    "shape": list(x.shape),
                    "dtype": x.dtype.name,
                    "count": count,
                    "bytes": count * x.dtype.itemsize,
                    "kind": "trainable" if is_trained else kind,
                }
            )
    return rows


def totals(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return the number of parameters, of those that are trained and frozen, and the bytes of all
    arrays.
    """

    def count(*kinds):
        return sum(row["count"] for row in rows if row["kind"] in kinds)

    return {
        "parameters": count("trainable", "frozen"),
        "trainable": count("trainable"),
        "frozen": count("frozen"),
        "bytes": sum(row["bytes"] for row in rows),
    }


def text(model: str, rows: list[dict[str, Any]]) -> str:
    """Return a table of the arrays with a line of totals. model: its name."""

    lines = [["", "", "shape", "dtype", "count", "size"]]
    for row in rows:
        columns = [row["path"], row["kind"], str(row["shape"]), row["dtype"]]
        lines.append([*columns, f"{row['count']:,}", size(row["bytes"])])
    total = totals(rows)
    parts = f"{total['trainable']:,} trainable, {total['frozen']:,} frozen"
    last = f"{model}: {total['parameters']:,} parameters ({parts}), {size(total['bytes'])}"
    return "\n".join([*table(lines, ">"), "", last])
