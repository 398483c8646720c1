"""Look at the output of each matrix product and convolution of a function, or replace it.

An output that is masked later, by a ReLU or dropout, or rounded away, leaves no trace in the gradients. The interpreter
follows "Writing custom interpreters in JAX" (JAX documentation).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from jaxdp.parallel.rounding import CALLS

Visit = Callable[[int, jax.Array], tuple[jax.Array, jax.Array]]
PRODUCTS = ("dot_general", "conv_general_dilated")
REPLACED = "replaced_product"  # the name of an output that a visit replaced: it is the one to look at


def visit_products(f: Callable, visit: Visit) -> Callable:
    """Wrap f: return (its result, the second results of visit(number, output) -> (output, uint32 []) of all products).

    In a scan, a product is visited in each iteration, and its results are summed. Other loops are not entered.
    """

    def run(*args: Any) -> tuple[Any, list[jax.Array]]:
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        out, results = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), visit, 0)
        return jax.tree.unflatten(jax.tree.structure(shape), out), results

    return run


def mark_replaced(x: jax.Array) -> jax.Array:
    return checkpoint_name(x, REPLACED)


def number_of_products(f: Callable, *args: Any) -> int:
    return len(jax.eval_shape(lambda *args: visit_products(f, lambda i, x: (x, jnp.uint32(0)))(*args)[1], *args))


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], visit: Visit, first: int
) -> tuple[list[Any], list[jax.Array]]:
    """Return (the outputs, the results of the visits). first: the number of the first product."""
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda x: x.val if isinstance(x, Literal) else values[x]
    results: list[jax.Array] = []
    for eqn in jaxpr.eqns:
        name, inputs, number = eqn.primitive.name, [read(x) for x in eqn.invars], first + len(results)
        if name in CALLS:
            inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params)
            inner, closed = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
            out, more = _evaluate(inner, closed, inputs, visit, number)
        elif name == "scan":
            out, more = _scan(eqn.params, inputs, visit, number)
        else:
            result = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            out, more = list(result) if eqn.primitive.multiple_results else [result], []
            if name in PRODUCTS or eqn.params.get("name") == REPLACED:
                out[0], result = visit(number, out[0])
                more = [result]
        results += more
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(x) for x in jaxpr.outvars], results


def _scan(params: Any, inputs: Sequence[Any], visit: Visit, first: int) -> tuple[list[Any], list[jax.Array]]:
    closed, consts, carries = params["jaxpr"], params["num_consts"], params["num_carry"]

    def body(carry: Sequence[Any], pieces: Sequence[Any]) -> tuple[list[Any], tuple[list[Any], list[jax.Array]]]:
        out, results = _evaluate(closed.jaxpr, closed.consts, [*inputs[:consts], *carry, *pieces], visit, first)
        return out[:carries], (out[carries:], results)

    start, pieces = list(inputs[consts : consts + carries]), list(inputs[consts + carries :])
    carry, (stacked, results) = jax.lax.scan(
        body, start, pieces, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *stacked], [x.sum(0, dtype=jnp.uint32) for x in results]
