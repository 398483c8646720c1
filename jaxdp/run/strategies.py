"""Tables of the data-parallel strategies and reductions, by name; the contract tests cover every
entry.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxdp.config.training import EXACT
from jaxdp.cpu import on_cpu
from jaxdp.errors import UsageError
from jaxdp.parallel.pjit import PJit
from jaxdp.parallel.pmap import PMap
from jaxdp.parallel.reduction import Reduction, bucket, on_any_devices, xla
from jaxdp.parallel.strategy import Strategy
from jaxdp.targets import bind, call, locate, require

KEY = "parallel.reduction"
STRATEGIES: dict[str, Callable[..., Strategy]] = {"pmap": PMap, "pjit": PJit}
STAGES = {"pmap": (0, 1), "pjit": (0, 1, 2, 3)}
"""The ZeRO stages that each strategy supports."""

REDUCTIONS: dict[str, Any] = {
    "xla": xla,
    "bucket": bucket,
    **EXACT,
}
"""A function that returns each reduction, or its dotted path, which an extra may lack."""


def make_reduction(name: str, bucket_mb: float = 25.0, group: int = 1) -> Reduction:
    """Return the reduction of a name, or of the dotted path of a function that returns a
    `Reduction`.

    'auto' means bucket for CPU processes over Gloo, where XLA's combined all-reduce of many
    operands is slow, else xla. A function gets those of bucket_mb, safe (no scatters) and group
    (microbatches to compute at once) that it has parameters for. Raises UsageError for anything
    else.

    Over Gloo a scatter is an all-reduce and a slice: Gloo's reduce-scatter fails after 30 s
    whatever the timeout, and was reported to return wrong results (jax#40831, jax#40830).
    """
    gloo = jax.process_count() > 1 and jax.default_backend() == "cpu"
    if is_auto := name == "auto":
        name = "bucket" if gloo else "xla"
    bound = bind(
        KEY,
        locate(KEY, name, REDUCTIONS, KEY),
        {},
        {"bucket_mb": bucket_mb, "safe": gloo, "group": group},
    )
    require(KEY, bound)
    reduction = call(KEY, bound)
    if not isinstance(reduction, Reduction):
        raise UsageError(
            f"{KEY}: {name!r} must return a jaxdp.parallel.reduction.Reduction; see docs/reductions.md"
        )
    if is_auto and on_cpu():  # where nothing is computed beside a collective
        reduction = reduction._replace(overlaps=False)
    return on_any_devices(reduction)
