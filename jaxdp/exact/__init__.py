"""Exact sums: the same bits on any number of devices.

The door of the exact reductions: what they ask of the rest of a config, and what they add to a
state. It imports JAX only once a run is built.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxdp.config import Config
from jaxdp.errors import UsageError
from jaxdp.exact import flags
from jaxdp.exact.formats import most_summands
from jaxdp.extras import Extra


class Door(Extra):
    """The reductions exact, exact16 and exact8."""

    def check(self) -> None:
        """Refuse settings whose rounding would depend on the number of devices."""
        config = self.config
        parallel = config.parallel
        name = parallel.reduction
        if parallel.accumulate == "vmap":
            raise UsageError(
                f"parallel.accumulate: vmap with reduction: {name} would compute other microbatches together "
                "on every number of devices; leave it auto, and set exact_group to how many are computed together"
            )
        dtypes = config.precision
        if dtypes.reduce not in (None, dtypes.params, dtypes.widest):
            raise UsageError(
                f"precision.reduce: {dtypes.reduce} with reduction: {name}, where gradients travel as "
                "integers; leave it null"
            )
        group = parallel.exact_group
        if group < 1 or config.microbatches % group:
            raise UsageError(
                f"parallel.exact_group: {group} does not divide microbatches: {config.microbatches}"
            )
        most = most_summands(name)
        if config.microbatches > most * group:
            raise UsageError(
                f"microbatches: {config.microbatches} with reduction: {name} leave too few bits for each; use at "
                f"most {most * group}, or {-(-config.microbatches // most)} in each parallel.exact_group, or "
                "reduction: exact"
            )

    set_environment = staticmethod(flags.set_flags)
    check_environment = staticmethod(flags.check_flags)

    def initial_state(self, make: Callable[..., Any], parts: Any) -> Callable[..., Any]:
        from jaxdp.exact.integer_sums import with_exponents

        return lambda *arguments: with_exponents(make(*arguments), parts.rule.trainable)


def in_exact_mode(config: Config) -> Config:
    """Return a config whose bits are the same on any number of devices: with its own reduction, if
    that is exact, or the widest. Raises UsageError."""
    parallel = config.parallel
    name = parallel.reduction if parallel.in_groups else "exact"
    parallel = dataclasses.replace(parallel, reduction=name, accumulate="auto")
    config = dataclasses.replace(config, parallel=parallel)
    Door(config).check()
    return config
