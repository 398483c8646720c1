"""The report of a verification: its verdict and causes, as text for a person or as JSON."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from jaxdp.metrics.numbers import table
from jaxdp.verify.compare import Reference, Worst, list_leaves
from jaxdp.verify.configurations import Configuration
from jaxdp.verify.problem import FAILED, OK, REFUSED, Check, Problem, Trial
from jaxdp.verify.training import Result


@dataclasses.dataclass
class Report:
    """What was compared, and the result. results: one device first, then the run's own configuration.

    reference: what the oracle trained; None if a check failed before. causes: why it is not verified, or nothing.
    """

    problem: Problem
    trial: Trial
    devices: list[jax.Device]
    tolerance: float
    checks: list[Check]
    parameters: int = 0
    reference: Reference | None = None
    results: list[Result] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def causes(self) -> list[str]:
        return list(dict.fromkeys(find_causes(self)))

    @property
    def verified(self) -> bool:
        return not self.causes

    @property
    def failed(self) -> list[Result]:
        return [r for r in self.results if r.verdict == FAILED]

    @property
    def passed(self) -> list[Result]:
        return [r for r in self.results if r.verdict == OK]

    @property
    def largest(self) -> Worst:
        return max((r.worst for r in self.results), default=Worst(0.0, ""))


def find_causes(report: Report) -> list[str]:
    """Return why the problem is not verified, the most certain cause first."""
    causes, reference = [check.text for check in report.checks if check.verdict == FAILED], report.reference
    if reference is None:
        return causes or ["nothing was compared"]
    asked = [r for r in report.results if r.configuration == report.problem.configuration and r.verdict == REFUSED]
    causes += [f"the configuration that the config asks for is refused: {result.failure}" for result in asked]
    losses = reference.trained.curve["loss"]
    if not np.isfinite(losses).all():
        causes.append(f"the loss is not finite: {losses.tolist()} in the first updates; try a smaller optimizer.lr")
    elif reference.unexplained:
        leaves = list_leaves(reference.unexplained)
        causes.append(f"not compared, because rounding alone moves them too far: {leaves}")
    elif not reference.compared[0]:
        causes.append("no parameter was compared that training moves")
    elif not any(r.configuration.devices > 1 for r in report.passed + report.failed):
        causes.append("nothing was compared on several devices; use --devices 2 or more, and 2 microbatches or more")
    for one in report.failed[:1]:
        fault = one.failure or f"{one.worst.leaf} differs by {one.worst.error:.1e}"
        if any(r.configuration.devices == 1 for r in report.passed):
            fault += (
                "; one device agrees, so what communicates over devices may be the cause (a BatchNorm with sync: true)"
            )
        causes.append(f"{one.configuration.title}: {fault}")
    return causes


def as_text(report: Report, title: str) -> str:
    """Return the checks, the configurations, and the verdict as the last line."""
    trial, problem, reference = report.trial, report.problem, report.reference
    examples, processes = trial.microbatches * trial.microbatch_size, len({d.process_index for d in report.devices})
    lower = f", {reference.rate:g} of the peak learning rate" if reference and reference.rate < 1 else ""
    setting = (
        f"{len(report.devices)} x {report.devices[0].device_kind}{f' in {processes} processes' * (processes > 1)}; "
        f"{len(trial.batches)} updates of {examples} examples in {trial.microbatches} microbatches (a run has "
        f"{problem.order.batch_size} in {problem.order.microbatches}); float64, no loss scaling, no warm-up{lower}"
    )
    parts = [f"{title}\n{setting}", "\n".join(table([("check", "verdict", "result"), *report.checks]))]
    if report.results:
        heads = [*Configuration._fields, f"error (allowed {report.tolerance:g})", "of the leaf"]
        rows = [[*r.configuration.cells, r.outcome, r.failure or r.worst.leaf] for r in report.results]
        parts.append("\n".join(table([heads, *rows])))
    return "\n\n".join([*parts, verdict(report)])


def verdict(report: Report) -> str:
    if not report.verified:
        number, total = len(report.failed), len(report.results)
        differ = f"{number} of {total} configurations differ from the oracle: " if number else ""
        return f"not verified: {differ}{'; '.join(report.causes)}"
    assert report.reference is not None
    compared, trained = report.reference.compared
    why = "" if compared == trained else "; the others have no gradient, but for rounding, or do not move"
    number = sum(r.verdict == REFUSED for r in report.results)
    refused = f" ({number} more refused)" if number else ""
    return (
        f"verified: {len(report.passed)} configurations agree with the oracle{refused}; "
        f"largest relative error {report.largest.error:.1e}, of {report.largest.leaf}; allowed {report.tolerance:g}; "
        f"{compared} of {trained} trained leaves compared{why}"
    )


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as plain values; an infinite error is the text "inf"."""
    reference, trial = report.reference, report.trial
    values = lambda worst: {"error": worst.error if math.isfinite(worst.error) else "inf", "leaf": worst.leaf}
    row = lambda r: {
        "configuration": r.configuration._asdict(),
        **values(r.worst),
        "failure": r.failure,
        "refused": r.verdict == REFUSED,
        "seconds": round(r.seconds, 2),
    }
    return {
        "verified": report.verified,
        "causes": report.causes,
        "tolerance": report.tolerance,
        **values(report.largest),
        "devices": len(report.devices),
        "device_kind": report.devices[0].device_kind,
        "jax": jax.__version__,
        "updates": len(trial.batches),
        "microbatches": trial.microbatches,
        "batch_size": trial.microbatches * trial.microbatch_size,
        "checks": [c._asdict() for c in report.checks],
        "configurations": [row(r) for r in report.results],
        "rate": reference.rate if reference else 1.0,
        "compared": reference.compared if reference else (0, 0),
    }
