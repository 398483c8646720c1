"""The exponential moving average (EMA) of the parameters and of the statistics that belong to them,
as a wrapper of a step."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.precision import Policy, cast_floats
from jaxdp.train.state import Sums, TrainState, floats, merge, select

EMA, EMA_STATE = "ema", "ema_state"  # entries of `TrainState.extra`


def with_average(step: Any, decay: float, policy: Policy) -> Any:
    """Keep ema = decay x ema + (1 - decay) x params after each update that is not skipped, and
    "ema_state" likewise."""

    def init(*arguments: Any) -> TrainState:
        state = step.init(*arguments)
        extra = {
            **state.extra,
            EMA: jax.tree.map(jnp.copy, cast_floats(state.params, policy.state)),
        }
        if (statistics := first_statistics(state.model_state)) is not None:
            extra[EMA_STATE] = statistics
        return state.replace(extra=extra)

    def apply(state: TrainState, sums: Sums, *total: Any) -> Any:
        new, metrics = step.apply(state, sums, *total)
        old = new.extra
        extra = {**old, EMA: average(old[EMA], new.params, decay)}
        if EMA_STATE in old:
            extra[EMA_STATE] = average_statistics(old[EMA_STATE], new.model_state, decay)
        return new.replace(extra=select(metrics["skipped"] == 0, extra, old)), metrics

    return step._replace(init=init, apply=apply)


def average(ema: Any, params: Any, decay: float) -> Any:
    """Return decay x ema + (1 - decay) x params."""
    return jax.tree.map(lambda e, p: e + (1 - decay) * (p.astype(e.dtype) - e), ema, params)


def average_statistics(ema_state: Any, model_state: Any, decay: float) -> Any:
    """Return the average of the floats of the model state.

    Where one of the two is not finite, as a minimum before its first value, it is the model
    state's."""

    def mean(e, x):
        return jnp.where(jnp.isfinite(e) & jnp.isfinite(x), e + (1 - decay) * (x - e), x)

    return jax.tree.map(mean, ema_state, floats(model_state))


def first_statistics(model_state: Any) -> Any:
    """Return a copy of the floats of the model state, from which their average starts; None if
    there are none."""
    found = floats(model_state)
    return jax.tree.map(jnp.copy, found) if jax.tree.leaves(found) else None


def averaged_state(state: TrainState) -> Any:
    """Return the model state that belongs to "ema": averages of floats, and integers as they are."""
    statistics = state.extra.get(EMA_STATE)
    return state.model_state if statistics is None else merge(statistics, state.model_state)
