"""Evaluate a function operation by operation, some of them by a rule ("Writing custom interpreters
in JAX").
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxdp.precision import is_narrow

CALLS = {
    "jit",
    "closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "checkpoint",
    "remat",
    "remat2",
}
# (equation, inputs) -> its outputs; None: compute it as it is written, and enter it if it is one of
# CALLS
Rule = Callable[[Any, list[Any]], Sequence[Any] | None]


def interpret(f: Callable, args: Sequence[Any], rule: Rule) -> Any:
    """Return f(*args)."""
    closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
    outputs = evaluate(closed, jax.tree.leaves(args), rule)
    return jax.tree.unflatten(jax.tree.structure(shape), outputs)


def evaluate(closed: Any, args: Sequence[Any], rule: Rule) -> list[Any]:
    """Return the outputs of a jaxpr, which may be without its constants if it has none."""
    jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values: dict[Any, Any] = dict(zip(variables, [*consts, *args], strict=True))

    def read(x):
        return x.val if isinstance(x, Literal) else values[x]

    for equation in jaxpr.eqns:
        inputs = [read(x) for x in equation.invars]
        out = rule(equation, inputs)
        if out is None and equation.primitive.name in CALLS:
            [inner] = inside(equation)
            out = evaluate(inner, inputs, rule)
        elif out is None:
            out = bind(equation, inputs)
        values.update(zip(equation.outvars, out, strict=True))
    return [read(x) for x in jaxpr.outvars]


def bind(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of an equation as it is written."""
    result = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
    return list(result) if equation.primitive.multiple_results else [result]


def inside(eqn: JaxprEqn) -> Iterator[Any]:
    """Yield the jaxprs inside an operation: those of loops and calls, but no rules for derivatives."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Jaxpr | ClosedJaxpr):
                yield item


def has_narrow_floats(program: Any) -> bool:
    """Return whether a jaxpr has a float of less than 32 bits anywhere, from its arguments or of
    its own accord."""
    jaxpr = getattr(program, "jaxpr", program)
    values = [*jaxpr.invars, *(x for eqn in jaxpr.eqns for x in eqn.outvars)]
    return any(is_narrow(getattr(x.aval, "dtype", bool)) for x in values) or any(
        has_narrow_floats(part) for eqn in jaxpr.eqns for part in inside(eqn)
    )


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many of a scan's inputs are constants, and how many are carried."""
    if "num_consts" in params:  # JAX before 0.12
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()
    return len(consts), len(carried)
