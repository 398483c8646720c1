"""What trains on many devices is what one device would have trained, shown for the user's own model, data, optimizer.

In float64, where rounding goes and faults stay: the loss by itself, then a few updates by an oracle that shares no code
with the step, and the same by the step under every kind of strategy that the devices allow.
"""

from collections.abc import Callable, Sequence

import jax

from jaxdp.verify.checks import FAILED, check_optimizer, check_padding
from jaxdp.verify.compare import find_reference
from jaxdp.verify.judge import Report, judge
from jaxdp.verify.loss import check_loss
from jaxdp.verify.machine import check_memory, choose_devices, settings
from jaxdp.verify.matrix import cover, require
from jaxdp.verify.oracle import bind, make_oracle, plain, start, train
from jaxdp.verify.report import as_json, as_text, name_of, outcome
from jaxdp.verify.rows import make_runner
from jaxdp.verify.subject import Row, Subject, make_trial
from jaxdp.verify.survey import survey

__all__ = ["Report", "Row", "Subject", "as_json", "as_text", "choose_devices", "verify"]


def verify(
    subject: Subject,
    devices: Sequence[jax.Device],
    *,
    updates: int = 3,
    tolerance: float | None = None,
    most: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Compares a few updates of every kind of strategy on these devices with the oracle's.

    tolerance: the largest relative error (of a leaf, in the L2 norm) allowed; left out, it follows from what the model
    computes in. most: strategies at most, the subject's own first. say: told of each part that is done. Raises
    UsageError where this machine, or the data, is too small, or the subject's own strategy needs other devices.
    """
    with settings(devices[0]):
        own = subject.own._replace(devices=min(subject.own.devices or len(devices), len(devices)))
        require(own, devices)
        trial = make_trial(subject, len(devices), updates)
        found = survey(subject, trial, tolerance)
        report = Report(subject, trial, found.parameters, list(devices), found.tolerance, found.findings, found.checks)
        if not found.runs:
            return judge(report)
        check_memory(subject, trial, devices)
        begin, one = start(subject, trial), bind(devices[0]) if found.findings else plain
        oracle = make_oracle(subject, one)
        report.checks.append(check_loss(subject, oracle, trial, begin, found.tolerance))
        report.checks.append(check_optimizer(subject, begin.params))
        if any(check.verdict == FAILED for check in report.checks):
            return judge(report)  # whatever is trained with it would be as wrong
        report.checks.append(check_padding(subject, oracle, trial, begin, found.random, found.tolerance))
        for check in report.checks:
            say(f"{check.name}: {check.verdict}")
        reference = find_reference(
            lambda params, *more: train(subject, oracle, trial, begin._replace(params=params), *more),
            subject.make_tx,
            begin.params,
            list(subject.frozen),
            found.epsilon,
            found.tolerance,
        )
        rows = [None, *cover(own, devices)][: most and most + 1]
        run = make_runner(subject, trial, begin, reference, devices, one)
        for i, row in enumerate(rows):
            result = run(row)
            report.results.append(result)
            say(f"{i + 1}/{len(rows)} {name_of(row)}: {outcome(result, found.tolerance)}, {result.seconds:.1f} s")
        return judge(report, reference)
