"""FLOP counts of a traced program: its matrix products and convolutions, times the lengths of loops."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jaxdp.analysis.programs import inside

# Products of cuDNN's attention, query[example, token, head, width]; backward does not count the scores again.
FUSED_ATTENTION = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 4}

REMATERIALIZED = {"checkpoint", "remat", "remat2"}  # depends on JAX's version


def count_flops(jaxpr: Any) -> int:
    """Count the multiplications and additions of products in a (closed) jaxpr. A `cond` counts its longest branch.

    Inside a `shard_map` shapes are those of one device, and so are the counts. A `while` counts once, unless its length
    is a choice between constants (`jaxdp.parallel.rounding.scan_unfused`): then the largest.
    """
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    producers = {var: eqn for eqn in eqns for var in eqn.outvars}
    return sum(_flops_of(eqn) * _trips(eqn, producers) for eqn in eqns)


def _trips(eqn: Any, producers: dict[Any, Any]) -> int:
    """Return the largest integer that may be the bound of a `while`; 1 for any other operation."""
    if eqn.primitive.name != "while":
        return 1
    variables = [x for x in eqn.invars if not isinstance(x, Literal) and x.aval.dtype.kind == "i"]
    bounds = [producers[x] for x in variables if x in producers]
    literals = [x.val for e in bounds if e.params.get("name") == "_where" for x in e.invars if isinstance(x, Literal)]
    return max([1, *(int(x) for x in literals if isinstance(x, int | np.integer))])


def model_flops(grads: Any, forward: Callable[[], Any]) -> int:
    """Count the model's FLOPs in a jaxpr of gradients, without recomputation by remat.

    forward: traces the same without gradients. If the jaxpr recomputes anything, the backward pass counts as twice the
    forward pass, as in Chowdhery et al., arXiv 2204.02311, appendix B; else the jaxpr's own products are counted.
    """
    counted = count_flops(grads)
    return min(counted, 3 * count_flops(forward())) if _recomputes(grads) else counted


def _recomputes(jaxpr: Any) -> bool:
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return any(eqn.primitive.name in REMATERIALIZED or any(map(_recomputes, inside(eqn))) for eqn in eqns)


def _flops_of(eqn: Any) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general" and not eqn.outvars[0].aval.shape:
        return 0  # the square of a norm, not a layer's product
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel, outputs = eqn.invars[1].aval, params["dimension_numbers"].rhs_spec[0]
        return 2 * eqn.outvars[0].aval.size * (kernel.size // kernel.shape[outputs])
    if name in FUSED_ATTENTION:
        example, queries, heads, width = eqn.invars[0].aval.shape
        return FUSED_ATTENTION[name] * 2 * example * heads * queries * eqn.invars[1].aval.shape[1] * width
    inner = [count_flops(j) for j in inside(eqn)]
    if name == "cond":
        return max(inner, default=0)
    return sum(inner) * (params["length"] if name == "scan" else 1)
