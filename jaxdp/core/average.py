"""The exponential moving average of the parameters (EMA), as a wrapper of `Step.apply`."""

from collections.abc import Callable
from typing import Any

import jax

from jaxdp.core import skip


def with_average(apply: Callable[..., Any], decay: float | None) -> Callable[..., Any]:
    """Wrap `Step.apply` to set ema = decay x ema + (1 - decay) x params after each update that is not skipped."""
    if decay is None:
        return apply

    def run(state: Any, sums: Any, *total: Any) -> Any:
        new, metrics = apply(state, sums, *total)
        average = lambda e, p: e + (1 - decay) * (p.astype(e.dtype) - e)
        ema = jax.tree.map(average, state.ema, new.params)
        return new.replace(ema=skip.where(metrics["skipped"] == 0, ema, state.ema)), metrics

    return run
