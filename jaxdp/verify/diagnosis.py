"""The result of a verification, and why it failed: what a check names, or what the configurations that fail share."""

import dataclasses
import functools
import math

import jax

from jaxdp.verify.checks import FAILED, NOTE, Check
from jaxdp.verify.compare import MARGIN, Errors, Reference, Worst
from jaxdp.verify.configurations import Configuration
from jaxdp.verify.problem import Problem, Trial
from jaxdp.verify.run import Result

SHOWN = 5  # leaves of a list


@dataclasses.dataclass
class Report:
    """What was compared, and the result. results: one device first, then the run's own configuration.

    reference: what the oracle trained; None if a check failed before. causes: why it is not verified, or nothing.
    """

    problem: Problem
    trial: Trial
    devices: list[jax.Device]
    parameters: int
    tolerance: float
    checks: list[Check]
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
        return [r for r in self.results if not r.refused and (r.failure or not r.worst.error <= self.tolerance)]

    @property
    def passed(self) -> list[Result]:
        return [r for r in self.results if not r.failure and r.worst.error <= self.tolerance]

    @property
    def largest(self) -> Worst:
        return max((r.worst for r in self.results), default=Worst(0.0, ""))


def find_causes(report: Report) -> list[str]:
    """Return why the problem is not verified, the most certain cause first."""
    causes = [check.text for check in report.checks if check.verdict == FAILED]
    if report.reference is None:
        return causes or ["nothing was compared"]
    asked = next((r for r in report.results if r.configuration == report.problem.configuration), None)
    if asked is not None and asked.refused:
        causes.append(f"the configuration that the config asks for is refused: {asked.failure}")
    oracle_causes = check_reference(report.reference)
    if not oracle_causes and not report.passed and not report.failed:
        oracle_causes = ["no configuration was compared with the oracle"]
    return causes + (oracle_causes or (explain_difference(report) if report.failed else []))


def list_leaves(leaves: Errors) -> str:
    ordered = sorted(leaves.items(), key=lambda item: -item[1])
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(f"{path} ({error:.0e})" for path, error in ordered[:SHOWN]) + more


def note_exceptions(reference: Reference) -> list[Check]:
    """Return notes on the leaves that are not compared, or not as closely as the others."""
    in_part = {path: reference.moved[path] for path, zero in reference.zero.items() if not zero.all()}
    notes = (
        ("not judged, because rounding alone moves them too far", reference.unjudged),
        ("judged without the elements whose gradient is zero but for rounding", in_part),
        (f"judged with a margin of {MARGIN} times what rounding moves them", reference.margins),
    )
    return [Check("rounding", NOTE, f"{text}: {list_leaves(leaves)}") for text, leaves in notes if leaves]


def check_reference(reference: Reference) -> list[str]:
    """Return what is wrong with the oracle's own training, or cannot be compared."""
    trained, causes = reference.trained, []
    if trained.disagreeing:
        causes.append(
            f"the microbatches disagree on {', '.join(sorted(trained.disagreeing))} of the model's state: an integer "
            "must change in the same way in all"
        )
    losses = trained.curve["loss"]
    if not all(map(math.isfinite, losses)):
        causes.append(f"the loss is not finite: {losses.tolist()} in the first updates; try a smaller optimizer.lr")
    elif reference.unexplained:
        leaves = list_leaves(reference.unexplained)
        causes.append(f"not judged, because rounding alone moves them too far to compare: {leaves}")
    elif not reference.judged[0]:
        causes.append("no parameter that is trained was judged")
    return causes


def explain_difference(report: Report) -> list[str]:
    """Return what the configurations that differ from the oracle have in common."""
    failures = [r.failure for r in report.failed if r.failure]
    if failures:
        return [f"{len(failures)} of {len(report.results)} configurations failed: {failures[0]}"]
    bad, good = ([r.configuration for r in results] for results in (report.failed, report.passed))
    if not good:
        return ["every configuration differs, on one device too: the step computes something other than the oracle"]
    for name in Configuration._fields:
        values = {getattr(c, name) for c in bad}
        if len(values) == 1 and not values & {getattr(c, name) for c in good}:
            return [f"only {name} {values.pop()} differs"]
    if all(c.devices > 1 for c in bad) and not any(c.devices > 1 for c in good):
        return ["one device agrees and several do not: something depends on how many devices there are"]
    return ["no setting is common to all that differ, and to nothing that agrees"]
