"""The verdict, with its cause where one can be told: what stands in the code, or what all that fails has in common."""

import dataclasses
import itertools
from typing import Any

import jax

from jaxdp.verify.checks import FAILED, NOTE, Check
from jaxdp.verify.compare import Reference, Worst
from jaxdp.verify.rows import Result
from jaxdp.verify.subject import Row, Subject, Trial
from jaxdp.verify.trace import Finding


@dataclasses.dataclass
class Report:
    """What was compared, and how it came out. results: the step alone first, then the subject's own strategy.

    rate: the learning rate, as a factor of its peak. noise, shaky: leaves that were not judged, with how far rounding
    alone moves them. causes: empty where verified.
    """

    subject: Subject
    trial: Trial
    parameters: int
    devices: list[jax.Device]
    tolerance: float
    findings: list[Finding]
    checks: list[Check]
    results: list[Result] = dataclasses.field(default_factory=list)
    rate: float = 1.0
    noise: dict[str, float] = dataclasses.field(default_factory=dict)
    shaky: dict[str, float] = dataclasses.field(default_factory=dict)
    causes: list[str] = dataclasses.field(default_factory=list)

    @property
    def verified(self) -> bool:
        return not self.causes

    @property
    def failed(self) -> list[Result]:
        return [r for r in self.results if not r.refused and (r.problem or r.worst.error > self.tolerance)]

    @property
    def passed(self) -> list[Result]:
        return [r for r in self.results if not r.problem and r.worst.error <= self.tolerance]

    @property
    def largest(self) -> Worst:
        return max((r.worst for r in self.results), default=Worst(0.0, ""))

    @property
    def groups(self) -> dict[str, tuple[Worst, Row | None]]:
        """The worst of each group of leaves over all rows, and the row."""
        found: dict[str, tuple[Worst, Row | None]] = {}
        for result in self.results:
            for name, one in result.groups.items():
                if name not in found or one.error > found[name][0].error:
                    found[name] = one, result.row
        return found


def judge(report: Report, reference: Reference | None = None) -> Report:
    """The report with its causes; no reference: nothing could be trained."""
    causes = [check.text for check in report.checks if check.verdict == FAILED]
    untrainable: list[str] = []
    if reference is not None:
        report.rate, report.noise, report.shaky = reference.rate, reference.noise, reference.shaky
        untrainable = faults_of(reference, report)
    own = next((r for r in report.results if r.row is not None), None)
    if own is not None and own.refused:
        causes.append(f"the strategy that the config asks for is refused: {own.problem}")
    causes += untrainable or (explain(report) if report.failed else [])
    report.causes = list(dict.fromkeys(causes))
    return report


def faults_of(reference: Reference, report: Report) -> list[str]:
    """What is wrong with the oracle's own training."""
    trained, causes = reference.trained, []
    if trained.disagreeing:
        causes.append(
            f"the microbatches disagree on {', '.join(sorted(trained.disagreeing))} of the model's state: an integer "
            "must change in the same way in all"
        )
    losses = trained.curve["loss"]
    if not all(map(_finite, losses)):
        causes.append(f"the loss is not finite: {losses.tolist()} in the first updates; try a smaller optimizer.lr")
    elif report.results and not report.results[0].problem and not report.results[0].errors:
        causes.append("rounding alone moves every leaf by more than is allowed: nothing can be compared")
    return causes


def explain(report: Report) -> list[str]:
    """The likely cause of what differs, most certain first."""
    if report.findings:
        return list(map(str, report.findings))
    problems = [r.problem for r in report.failed if r.problem]
    if problems:
        return [f"{len(problems)} of {len(report.results)} strategies failed: {problems[0]}"]
    if report.results[0] in report.failed:
        return [
            "even without a strategy the step differs from the oracle: something depends on more than its arguments, "
            "such as a global, or a random generator of its own"
        ]
    many = lambda results: any(r.row is not None and r.row.devices > 1 for r in results)
    if many(report.failed) and not many(report.passed):
        return ["one device agrees and many do not: something depends on how many devices there are"]
    common = in_common(report.failed, report.passed)
    told = f"only {', '.join(f'{name} {value}' for name, value in common.items())} differs"
    optimizer = next((c for c in report.checks if c.name == "optimizer" and c.verdict == NOTE), None)
    if "zero" in common and optimizer is not None:
        return [f"{told}, where the optimizer sees slices: {optimizer.text}"]
    if common.get("zero"):
        return [f"{told}, where state is split: the optimizer may look at more than single elements"]
    return [told if common else "no setting is common to all that differ, and to nothing that agrees"]


def in_common(failed: list[Result], passed: list[Result]) -> dict[str, Any]:
    """The fewest settings that everything which failed has together, and nothing that passed."""
    bad = [r.row for r in failed if r.row is not None]
    good = [r.row for r in passed if r.row is not None]
    take = lambda row, names: {name: getattr(row, name) for name in names}
    for names in sorted(SETTINGS, key=len):
        shared = take(bad[0], names)
        if all(take(row, names) == shared for row in bad) and all(take(row, names) != shared for row in good):
            return shared
    return {}


ORDER = ("zero", "backend", "reduction", "accumulate", "devices", "accumulator", "shard_size")
SETTINGS = [names for size in (1, 2, 3) for names in itertools.combinations(ORDER, size)]


def _finite(x: float) -> bool:
    return abs(x) < float("inf")
