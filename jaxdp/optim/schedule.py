"""Learning-rate schedules: a linear warm-up, then a shape.

A shape is a function of any of lr, steps and final_lr: the peak, the number of updates after the
warm-up, and the fraction of lr to end at. It returns an Optax schedule. A config can name any such
function by its dotted path."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp.errors import UsageError
from jaxdp.optim.rate import named
from jaxdp.targets import bind, call, locate, require, targets_in

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
