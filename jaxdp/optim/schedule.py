"""Learning-rate schedules: a linear warm-up, then a shape.

A shape is a function of (lr, updates, final): the peak, the number of updates after the warm-up, and the fraction of
lr to end at, which `constant` and `one_cycle` ignore. To add one: a row of `SCHEDULES`, its name in
`jaxdp.config.training.Optimizer`, and a line in the docstring of `make_schedule`.
"""

from collections.abc import Callable
from typing import Any

import optax

Schedule = Callable[[Any], Any]


def _constant(lr: float, updates: int, final: float) -> Schedule:
    return optax.constant_schedule(lr)


def _cosine(lr: float, updates: int, final: float) -> Schedule:
    return optax.cosine_decay_schedule(lr, max(updates, 1), alpha=final)


def _linear(lr: float, updates: int, final: float) -> Schedule:
    return optax.linear_schedule(lr, lr * final, max(updates, 1))


def _one_cycle(lr: float, updates: int, final: float) -> Schedule:
    return optax.linear_onecycle_schedule(max(updates, 1), lr)


SCHEDULES: dict[str, Callable[[float, int, float], Schedule]] = {
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
    "one_cycle": _one_cycle,
}


def make_schedule(name: str, lr: float, steps: int, warmup_steps: int = 0, final: float = 0.0) -> Schedule:
    """Return the learning rate by update, from 0: a linear warm-up from 0, then the named shape until update `steps`.

    - constant: lr
    - cosine: falls to final x lr by half a cosine (Loshchilov and Hutter, arXiv 1608.03983)
    - linear: falls to final x lr in a line
    - one_cycle: rises over the first 30 %, then falls to 0 (Smith, arXiv 1708.07120)
    """
    main = SCHEDULES[name](lr, steps - warmup_steps, final)
    if not warmup_steps:
        return main
    return optax.join_schedules([optax.linear_schedule(0.0, lr, warmup_steps), main], [warmup_steps])
