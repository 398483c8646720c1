"""The learning rate of an update: what the optimizer itself computes with, read from the program of
its update.

A schedule names its value (`named`). An optimizer may call it at a count of its own
(`optax.MultiSteps`), inside a branch, or not at all.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from jaxdp.optim.interpreter import evaluate
from jaxdp.split import path_string

Tree = Any
NAME = "learning_rate"


def named(schedule: Callable[[Any], Any]) -> Callable[[Any], jax.Array]:
    """Wrap a schedule: its rate has a name, and an integer count is as wide as JAX allows.

    Optax divides the count, and the quotient of an int32 is a float32 in a float64 program.
    """

    def unnamed(count: Any) -> Any:
        count = jnp.asarray(count)
        return schedule(count.astype(int) if jnp.issubdtype(count.dtype, jnp.integer) else count)

    @functools.wraps(unnamed)
    def rate(count: Any) -> jax.Array:
        return checkpoint_name(jnp.asarray(unnamed(count)), NAME)

    return rate


def rate_of(
    tx: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, new: Tree = None
) -> jax.Array | None:
    """Return the learning rate [] of tx.update(grads, state, params), or None if the optimizer
    shows none.

    It is the last named rate that the updates are computed with. What it depends on, such as a
    count, is computed once more, and the compiler removes that.

    new: the state after the update, where `optax.inject_hyperparams` has a rate that comes from no
    schedule; None: only rates of schedules count."""
    arguments = (grads, state, params)
    closed, (updates, _) = jax.make_jaxpr(tx.update, return_shape=True)(*arguments)
    count = len(jax.tree.leaves(updates))
    of_updates = [i < count for i in range(len(closed.out_avals))]
    program, used = dce_jaxpr(closed.jaxpr, of_updates)
    rates = list[jax.Array]()

    def note_rate(equation: Any, inputs: list[Any]) -> None:
        params = equation.params
        if equation.primitive.name == "name" and params["name"] == NAME:
            rates.extend(inputs)
        if equation.primitive.name == "cond":
            for branch in params["branches"]:
                evaluate(branch, inputs[1:], note_rate)

    inputs = [*itertools.compress(jax.tree.leaves(arguments), used)]
    evaluate(ClosedJaxpr(program, closed.consts), inputs, note_rate)
    if not rates:
        leaves = jax.tree_util.tree_leaves_with_path(new)
        rates = [x for path, x in leaves if path_string(path).endswith(f"hyperparams/{NAME}")]
    return jnp.asarray(rates[-1], float) if rates else None
