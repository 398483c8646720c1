"""The learning rate of an update: what the optimizer itself computes with, read from the program of
its update.

A schedule names its value (`name_rate`). An optimizer may call it at a count of its own
(`optax.MultiSteps`), inside a branch, or not at all.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, Literal

from jaxdp.optim.interpreter import CALLS, bind, needed
from jaxdp.split import path_string

Tree = Any
NAME = "learning_rate"
Read = Callable[[Sequence[Any]], list[Any]]  # variables of a program -> their values


def name_rate(rate: jax.Array) -> jax.Array:
    """Mark a value as a learning rate; it stays the same."""
    return checkpoint_name(rate, NAME)


def rate_of(
    tx: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, new: Tree
) -> jax.Array | None:
    """Return the learning rate [] of tx.update(grads, state, params), or None if the optimizer
    shows none.

    new: the state after the update, where `optax.inject_hyperparams` has a rate that comes from no
    schedule."""
    named, leaves = (
        scheduled_rate(tx, grads, state, params),
        jax.tree_util.tree_leaves_with_path(new),
    )
    injected = [x for path, x in leaves if path_string(path).endswith(f"hyperparams/{NAME}")]
    return named if named is not None or not injected else jnp.asarray(injected[-1], float)


def scheduled_rate(
    tx: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree
) -> jax.Array | None:
    """Return the last named rate [] that the updates are computed with, or None.

    Only what it depends on, such as a count, is computed once more, and the compiler removes that.
    """
    closed, shapes = jax.make_jaxpr(tx.update, return_shape=True)(grads, state, params)
    jaxpr, inputs = closed.jaxpr, [*closed.consts, *jax.tree.leaves((grads, state, params))]
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
    updates = jaxpr.outvars[: len(jax.tree.leaves(shapes[0]))]
    rates = [*named_rates(jaxpr, updates, lambda variables: [values[x] for x in variables])]
    return jnp.asarray(rates[-1], float) if rates else None


def named_rates(jaxpr: Jaxpr, outputs: Sequence[Any], read: Read) -> Iterator[Any]:
    """Yield the named rates that some outputs of a program are computed with. read: for its inputs."""
    inputs = {*jaxpr.constvars, *jaxpr.invars}

    def values_of(variables: Sequence[Any]) -> list[Any]:
        equations, used = needed(jaxpr, variables)
        known = [x for x in used if x in inputs]
        values = dict(zip(known, read(known), strict=True))

        def value(x):
            return x.val if isinstance(x, Literal) else values[x]

        for equation in equations:
            values.update(
                zip(equation.outvars, bind(equation, [*map(value, equation.invars)]), strict=True)
            )
        return [*map(value, variables)]

    equations, used = needed(jaxpr, outputs)
    for equation in equations:
        params, operands = equation.params, equation.invars
        if equation.primitive.name == "name" and params["name"] == NAME:
            yield values_of(operands)[0]
        programs: Any = (
            [params.get("jaxpr") or params.get("call_jaxpr")]
            if equation.primitive.name in CALLS
            else []
        )
        if equation.primitive.name == "cond":
            programs, operands = params["branches"], operands[1:]
        for program in programs:
            inner, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
            outside = dict(zip(inner.invars, operands, strict=True))
            constants = dict(zip(inner.constvars, consts, strict=True))

            def read_inside(
                variables: Sequence[Any], outside: Any = outside, constants: Any = constants
            ) -> list[Any]:
                return [
                    constants[x] if x in constants else values_of([outside[x]])[0]
                    for x in variables
                ]

            yield from named_rates(
                inner,
                [y for x, y in zip(equation.outvars, inner.outvars) if x in used],
                read_inside,
            )
