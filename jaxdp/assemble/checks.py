"""The checks of the devices between two updates that a config asks for, and the faults of `JAXDP_FAULT`."""

import dataclasses
from typing import Any

import numpy as np

from jaxdp.audit.check import Audit
from jaxdp.audit.inject import Fault, Injection, of_this_process
from jaxdp.audit.program import Probe
from jaxdp.audit.slow import SlowDevices
from jaxdp.config import Config
from jaxdp.training.run import Run

__all__ = ["of_this_process", "with_checks"]


def with_checks(run: Run, config: Config, faults: list[Fault]) -> Run:
    """Return the run with its `checks`."""
    step = run.step
    checks: list[Any] = []
    if faults:
        checks = [injection := Injection(run, faults)]
        run, step = dataclasses.replace(run, step=injection.flips(step)), injection.flips(step, once=False)
    first = run.train.dataset.read(np.zeros(1, np.int64))
    probe = Probe(run.strategy, step, {name: np.ndim(x) for name, x in first.items()})
    if config.audit.every is not None:
        checks.append(Audit(probe, config.audit.every, config.audit.action))
    if run.checkpoints.context.size > 1 and config.watchdog.slow_factor is not None:
        checks.append(SlowDevices(probe, config.watchdog.slow_factor))
    return dataclasses.replace(run, checks=checks)
