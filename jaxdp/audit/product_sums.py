"""Look at the output of each matrix product and convolution of a function, or replace it.

An output that is masked later, by a ReLU or dropout, or rounded away, leaves no trace in the
gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxdp.optim.interpreter import Rule, bind, evaluate, interpret, scan_counts

Visit = Callable[[int, jax.Array], tuple[jax.Array, jax.Array]]
PRODUCTS = ("dot_general", "conv_general_dilated")
REPLACED = (
    "replaced_product"  # the name of an output that a visit replaced: it is the one to look at
)


def visit_products(f: Callable, visit: Visit) -> Callable:
    """Wrap f: return (its result, the second results of visit(number, output) -> (output, uint32
    []) of all products).

    In a scan, a product is visited in each iteration, and its results are summed. Other loops are
    not entered."""

    def run(*args: Any) -> tuple[Any, list[jax.Array]]:
        results: list[jax.Array] = []
        return interpret(f, args, _rule(visit, results)), results

    return run


def mark_replaced(x: jax.Array) -> jax.Array:
    return checkpoint_name(x, REPLACED)


def _rule(visit: Visit, results: list[jax.Array]) -> Rule:
    """Return the rule of an interpreter that adds the result of each visit."""

    def rule(equation: Any, inputs: list[Any]) -> list[Any] | None:
        name, params, first = equation.primitive.name, equation.params, len(results)
        if name in PRODUCTS or params.get("name") == REPLACED:
            out = bind(equation, inputs)
            out[0], result = visit(first, out[0])
            results.append(result)
            return out
        if name != "scan":
            return None
        consts, carries = scan_counts(params)

        def body(carry: Any, pieces: Any) -> Any:
            more: list[jax.Array] = []
            inner = _rule(lambda number, x: visit(first + number, x), more)
            out = evaluate(params["jaxpr"], [*inputs[:consts], *carry, *pieces], inner)
            return out[:carries], (out[carries:], more)

        start, pieces = inputs[consts : consts + carries], inputs[consts + carries :]
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, (stacked, more) = jax.lax.scan(body, start, pieces, **options)
        results.extend(x.sum(0, dtype=jnp.uint32) for x in more)
        return [*carry, *stacked]

    return rule
