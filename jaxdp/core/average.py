"""The exponential moving average of the parameters (EMA), as a wrapper of `Step.apply`."""

from collections.abc import Callable
from typing import Any

import jax

from jaxdp.core import skip


def average(ema: Any, params: Any, decay: float) -> Any:
    """Return decay x ema + (1 - decay) x params."""
    return jax.tree.map(lambda e, p: e + (1 - decay) * (p.astype(e.dtype) - e), ema, params)


def with_average(apply: Callable[..., Any], decay: float | None) -> Callable[..., Any]:
    """Wrap `Step.apply` to set ema = decay x ema + (1 - decay) x params after each update that is not skipped."""
    if decay is None:
        return apply

    def run(state: Any, sums: Any, *total: Any) -> Any:
        new, metrics = apply(state, sums, *total)
        ema = average(state.ema, new.params, decay)
        return new.replace(ema=skip.where(metrics["skipped"] == 0, ema, state.ema)), metrics

    return run
