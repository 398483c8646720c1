"""Rounding that does not depend on the compiled program: every operation of a function is rounded
as written.

A compiler may keep a product unrounded for the addition that follows, and may replace a division by
a scalar by a product with its reciprocal; its choice depends on the rest of the program. This
module prevents both. `step` is a value that the compiler cannot know, `TrainState.step`: it is never
negative."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.optim.interpreter import bind, evaluate, interpret
from jaxdp.precision import is_float

Tree = Any
PRODUCTS = {"mul", "square", "integer_pow"}
SUMS = {
    "reduce_sum",
    "reduce_prod",
    "dot_general",
    "cumsum",
    "cumprod",
    "cumlogsumexp",
    "reduce_window_sum",
}
# The operations that keep an array uniform.
SAME = {"convert_element_type", "copy", "reshape", "squeeze", "broadcast_in_dim"}


@jax.jit
def pin(x: jax.Array, step: jax.Array) -> jax.Array:
    """Return the floats, rounded to their dtype before any later operation."""
    bits = x.view(f"uint{8 * x.dtype.itemsize}")
    return (bits ^ (step < 0).astype(bits.dtype)).view(x.dtype)


def fusion_barrier(tree: Tree, step: jax.Array) -> Tree:
    """Return the arrays behind a fusion barrier: XLA does not fuse their producers with their
    readers.

    They pass through a loop that runs zero times, which the compiler cannot know: it would replace
    them by zeros.
    """
    # The comparison is outside: inside, XLA compiles an initial state, whose step is 0, for minutes.
    is_negative = step < 0
    return jax.lax.while_loop(lambda _: is_negative, zeros, tree)


def scan_unfused(
    f: Callable[[Tree], tuple[Tree, Tree]], pieces: Tree, step: jax.Array
) -> tuple[Tree, Tree]:
    """Return (the sum of all first results, the second results stacked) of f(piece) for each piece,
    compiled separately.

    Nothing is fused into the loop or out of it: its length is known only at run time, and each
    piece passes a fusion barrier first. The name of its scope tells `jaxdp.plan` the length.
    """
    number = len(jax.tree.leaves(pieces)[0])
    added, result = jax.eval_shape(f, jax.tree.map(lambda x: x[0], pieces))
    rows = jax.tree.map(lambda x: jnp.zeros((number, *x.shape), x.dtype), result)

    def body(i, state):
        total, rows = state
        added, result = f(fusion_barrier(jax.tree.map(lambda x: x[i], pieces), step))
        store = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
        return jax.tree.map(jnp.add, total, added), jax.tree.map(store, rows, result)

    with jax.named_scope(f"times_{number}"):
        times = jnp.where(step < 0, 0, number)
        return jax.lax.fori_loop(0, times, body, (zeros(added), rows))


def zeros(tree: Tree) -> Tree:
    """Return zeros like the arrays or shapes of a tree."""
    return jax.tree.map(jnp.zeros_like, tree)


def as_written(f: Callable[..., Any], step: jax.Array) -> Callable[..., Any]:
    """Wrap f: pin products, replace division by a scalar by a product with its pinned reciprocal,
    do not fuse sums.

    Loops and functions mapped over devices are not changed.
    """

    uniform = set[Any]()  # variables whose entries are all equal

    def is_uniform(variable):
        return not variable.aval.shape or variable in uniform

    def rule(equation, inputs):
        name, operands, outvars = equation.primitive.name, equation.invars, equation.outvars
        if name in SAME and is_uniform(operands[0]):
            uniform.add(outvars[0])
        if name == "cond":
            jaxprs = equation.params["branches"]
            branches = [functools.partial(evaluate, jaxpr, rule=rule) for jaxpr in jaxprs]
            return jax.lax.switch(inputs[0], branches, inputs[1:])
        if not (outvars and is_float(outvars[0].aval)):
            return None
        if name in SUMS:
            return fusion_barrier(bind(equation, fusion_barrier(inputs, step)), step)
        if name in PRODUCTS:
            return [pin(bind(equation, inputs)[0], step)]
        if name == "div" and outvars[0].aval.shape and is_uniform(operands[1]):
            return [pin(inputs[0] * pin(1 / inputs[1], step), step)]
        return None

    return lambda *args: interpret(f, args, rule)
