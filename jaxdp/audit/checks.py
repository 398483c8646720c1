"""Checks of the devices as one observer."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.audit.auditor import Audit
from jaxdp.audit.program import Probe
from jaxdp.audit.slow import SlowDevices
from jaxdp.data.dataset import first_example
from jaxdp.run.driver import Training
from jaxdp.train.observer import Observer
from jaxdp.train.run import Progress, Run
from jaxdp.train.state import Batch, TrainState


@dataclasses.dataclass
class Checks(Observer):
    """Checks that run between two updates: before anything that comes later in the order of the
    observers reads the new state.

    checks: after an update for which `is_due(run, progress)`, `check(run, progress, batch)` runs;
    after the last one, `is_due(..., last=True)` decides. training: whose meter is paused before a
    check, whose time is none of an update.
    """

    checks: Sequence[Any]
    training: Training
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
                self.training.meter.pause(self.progress.step, False)
                check.check(self.run, self.progress, self.batch)


def make_checks(training: Training, every: int | None, action: str, factor: float | None) -> Checks:
    """Return the checks of a run: an audit each `every` updates, and the times of slow devices."""
    run, watch = training.run, training.watch
    first = first_example(run.data.train.dataset)
    probe = Probe(run.strategy, run.step, {name: np.ndim(x) for name, x in first.items()})
    checks: list[Any] = []
    if every is not None:
        checks.append(Audit(probe, every, action, watch, training.continuation))
    if factor is not None:
        checks.append(SlowDevices(probe, factor, watch))
    return Checks(checks, training)
