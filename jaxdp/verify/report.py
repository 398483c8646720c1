"""Print a report for a person, or as JSON."""

import io
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxdp.verify.compare import Worst
from jaxdp.verify.configurations import Configuration
from jaxdp.verify.diagnosis import Report
from jaxdp.verify.run import Result


def as_text(report: Report, title: str, terminal: bool = False) -> str:
    """Return the checks, the configurations, and the verdict as the last line."""
    parts = [f"{title}\n{describe(report)}"]
    checks = [[check.name, check.verdict, check.text] for check in report.checks]
    parts.append(table(["check", "verdict", "result"], checks, terminal))
    if report.results:
        heads = [*Configuration._fields, f"error (allowed {report.tolerance:g})", "of the leaf"]
        rows = [
            [*r.configuration.cells, outcome(r, report.tolerance), r.failure or r.worst.leaf] for r in report.results
        ]
        parts.append(table(heads, rows, terminal))
    return "\n\n".join([*parts, verdict(report)])


def describe(report: Report) -> str:
    trial, problem, reference = report.trial, report.problem, report.reference
    examples, processes = trial.microbatches * trial.microbatch_size, len({d.process_index for d in report.devices})
    lower = f", {reference.rate:g} of the peak learning rate" if reference and reference.rate < 1 else ""
    return (
        f"{len(report.devices)} x {report.devices[0].device_kind}{f' in {processes} processes' * (processes > 1)}; "
        f"{len(trial.batches)} updates of {examples} examples in {trial.microbatches} microbatches (a run has "
        f"{problem.batch_size} in {problem.microbatches}); float64, no loss scaling, no warm-up{lower}"
    )


def verdict(report: Report) -> str:
    if not report.verified:
        number, total = len(report.failed), len(report.results)
        differ = f"{number} of {total} configurations differ from the oracle: " if number else ""
        return f"not verified: {differ}{'; '.join(report.causes)}"
    assert report.reference is not None
    judged, trained = report.reference.judged
    why = "" if judged == trained else "; the gradient of the others is zero but for rounding"
    number = sum(r.refused for r in report.results)
    refused = f" ({number} more refused)" if number else ""
    return (
        f"verified: {len(report.passed)} configurations agree with the oracle{refused}; "
        f"largest relative error {report.largest.error:.1e}, of {report.largest.leaf}; allowed {report.tolerance:g}; "
        f"{judged} of {trained} trained leaves judged{why}"
    )


def outcome(result: Result, tolerance: float) -> str:
    if result.failure:
        return "refused" if result.refused else "FAILED"
    return f"{result.worst.error:.1e}{' FAILED' * (not result.worst.error <= tolerance)}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], terminal: bool) -> str:
    """Return a table: of a terminal's width and in colour, or as aligned lines."""
    grid = Table(*heads, box=box.SIMPLE_HEAD if terminal else None, pad_edge=False)
    for row in rows:
        bad = terminal and any("FAILED" in cell for cell in row)
        grid.add_row(*map(Text, row), style="red" if bad else None)
    out = io.StringIO()
    width = Console(file=sys.stdout).width if terminal else 10_000
    Console(file=out, force_terminal=terminal, width=width).print(grid)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as plain values; an infinite error is the text "inf"."""
    reference, trial = report.reference, report.trial
    return {
        "verified": report.verified,
        "causes": report.causes,
        "tolerance": report.tolerance,
        **as_values(report.largest),
        "devices": len(report.devices),
        "device_kind": report.devices[0].device_kind,
        "jax": jax.__version__,
        "updates": len(trial.batches),
        "microbatches": trial.microbatches,
        "batch_size": trial.microbatches * trial.microbatch_size,
        "checks": [c._asdict() for c in report.checks],
        "configurations": [
            {
                "configuration": r.configuration._asdict(),
                **as_values(r.worst),
                "failure": r.failure,
                "refused": r.refused,
                "seconds": round(r.seconds, 2),
            }
            for r in report.results
        ],
        "rate": reference.rate if reference else 1.0,
        "judged": reference.judged if reference else (0, 0),
    }


def as_values(worst: Worst) -> dict[str, Any]:
    return {"error": worst.error if math.isfinite(worst.error) else "inf", "leaf": worst.leaf}
