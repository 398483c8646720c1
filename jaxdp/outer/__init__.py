"""Local updates (DiLoCo): replicas that train alone, and an outer optimizer of what they share.

The door of local updates: a strategy in the place of that of `parallel`.
"""

import os
from typing import Any

from jaxdp.errors import UsageError
from jaxdp.exact.formats import most_summands
from jaxdp.extras import Extra

SILENCE = "120"  # seconds without a sign of life: the network between sites may be cut


class Door(Extra):
    """Several logical replicas."""

    def check(self) -> None:
        config = self.config
        outer, spike = config.outer, config.spike
        replicas = outer.replicas
        if config.microbatches % (group := replicas * config.parallel.exact_group):
            raise UsageError(
                f"outer.replicas: {replicas} cannot share microbatches: {config.microbatches} evenly; set "
                f"microbatches to a multiple of {group} (outer.replicas x parallel.exact_group)"
            )
        if spike.factor is not None and spike.action == "rollback" and spike.every % outer.every:
            raise UsageError(
                f"spike.every: {spike.every} is no multiple of outer.every: {outer.every}, and a state between two "
                "outer steps may have a replica that has halted; set it to "
                f"{-(-spike.every // outer.every) * outer.every}"
            )
        if outer.reduction and replicas > (most := most_summands(outer.reduction)):
            raise UsageError(
                f"outer.replicas: {replicas} with outer.reduction: {outer.reduction} leave too few bits for each; "
                f"use at most {most}, or outer.reduction: exact"
            )
        if config.parallel.zero:
            raise UsageError(
                f"parallel.zero: {config.parallel.zero} does not work with outer.replicas: {replicas}, whose states "
                "are split over the devices already; set it to 0"
            )

    def set_environment(self) -> None:
        os.environ.setdefault("JAXDP_SILENCE", SILENCE)

    def needs_roles(self) -> bool:
        return True  # the outer optimizer may decay weights, or be Muon

    def change_parts(self, parts: Any) -> Any:
        """Keep no average of each replica's parameters: the outer steps average."""
        return parts._replace(rule=parts.rule._replace(ema_decay=None))

    def strategy(self, parts: Any, make: Any, reduction: Any, devices: Any) -> Any:
        from jaxdp.outer.replicas import make_replicas

        if misfit := self.misfit(len(devices)):
            raise UsageError(misfit, rank=0)
        return make_replicas(self.config, parts, make, reduction, devices)

    def misfit(self, devices: int) -> str:
        replicas = self.config.outer.replicas
        if replicas % devices and devices % replicas:
            return (
                f"outer.replicas: {replicas} cannot be split over {devices} devices; use a number of devices that "
                "divides it or is a multiple of it"
            )
        return ""

    def observers(self, training: Any) -> list[Any]:
        from jaxdp.outer.replicas import LastStep

        return [LastStep(self.config.outer.every, training.run.log)]
