"""The checks of the devices between two updates that a config asks for."""

import os
from typing import Any

import numpy as np

from jaxdp.audit.auditor import Audit
from jaxdp.audit.program import Probe
from jaxdp.audit.slow import SlowDevices
from jaxdp.config import Config
from jaxdp.data.dataset import first_example
from jaxdp.process.monitor import Monitor
from jaxdp.train.run import Run


def make_checks(run: Run, config: Config, watch: Monitor, snapshots: Any) -> list[Any]:
    """Return the checks of a run."""
    every = config.audit.every
    factor = config.watchdog.slow_factor
    if run.checkpoints.context.size == 1 or not has_cores(run):
        factor = None
    checks: list[Any] = []
    if every is None and factor is None:
        return checks
    first = first_example(run.data.train.dataset)
    probe = Probe(run.strategy, run.step, {name: np.ndim(x) for name, x in first.items()})
    if every is not None:
        checks.append(Audit(probe, every, config.audit.action, watch, snapshots))
    if factor is not None:
        checks.append(SlowDevices(probe, factor, watch))
    return checks


def has_cores(run: Run) -> bool:
    """Return whether every CPU device of all processes has a core; else their processes slow each
    other down.
    """
    context = run.checkpoints.context
    devices = run.strategy.devices
    local = sum(context.hosts[d.process_index] == context.hosts[context.rank] for d in devices)
    lacks = devices[0].platform == "cpu" and local > (os.cpu_count() or 1)
    return not any(context.exchange("cores", "lacks" if lacks else ""))
