"""A report as a person reads it, and as a program does."""

import io
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax

from jaxdp.verify.judge import Report
from jaxdp.verify.rows import Result
from jaxdp.verify.subject import Row

HEADS = ("devices", "backend", "zero", "reduction", "accumulate", "accumulator", "shard_size")


def as_text(report: Report, title: str, wide: bool = False) -> str:
    """Checks, strategies, groups of leaves, what was set apart, and the verdict in the last line.

    title: what was verified. wide: for a terminal, with rules and colours.
    """
    lines = [title, about(report), ""]
    lines += table(["check", "verdict", "found"], [[c.name, c.verdict, c.text] for c in report.checks], wide)
    if report.results:
        allowed = f"error (allowed {report.tolerance:g})"
        cells = [[*cells_of(r.row), outcome(r, report.tolerance), r.problem or r.worst.leaf] for r in report.results]
        lines += ["", *table([*HEADS, allowed, "of the leaf"], cells, wide)]
        groups = [[name, f"{w.error:.1e}", w.leaf, name_of(row)] for name, (w, row) in report.groups.items()]
        lines += ["", *table(["group", "error", "of the leaf", "worst under"], groups, wide)]
    for what, leaves in (
        ("the gradient is rounding noise, and frozen here", report.noise),
        ("rounding alone moves it too far", report.shaky),
    ):
        shown = [f"{leaf} ({error:.0e})" for leaf, error in sorted(leaves.items(), key=lambda item: -item[1])]
        if shown:
            more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
            lines += ["", f"set apart, not judged: {', '.join(shown[:5])}{more}: {what}"]
    return "\n".join([*lines, "", verdict(report)])


def about(report: Report) -> str:
    kind, trial, subject = report.devices[0].device_kind, report.trial, report.subject
    rate = "the peak learning rate" if report.rate == 1 else f"{report.rate:g} of the peak learning rate"
    return (
        f"{len(report.devices)} x {kind}; {len(trial.batches)} updates of {trial.microbatches * trial.places} examples "
        f"in {trial.microbatches} microbatches (a run has {subject.batch_size} in {subject.microbatches}); float64 "
        f"throughout, no loss scaling, {rate} from the first update on"
    )


def verdict(report: Report) -> str:
    if report.verified:
        refused = sum(r.refused for r in report.results)
        more = f" ({refused} more refused)" if refused else ""
        return (
            f"verified: {len(report.results) - refused} ways to train agree with the oracle{more}; largest relative "
            f"error {report.largest.error:.1e}, of {report.largest.leaf}; allowed {report.tolerance:g}"
        )
    many = f"{len(report.failed)} of {len(report.results)} ways to train differ from the oracle: "
    return f"not verified: {many if report.failed else ''}{'; '.join(report.causes)}"


def cells_of(row: Row | None) -> list[str]:
    if row is None:
        return ["1", "jit", *["-"] * (len(HEADS) - 2)]
    values: list[Any] = list(row)
    if row.zero < 2:
        values[HEADS.index("accumulator")] = None
    return ["-" if v is None else str(v) for v in values]


def name_of(row: Row | None) -> str:
    return " ".join(f"{name} {cell}" for name, cell in zip(HEADS, cells_of(row)) if cell != "-")


def outcome(result: Result, tolerance: float) -> str:
    if result.problem:
        return "refused" if result.refused else "FAILED"
    return f"{result.worst.error:.1e}{' FAILED' if result.worst.error > tolerance else ''}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], wide: bool) -> list[str]:
    """Aligned lines; on a terminal one of rich's tables, which folds long cells."""
    if wide:
        from rich import box
        from rich.console import Console
        from rich.table import Table

        made = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            bad = any("FAILED" in cell for cell in row)
            made.add_row(*(cell.replace("[", r"\[") for cell in row), style="red" if bad else None)
        text = io.StringIO()
        Console(file=text, force_terminal=True, width=Console(file=sys.stdout).width).print(made)
        return text.getvalue().rstrip().splitlines()
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    return ["  ".join(f"{cell:{w}}" for cell, w in zip(row, widths)).rstrip() for row in (heads, *rows)]


def as_json(report: Report) -> dict[str, Any]:
    """The same as plain values; an infinite error is the text "inf"."""
    one = lambda w: {"error": number(w.error), "leaf": w.leaf}
    row = lambda r: None if r is None else r._asdict()
    return {
        "verified": report.verified,
        "causes": report.causes,
        "tolerance": report.tolerance,
        **one(report.largest),
        "devices": len(report.devices),
        "device_kind": report.devices[0].device_kind,
        "jax": jax.__version__,
        "rate": report.rate,
        "updates": len(report.trial.batches),
        "microbatches": report.trial.microbatches,
        "batch_size": report.trial.microbatches * report.trial.places,
        "checks": [c._asdict() for c in report.checks],
        "rows": [
            {
                "strategy": row(r.row),
                **one(r.worst),
                "groups": {name: one(w) for name, w in r.groups.items()},
                "problem": r.problem,
                "refused": r.refused,
                "seconds": round(r.seconds, 2),
            }
            for r in report.results
        ],
        "groups": {name: {**one(w), "strategy": row(r)} for name, (w, r) in report.groups.items()},
        "noise": {leaf: number(e) for leaf, e in report.noise.items()},
        "shaky": {leaf: number(e) for leaf, e in report.shaky.items()},
    }


def number(error: float) -> float | str:
    return error if math.isfinite(error) else "inf"
