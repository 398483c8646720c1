"""The checks of the devices between two updates that a config asks for, and the faults of
`JAXDP_FAULT`.
"""

import os
from typing import Any

import numpy as np

from jaxdp.audit.auditor import Audit
from jaxdp.audit.inject import Fault, Injection
from jaxdp.audit.program import Probe
from jaxdp.audit.slow import SlowDevices
from jaxdp.config import Config
from jaxdp.train.run import Run


def with_checks(run: Run, config: Config, faults: list[Fault]) -> Run:
    """Return the run with its `checks`."""
    step = run.step
    checks: list[Any] = []
    if faults:
        checks = [injection := Injection(run, faults)]
        run, step = run.replace(step=injection.flips(step)), injection.flips(step, once=False)
    every, factor = config.audit.every, config.watchdog.slow_factor
    if run.checkpoints.context.size == 1 or not has_cores(run):
        factor = None
    if every is not None or factor is not None:
        first = run.data.train.dataset.read(np.zeros(1, np.int64))
        probe = Probe(run.strategy, step, {name: np.ndim(x) for name, x in first.items()})
        checks += [Audit(probe, every, config.audit.action)] if every is not None else []
        checks += [SlowDevices(probe, factor)] if factor is not None else []
    return run.replace(checks=checks)


def has_cores(run: Run) -> bool:
    """Return whether every CPU device of all processes has a core; else their processes slow each
    other down.
    """
    context, devices = run.checkpoints.context, run.strategy.devices
    local = sum(context.hosts[d.process_index] == context.hosts[context.rank] for d in devices)
    lacks = devices[0].platform == "cpu" and local > (os.cpu_count() or 1)
    return not any(context.exchange("cores", "lacks" if lacks else ""))
