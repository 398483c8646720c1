"""The exponential moving average (EMA) of the parameters and of the statistics that belong to them,
as a wrapper of `Step.apply`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.train import skip
from jaxdp.train.frozen import merge
from jaxdp.train.model_state import floats


def average(ema: Any, params: Any, decay: float) -> Any:
    """Return decay x ema + (1 - decay) x params."""
    return jax.tree.map(lambda e, p: e + (1 - decay) * (p.astype(e.dtype) - e), ema, params)


def average_statistics(ema_state: Any, model_state: Any, decay: float) -> Any:
    """Return the average of the floats of the model state; None: there are none.

    Where one of the two is not finite, as a minimum before its first value, it is the model
    state's."""
    if ema_state is None:
        return None

    def mean(e: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(e) & jnp.isfinite(x), e + (1 - decay) * (x - e), x)

    return jax.tree.map(mean, ema_state, floats(model_state))


def first_statistics(model_state: Any) -> Any:
    """Return a copy of the floats of the model state, from which their average starts; None if
    there are none.
    """
    return (
        jax.tree.map(jnp.copy, floats(model_state))
        if jax.tree.leaves(floats(model_state))
        else None
    )


def averaged_state(state: Any) -> Any:
    """Return the model state that belongs to `ema`: averages of floats, and integers as they are."""
    return (
        state.model_state if state.ema_state is None else merge(state.ema_state, state.model_state)
    )


def with_average(apply: Callable[..., Any], decay: float | None) -> Callable[..., Any]:
    """Wrap `Step.apply` to set ema = decay x ema + (1 - decay) x params after each update that is
    not skipped, and `ema_state` likewise."""
    if decay is None:
        return apply

    def run(state: Any, sums: Any, *total: Any) -> Any:
        new, metrics = apply(state, sums, *total)
        before = state.ema, state.ema_state
        after = (
            average(state.ema, new.params, decay),
            average_statistics(state.ema_state, new.model_state, decay),
        )
        ema, ema_state = skip.where(metrics["skipped"] == 0, after, before)
        return new.replace(ema=ema, ema_state=ema_state), metrics

    return run
