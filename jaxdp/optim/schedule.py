"""Learning-rate schedules: a linear warm-up, then a shape.

A shape is a function of any of lr, steps and final_lr: the peak, the number of updates after the
warm-up, and the fraction of lr to end at. It returns an Optax schedule. A config can name any such
function by its dotted path.

The learning rate of an update is what the optimizer itself computes with, read from the program of its
update. A schedule names its value (`named`). An optimizer may call it at a count of its own
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

from jaxdp.errors import UsageError
from jaxdp.optim.interpreter import evaluate
from jaxdp.split import path_string
from jaxdp.targets import bind, call, locate, require, targets_in

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


Schedule = Callable[[Any], Any]
KEY = "optimizer.schedule"


def _constant(lr: float) -> Schedule:
    return optax.constant_schedule(lr)


def _cosine(lr: float, steps: int, final_lr: float) -> Schedule:
    return optax.cosine_decay_schedule(lr, max(steps, 1), alpha=final_lr)


def _linear(lr: float, steps: int, final_lr: float) -> Schedule:
    return optax.linear_schedule(lr, lr * final_lr, max(steps, 1))


def _one_cycle(lr: float, steps: int) -> Schedule:
    return optax.linear_onecycle_schedule(max(steps, 1), lr)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
    "one_cycle": _one_cycle,
}


def make_schedule(
    shape: dict[str, Any] | str, lr: float, steps: int, warmup_steps: int = 0, final_lr: float = 0.0
) -> Schedule:
    """Return the learning rate by update, from 0: a linear warm-up from 0 to lr, then the shape
    until update `steps`.

    - constant: lr
    - cosine: falls to final_lr x lr by half a cosine (Loshchilov and Hutter, arXiv 1608.03983)
    - linear: falls to final_lr x lr in a line
    - one_cycle: rises over the first 30 %, then falls to 0 (Smith, arXiv 1708.07120)

    shape: a name, or {target, args} with the dotted path of a function. It gets lr, steps and
    final_lr if it has such parameters and args does not set them. Raises UsageError if it returns
    no schedule."""
    [(target, args)] = targets_in(KEY, [shape], "schedule", "cosine")
    make = locate(KEY, target, SCHEDULES, KEY)
    bound = bind(KEY, make, args, {"lr": lr, "steps": steps - warmup_steps, "final_lr": final_lr})
    require(KEY, bound)
    main = call(KEY, bound)
    rate = call(KEY, bound, lambda: jax.eval_shape(main, jnp.int32(0))) if callable(main) else None
    if getattr(rate, "shape", None) != ():
        raise UsageError(
            f"{KEY}: {target!r} must return a function from the number of an update to one learning rate"
        )
    if warmup_steps:
        main = optax.join_schedules(
            [optax.linear_schedule(0.0, lr, warmup_steps), main], [warmup_steps]
        )
    return named(main)
