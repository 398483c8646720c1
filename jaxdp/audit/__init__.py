"""The audit: an observer that lets all devices compute the same microbatch, and names those that
compute wrongly (docs/reliability.md#audit)."""

from typing import Any

from jaxdp.errors import UsageError
from jaxdp.extras import Extra


class Door(Extra):
    """The audit of `audit.every`."""

    def check(self) -> None:
        """Refuse an audit that could not compare bits, or not act."""
        config, audit = self.config, self.config.audit
        if audit.every is None:
            raise UsageError(
                f"audit.action: {audit.action}, but audit.every is null; set it, such as 100"
            )
        if not config.parallel.in_groups:
            raise UsageError(
                f"audit.every: {audit.every} with reduction: {config.parallel.reduction}, where the bits of a "
                "microbatch depend on the compiled program and the number of threads, so healthy devices may differ; "
                "set parallel.reduction to exact, or audit.every to null"
            )
        if audit.action == "expel" and not config.elastic.enabled:
            raise UsageError(
                "audit.action: expel, but no process can leave this job; set elastic.enabled to true, or use stop"
            )

    def observers(self, training: Any) -> list[Any]:
        from jaxdp.audit.auditor import Audit

        return [Audit(training, self.config.audit.every, self.config.audit.action)]
