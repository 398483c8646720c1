"""Learning-rate schedules: a linear warm-up, then one of four shapes."""

from collections.abc import Callable
from typing import Any

import optax

Schedule = Callable[[Any], Any]


def _constant(lr: float, steps: int, final: float) -> Schedule:
    return optax.constant_schedule(lr)


def _cosine(lr: float, steps: int, final: float) -> Schedule:
    return optax.cosine_decay_schedule(lr, max(steps, 1), alpha=final)


def _linear(lr: float, steps: int, final: float) -> Schedule:
    return optax.linear_schedule(lr, lr * final, max(steps, 1))


def _one_cycle(lr: float, steps: int, final: float) -> Schedule:
    return optax.linear_onecycle_schedule(max(steps, 1), lr)


SCHEDULES: dict[str, Callable[[float, int, float], Schedule]] = {
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
    "one_cycle": _one_cycle,
}


def make_schedule(name: str, lr: float, steps: int, warmup_steps: int = 0, final: float = 0.0) -> Schedule:
    """Return the learning-rate schedule: a linear warm-up from 0, then the named shape until update `steps`.

    final: the fraction of lr at which cosine and linear end. one_cycle rises over the first 30 %, then falls (Smith,
    arXiv 1708.07120).
    """
    main = SCHEDULES[name](lr, steps - warmup_steps, final)
    if not warmup_steps:
        return main
    return optax.join_schedules([optax.linear_schedule(0.0, lr, warmup_steps), main], [warmup_steps])
