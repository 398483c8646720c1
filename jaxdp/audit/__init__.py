"""Checks of the devices between two updates: which one computes wrongly, which one slowly; and
faults to test them.

The door of the checks of devices: observers that compute a microbatch between two updates.
"""

import os
from typing import TYPE_CHECKING

from jaxdp.config import Audit
from jaxdp.errors import UsageError
from jaxdp.extras import Extra

if TYPE_CHECKING:
    from jaxdp.run.driver import Training
    from jaxdp.train.observer import Observer
    from jaxdp.train.run import Run


class Door(Extra):
    """The audit of `audit.every`, and the times of `watchdog.slow_factor`."""

    def check(self) -> None:
        """Refuse an audit that could not compare bits, or not act."""
        config = self.config
        if config.audit == Audit():
            return
        if config.audit.every is None:
            raise UsageError(
                f"audit.action: {config.audit.action}, but audit.every is null; set it, such as 100"
            )
        if not config.parallel.in_groups:
            raise UsageError(
                f"audit.every: {config.audit.every} with reduction: {config.parallel.reduction}, where the bits of a "
                "microbatch depend on the compiled program and the number of threads, so healthy devices may differ; "
                "set parallel.reduction to exact, or audit.every to null"
            )
        if config.audit.action == "expel" and not config.elastic.enabled:
            raise UsageError(
                "audit.action: expel, but no process can leave this job; set elastic.enabled to true, or use stop"
            )

    def observers(self, training: "Training") -> "list[Observer]":
        config, run = self.config, training.run
        every, factor = config.audit.every, config.watchdog.slow_factor
        if run.checkpoints.context.size == 1 or factor is None or not has_cores(run):
            factor = None
        if every is None and factor is None:
            return []
        from jaxdp.audit.checks import make_checks

        return [make_checks(training, every, config.audit.action, factor)]


def has_cores(run: "Run") -> bool:
    """Return whether every CPU device of all processes has a core; else their processes slow each
    other down.
    """
    context = run.checkpoints.context
    devices = run.strategy.devices
    local = sum(context.hosts[d.process_index] == context.hosts[context.rank] for d in devices)
    lacks = devices[0].platform == "cpu" and local > (os.cpu_count() or 1)
    return not any(context.exchange("cores", "lacks" if lacks else ""))
