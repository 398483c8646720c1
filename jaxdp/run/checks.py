"""Checks of the devices as one observer."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.train.observer import Observer
from jaxdp.train.run import Progress, Run
from jaxdp.train.state import Batch, TrainState


@dataclasses.dataclass
class Checks(Observer):
    """Checks that run between two updates: before anything that comes later in the order of the
    observers reads the new state.

    checks: after an update for which `is_due(run, progress)`, `check(run, progress, batch)` runs;
    after the last one, `is_due(..., last=True)` decides. meter: paused before a check, whose time
    is none of an update.
    """

    checks: Sequence[Any]
    meter: Observer
    batch: Batch | None = None

    def start(self, run: Run, progress: Progress) -> None:
        self.run = run
        self.progress = progress

    def before(self, updates: range, batch: Batch) -> None:
        self.batch = batch

    def after(self, updates: range, state: TrainState, metrics: Mapping[str, Any]) -> None:
        self._check(last=False)

    def pause(self, step: int, last: bool) -> None:
        if last and self.batch is not None:
            self._check(last=True)

    def _check(self, last: bool) -> None:
        for check in self.checks:
            if check.is_due(self.run, self.progress, last):
                self.meter.pause(self.progress.step, False)
                check.check(self.run, self.progress, self.batch)
