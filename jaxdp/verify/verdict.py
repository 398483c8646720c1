"""The report of a verification: its verdict and causes, as text for a person or as JSON."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxdp.errors import UsageError, one_line
from jaxdp.metrics.numbers import table
from jaxdp.verify.compare import Errors, Reference, Worst, worst
from jaxdp.verify.configurations import Configuration
from jaxdp.verify.problem import FAILED, OK, REFUSED, Check


class Result(NamedTuple):
    """What a configuration trained.

    verdict: OK, FAILED, or REFUSED as a run would be. value: the largest error, or a digest; "" if
    there is none. note: the leaf of this error, how the bits differ, or why there is no value.
    errors: of each compared leaf."""

    configuration: Configuration
    verdict: str
    value: str = ""
    note: str = ""
    errors: Errors = {}

    @property
    def outcome(self) -> str:
        return " ".join(word for word in (self.value[:16], self.verdict) if word not in ("", OK))


@dataclasses.dataclass
class Report:
    """What was compared, and the result. value: the name of the results' values. goal: of the
    comparison, in a word.

    setting: what was trained, and on what, in words. reference: what the oracle trained; None if a
    check failed before, or if bits are compared. causes: why it is not verified, or nothing.
    agreement: what verified configurations share."""

    setting: str
    value: str
    checks: list[Check] = dataclasses.field(default_factory=list)
    reference: Reference | None = None
    results: list[Result] = dataclasses.field(default_factory=list)
    causes: list[str] = dataclasses.field(default_factory=list)
    agreement: str = ""
    goal: str = "verified"

    @property
    def verified(self) -> bool:
        return not self.causes

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.verdict == FAILED]

    @property
    def passed(self) -> list[Result]:
        return [result for result in self.results if result.verdict == OK]

    @property
    def largest(self) -> Worst:
        return max((worst(result.errors) for result in self.results), default=Worst(0.0, ""))

    def run(
        self,
        train: Callable[[Configuration], Result],
        configurations: Sequence[Configuration],
        progress: Callable[[str], None],
    ) -> None:
        """Add the result of each configuration; progress: see `verify`."""
        for i, configuration in enumerate(configurations):
            began = time.monotonic()
            try:
                result = train(configuration)
            except UsageError as error:
                result = Result(configuration, REFUSED, note=one_line(error))
            self.results.append(result)
            shown = f"{i + 1}/{len(configurations)} {configuration.title}: {result.outcome}"
            progress(f"{shown}, {time.monotonic() - began:.1f} s")

    def refusal(self, own: Configuration) -> list[str]:
        """Return why the run's own configuration was refused, if it was."""
        return [
            f"the configuration that the config asks for is refused: {r.note}"
            for r in self.results
            if r.configuration == own and r.verdict == REFUSED
        ]


def describe(devices: Sequence[jax.Device]) -> str:
    processes = len({device.process_index for device in devices})
    return (
        f"{len(devices)} x {devices[0].device_kind}{f' in {processes} processes' * (processes > 1)}"
    )


def as_text(report: Report, title: str) -> str:
    """Return the checks, the configurations, and the verdict as the last line."""
    parts = [f"{title}\n{report.setting}"]
    if report.checks:
        parts.append("\n".join(table([("check", "verdict", "result"), *report.checks])))
    if report.results:
        rows = [[*r.configuration.cells, r.outcome, r.note] for r in report.results]
        parts.append("\n".join(table([[*Configuration._fields, report.value, ""], *rows])))
    return "\n\n".join([*parts, verdict(report)])


def verdict(report: Report) -> str:
    passed, failed = len(report.passed), len(report.failed)
    refused = len(report.results) - passed - failed
    more = f" ({refused} more refused)" if refused else ""
    if report.verified:
        return f"{report.goal}: {passed} configurations{more} {report.agreement}"
    differ = f"{failed} of {passed + failed} configurations differ{more}: " if failed else ""
    return f"not {report.goal}: {differ}{'; '.join(report.causes)}"


def as_json(report: Report, title: str) -> dict[str, Any]:
    """Return the report as plain values."""
    return {
        "title": title,
        "setting": report.setting,
        report.goal: report.verified,
        "causes": report.causes,
        "jax": jax.__version__,
        "checks": [check._asdict() for check in report.checks],
        "configurations": [
            {
                "configuration": r.configuration._asdict(),
                "verdict": r.verdict,
                report.value: r.value,
                "note": r.note,
            }
            for r in report.results
        ],
    }
