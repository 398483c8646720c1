"""Local updates (DiLoCo): replicas that train alone, and an outer optimizer of what they share.

The door of local updates: a strategy in the place of that of `parallel`.
"""

import os
from collections.abc import Iterator
from typing import Any

from jaxdp.errors import UsageError
from jaxdp.extras import Extra, door

SILENCE = "120"  # seconds without a sign of life: the network between sites may be cut


class Door(Extra):
    """Several logical replicas."""

    def check(self) -> None:
        config, outer = self.config, self.config.outer
        parallel, spike = config.parallel, config.spike
        replicas, every = outer.replicas, outer.every
        group = replicas * parallel.exact_group
        if config.microbatches % group:
            grouped = f" in groups of {parallel.exact_group}" if parallel.exact_group > 1 else ""
            raise UsageError(
                f"outer.replicas: {replicas} cannot share microbatches: {config.microbatches}{grouped} evenly; set "
                f"microbatches to a multiple of {group}"
            )
        if config.steps is not None and config.steps % every:
            near = f"{config.steps // every * every} or " if config.steps > every else ""
            raise UsageError(
                f"outer.every: {every} does not divide steps: {config.steps}, and updates after the last outer step "
                f"would be lost; set steps to {near}{(config.steps // every + 1) * every}"
            )
        if spike.factor is not None and spike.action == "rollback" and spike.every % every:
            raise UsageError(
                f"spike.every: {spike.every} is no multiple of outer.every: {every}, and a state between two outer "
                f"steps may have a replica that has halted; set it to {-(-spike.every // every) * every}"
            )
        if outer.reduction:
            door("exact", f"outer.reduction: {outer.reduction}")
            from jaxdp.exact import most_summands

            if replicas > (most := most_summands(outer.reduction)):
                raise UsageError(
                    f"outer.replicas: {replicas} with outer.reduction: {outer.reduction} leave too few bits for each; "
                    f"use at most {most}, or outer.reduction: exact"
                )
        if parallel.zero:
            raise UsageError(
                f"parallel.zero: {parallel.zero} does not work with outer.replicas: {replicas}, whose states are "
                "split over the devices already; set it to 0"
            )

    def set_environment(self) -> None:
        os.environ.setdefault("JAXDP_SILENCE", SILENCE)

    def needs_roles(self) -> bool:
        optimizer = self.config.outer.optimizer
        return optimizer.target == "muon" or bool(optimizer.args.get("weight_decay"))

    def change_parts(self, parts: Any) -> Any:
        """Keep no average of each replica's parameters: the outer steps average."""
        return parts._replace(rule=parts.rule._replace(ema_decay=None))

    def strategy(self, parts: Any, make: Any, reduction: Any, devices: Any) -> Any:
        from jaxdp.outer.replicas import make_replicas

        return make_replicas(self.config, parts, make, reduction, devices)

    def misfit(self, devices: int) -> str:
        replicas = self.config.outer.replicas
        if replicas % devices and devices % replicas:
            return f"outer.replicas: {replicas} cannot be split over the {devices} devices that are left"
        return ""

    def advice(self, run: Any) -> Iterator[str]:
        every, between = run.options.eval_every, self.config.outer.every
        if run.data.eval and (every or 0) % between:
            yield (
                f"eval.every: {every} is no multiple of outer.every: {between}: an evaluation, "
                "or a callback that ends training then, sees the parameters of the last outer step; make it a multiple"
            )

    def observers(self, training: Any) -> list[Any]:
        from jaxdp.outer.replicas import LastStep

        return [LastStep(self.config.outer.every, training.run.log)]
