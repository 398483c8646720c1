"""Rounding that does not depend on the compiled program: every operation of a function is rounded
as written.

A compiler may keep a product unrounded for the addition that follows, and may replace a division by
a scalar by a product with its reciprocal; its choice depends on the rest of the program. This
module prevents both."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxdp.optim.interpreter import bind, evaluate, interpret

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
SAME = {
    "convert_element_type",
    "copy",
    "reshape",
    "squeeze",
    "broadcast_in_dim",
}  # keep an array uniform
EXACTLY = "exactly."  # no name of a function in Python
BITS: dict[int, Any] = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def opaque_true(step: jax.Array) -> jax.Array:
    """Return True as a value that the compiler cannot know."""
    return step >= 0


def exactly(f: Callable) -> Callable:
    """Trace f once for each shape. Its results do not depend on how a compiler rounds: `as_written`
    keeps it.
    """
    f.__name__ = f"{EXACTLY}{f.__name__}"
    return jax.jit(f)


@exactly
def pin(x: jax.Array, live: jax.Array) -> jax.Array:
    """Return the values, rounded to their dtype before any later operation; live: from
    `opaque_true`.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize not in BITS:
        return x
    kind = BITS[x.dtype.itemsize]
    zero = jax.lax.convert_element_type(jax.lax.bitwise_not(live), kind)
    bits = jax.lax.bitwise_xor(
        jax.lax.bitcast_convert_type(x, kind), jax.lax.broadcast(zero, x.shape)
    )
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def fusion_barrier(tree: Tree, live: jax.Array) -> Tree:
    """Return the arrays behind a fusion barrier: XLA does not fuse their producers with their
    readers.

    They pass through a loop that runs zero times, which the compiler cannot know.
    """

    def change(x):
        return ~x if x.dtype == bool else -x

    return jax.lax.fori_loop(
        0, jnp.where(live, 0, 1), lambda _, tree: jax.tree.map(change, tree), tree
    )


def scan_unfused(
    f: Callable, start: Tree, pieces: Tree, live: jax.Array, like: Tree
) -> tuple[Tree, Tree]:
    """Scan f(carried, piece) -> (carried, result) like `jax.lax.scan`, but compile each piece
    separately.

    Nothing is fused into the loop or out of it: its length is known only at run time, and each
    piece is indexed from at least two and passes a fusion barrier first. The name of its scope
    tells `jaxdp.plan` the length. like: the shapes of a result.
    """
    number = len(jax.tree.leaves(pieces)[0])
    pieces = jax.tree.map(lambda x: x if len(x) > 1 else jnp.concatenate([x, x]), pieces)
    results = jax.tree.map(lambda x: jnp.zeros((max(2, number), *x.shape), x.dtype), like)

    def body(i: jax.Array, state: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        carried, results = state
        piece = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), pieces)
        carried, result = f(carried, fusion_barrier(piece, live))

        def write(buffer, x):
            return jax.lax.dynamic_update_index_in_dim(buffer, x, i, 0)

        return carried, jax.tree.map(write, results, result)

    with jax.named_scope(f"times_{number}"):
        carried, results = jax.lax.fori_loop(0, jnp.where(live, number, 0), body, (start, results))
    return carried, jax.tree.map(lambda x: x[:number], results)


def as_written(f: Callable, live: jax.Array) -> Callable:
    """Wrap f: pin products, replace division by a scalar by a product with its pinned reciprocal,
    do not fuse sums.

    Loops and functions mapped over devices are not changed.
    """

    uniform: dict[Any, Any] = {}  # a variable whose entries are all equal -> their value []

    def scalar(x: Any, value: Any) -> Any:
        """Return the value that all entries have, or None."""
        if isinstance(x, Literal) or not x.aval.shape:
            return jnp.asarray(value, x.aval.dtype)
        return uniform.get(x)

    def rule(equation: Any, inputs: list[Any]) -> Sequence[Any] | None:
        name, out = equation.primitive.name, equation.outvars[0].aval if equation.outvars else None
        if name in SAME and (value := scalar(equation.invars[0], inputs[0])) is not None:
            uniform[equation.outvars[0]] = value.astype(equation.outvars[0].aval.dtype)
        if name == "jit" and equation.params["name"].startswith(EXACTLY):
            return bind(equation, inputs)
        if name == "cond":
            branches = [
                lambda *args, inner=inner: evaluate(inner, args, rule)
                for inner in equation.params["branches"]
            ]
            return jax.lax.switch(inputs[0], branches, *inputs[1:])
        if out is None or not jnp.issubdtype(out.dtype, jnp.floating):
            return None
        if (
            name == "div"
            and out.shape
            and (divisor := scalar(equation.invars[1], inputs[1])) is not None
        ):
            return [pin(inputs[0] * pin(1 / divisor, live), live)]
        if name in SUMS:
            return fusion_barrier(bind(equation, fusion_barrier(inputs, live)), live)
        return [pin(bind(equation, inputs)[0], live)] if name in PRODUCTS else None

    return functools.wraps(f)(lambda *args: interpret(f, args, rule))
