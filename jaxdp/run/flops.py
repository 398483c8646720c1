"""FLOP counts of a traced program: its matrix products and convolutions, times the lengths of
loops.
"""

import math
import re
from collections.abc import Callable
from typing import Any

from jaxdp.optim.interpreter import inside

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
