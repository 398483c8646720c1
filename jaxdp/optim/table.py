"""An optimizer is an Optax transformation: a table row that names its parts, behind one learning-rate schedule."""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from jaxdp.errors import UsageError
from jaxdp.split import path_string

Schedule = Callable[[Any], Any]


def _decay_first(tx: Callable) -> Callable:
    """L2 decay added to the gradient, as PyTorch's SGD and Adam have it, for a transformation without its own."""

    @functools.wraps(tx)
    def make(learning_rate: Schedule, weight_decay: float = 0.0, mask: Any = None, **args: Any):
        decay = [optax.add_decayed_weights(weight_decay, mask)] if weight_decay else []
        return optax.chain(*decay, tx(learning_rate, **args))

    return make


@functools.wraps(optax.adafactor)
def _adafactor(learning_rate: Schedule, weight_decay: float = 0.0, mask: Any = None, **args: Any):
    return optax.adafactor(learning_rate, weight_decay_rate=weight_decay or None, weight_decay_mask=mask, **args)


OPTIMIZERS: dict[str, Callable] = {
    "sgd": _decay_first(optax.sgd),
    "adam": _decay_first(optax.adam),
    "adamw": optax.adamw,
    "lamb": optax.lamb,
    "lion": optax.lion,
    "adafactor": _adafactor,
}


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
    """The learning rate by update: a linear warm-up from 0, then the named shape until `steps`.

    final: the fraction of lr at which cosine and linear end. one_cycle rises over the first 30 % and falls (Smith,
    arXiv 1708.07120).
    """
    main = SCHEDULES[name](lr, steps - warmup_steps, final)
    if not warmup_steps:
        return main
    return optax.join_schedules([optax.linear_schedule(0.0, lr, warmup_steps), main], [warmup_steps])


def decay_mask(no_decay: Sequence[str]) -> Callable[[Any], Any]:
    """params -> the same tree of booleans: False where a leaf's path (a/b/c) matches one of the expressions."""
    patterns = [re.compile(p) for p in no_decay]

    def mask(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not any(p.search(path_string(path)) for p in patterns), params
        )

    return mask


def make_optimizer(
    make: Callable, schedule: Schedule, weight_decay: float = 0.0, no_decay: Sequence[str] = (), **args: Any
) -> optax.GradientTransformation:
    """The transformation that `make(learning_rate, weight_decay=, mask=, ...)` gives, with a decay mask by path.

    Raises UsageError where `make` takes no weight decay and some was asked for.
    """
    names = inspect.signature(make).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in names.values())
    if make in OPTIMIZERS.values() or "weight_decay" in names:
        args["weight_decay"] = weight_decay
        if make in OPTIMIZERS.values() or "mask" in names:
            args["mask"] = decay_mask(no_decay)
    elif weight_decay and not open_ended:
        raise UsageError(f"optimizer.weight_decay: {weight_decay} but {make.__name__} takes none; set it to 0")
    elif weight_decay:
        args["weight_decay"] = weight_decay
    if "learning_rate" in names or open_ended:
        return make(learning_rate=schedule, **args)
    return make(schedule, **args)
