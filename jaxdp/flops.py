"""The floating-point operations of a traced program: its matrix products and convolutions, loops multiplied out."""

import math
from typing import Any

import jax.extend


def count_flops(jaxpr: Any) -> int:
    """Multiplications and additions of the products in a (closed) jaxpr, at most once for each branch's longest.

    Inside a `shard_map` shapes are one device's, so that what is counted there is too. A `while` counts once.
    """
    return sum(_of(eqn) for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _of(eqn: Any) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel, outputs = eqn.invars[1].aval, params["dimension_numbers"].rhs_spec[0]
        return 2 * eqn.outvars[0].aval.size * (kernel.size // kernel.shape[outputs])
    inner = [count_flops(j) for value in params.values() for j in _jaxprs(value)]
    if name == "cond":
        return max(inner, default=0)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def _jaxprs(value: Any) -> list[Any]:
    """The programs among an operation's parameters; functions that JAX calls only to differentiate are none."""
    values = value if isinstance(value, tuple | list) else [value]
    return [v for v in values if isinstance(v, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr)]
