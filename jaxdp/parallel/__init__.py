"""Data-parallel strategies and reductions, by name: each joins its table, and the tests of the tables cover it."""

import functools
from collections.abc import Callable

import jax

from jaxdp.parallel.fixed_point import FORMATS
from jaxdp.parallel.integer_sums import integers
from jaxdp.parallel.pjit import PJit
from jaxdp.parallel.pmap import PMap
from jaxdp.parallel.reduction import Reduction, bucket, not_alone, xla
from jaxdp.parallel.strategy import Program, Strategy

STRATEGIES: dict[str, Callable[..., Strategy]] = {"pmap": PMap, "pjit": PJit}
STAGES = {"pmap": (0, 1), "pjit": (0, 1, 2, 3)}
"""The ZeRO stages of each."""

REDUCTIONS: dict[str, Callable[..., Reduction]] = {
    "xla": xla,
    "bucket": bucket,
    **{name: functools.partial(integers, name) for name in FORMATS},
}


def make_reduction(name: str, bucket_mb: float = 25.0, group: int = 1) -> Reduction:
    """The named reduction; 'auto' is bucket where CPU processes talk over Gloo (XLA's combined all-reduce of many
    operands is slow there), else xla. group: microbatches that an exact one computes at once.

    Over Gloo a scatter is an all-reduce and a slice: its own reduce-scatter dies after 30 s whatever the timeout, and
    was reported wrong (jax#40831, jax#40830).
    """
    gloo = jax.process_count() > 1 and jax.default_backend() == "cpu"
    if name == "auto":
        name = "bucket" if gloo else "xla"
    more = {"group": group} if name in FORMATS else {}
    return not_alone(REDUCTIONS[name](bucket_mb, safe=gloo, **more))


__all__ = ["REDUCTIONS", "STAGES", "STRATEGIES", "PJit", "PMap", "Program", "Strategy", "make_reduction"]
