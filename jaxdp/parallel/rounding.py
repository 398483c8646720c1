"""Rounding that does not depend on the compiled program: every operation of a function is rounded as written.

A compiler may keep a product unrounded for the addition that follows, and may replace a division by a scalar by a
product with its reciprocal; its choice depends on the rest of the program. This module prevents both. The interpreter
follows "Writing custom interpreters in JAX" (JAX documentation).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

Tree = Any
PRODUCTS = {"mul", "square", "integer_pow"}
SUMS = {"reduce_sum", "reduce_prod", "dot_general", "cumsum", "cumprod", "cumlogsumexp", "reduce_window_sum"}
SAME = {"convert_element_type", "copy", "reshape", "squeeze", "broadcast_in_dim"}  # keep an array uniform
CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat", "remat2"}
BITS: dict[int, Any] = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def opaque_true(step: jax.Array) -> jax.Array:
    """Return True as a value that the compiler cannot know."""
    return step >= 0


def pin(tree: Tree, live: jax.Array) -> Tree:
    """Return the values, rounded to their dtype before any later operation; live: from `opaque_true`."""

    def pin_array(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize not in BITS:
            return x
        kind = BITS[x.dtype.itemsize]
        zero = jnp.where(live, 0, 1).astype(kind)
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, kind) ^ zero, x.dtype)

    return jax.tree.map(pin_array, tree)


def fusion_barrier(tree: Tree, live: jax.Array) -> Tree:
    """Return the arrays behind a fusion barrier: XLA does not fuse their producers with their readers.

    They pass through a loop that runs zero times, which the compiler cannot know.
    """
    change = lambda x: ~x if x.dtype == bool else -x
    return jax.lax.fori_loop(0, jnp.where(live, 0, 1), lambda _, tree: jax.tree.map(change, tree), tree)


def scan_unfused(f: Callable, start: Tree, pieces: Tree, live: jax.Array, like: Tree) -> tuple[Tree, Tree]:
    """Scan f(carried, piece) -> (carried, result) like `jax.lax.scan`, but compile each piece separately.

    Nothing is fused into the loop or out of it: its length is known only at run time, and each piece is indexed from
    at least two and passes a fusion barrier first. like: the shapes of a result.
    """
    number = len(jax.tree.leaves(pieces)[0])
    pieces = jax.tree.map(lambda x: x if len(x) > 1 else jnp.concatenate([x, x]), pieces)
    results = jax.tree.map(lambda x: jnp.zeros((max(2, number), *x.shape), x.dtype), like)

    def body(i: jax.Array, state: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        carried, results = state
        piece = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), pieces)
        carried, result = f(carried, fusion_barrier(piece, live))
        write = lambda buffer, x: jax.lax.dynamic_update_index_in_dim(buffer, x, i, 0)
        return carried, jax.tree.map(write, results, result)

    carried, results = jax.lax.fori_loop(0, jnp.where(live, number, 0), body, (start, results))
    return carried, jax.tree.map(lambda x: x[:number], results)


def as_written(f: Callable, live: jax.Array) -> Callable:
    """Wrap f: pin products, replace division by a scalar by a product with its pinned reciprocal, do not fuse sums.

    Loops and functions mapped over devices are not changed.
    """

    @functools.wraps(f)
    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        out = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), live)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return run


def _branch(closed: Any, live: jax.Array) -> Callable[..., list[Any]]:
    return lambda *args: _evaluate(closed.jaxpr, closed.consts, args, live)


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], live: jax.Array) -> list[Any]:
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    uniform: dict[Any, Any] = {}  # a variable whose entries are all equal -> their value []

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    def scalar(x: Any) -> Any:
        """Return the value that all entries have, or None."""
        if isinstance(x, Literal) or not x.aval.shape:
            return jnp.asarray(read(x), x.aval.dtype)
        return uniform.get(x)

    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, [read(x) for x in eqn.invars]
        floating = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating) if eqn.outvars else False
        divisor = scalar(eqn.invars[1]) if name == "div" and floating and eqn.outvars[0].aval.shape else None
        if name in CALLS:
            inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params)
            out = _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs, live)
        elif name == "cond":
            branches = [_branch(inner, live) for inner in eqn.params["branches"]]
            out = jax.lax.switch(inputs[0], branches, *inputs[1:])
        elif divisor is not None:
            out = [pin(inputs[0] * pin(1 / divisor, live), live)]
        else:
            inputs = fusion_barrier(inputs, live) if name in SUMS and floating else inputs
            result = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            out = list(result) if eqn.primitive.multiple_results else [result]
            out = fusion_barrier(out, live) if name in SUMS and floating else out
            if name in PRODUCTS and floating:
                out = [pin(out[0], live)]
        values.update(zip(eqn.outvars, out, strict=True))
        if name in SAME and scalar(eqn.invars[0]) is not None:
            uniform[eqn.outvars[0]] = scalar(eqn.invars[0]).astype(eqn.outvars[0].aval.dtype)
    return [read(x) for x in jaxpr.outvars]
