"""A table of several runs, the best first."""

import csv
import io
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxdp.errors import UsageError, suggest
from jaxdp.metrics import numbers
from jaxdp.report.media import Json, is_number
from jaxdp.report.read import RATES
from jaxdp.run import rundir

SWEEP = "sweep.json"  # in the directory of a sweep
METRICS = ("loss", "accuracy", "perplexity")


def ranked(runs: Sequence[Json], metric: str) -> list[Json]:
    """Sort runs of `read_run`, the best first, those without a finite value or loss last. Of a metric
    whose name does not say which is best, the largest is first.

    Raises UsageError if they have metrics, but none has this one.
    """

    def of_batch(run):
        return "loss_of" in run["numbers"] or run["numbers"].get("split", "train") == "train"

    if not all(map(of_batch, runs)):
        # do not compare the metrics of a training batch with those of an evaluation
        rates = ("step", *RATES)
        runs = [
            {**run, "numbers": {k: x for k, x in run["numbers"].items() if k in rates}}
            if of_batch(run)
            else run
            for run in runs
        ]
    known = sorted(
        {name for run in runs for name in run["numbers"]}
        - {"step", "split", "time", "params_sha256"}
    )
    if known and metric not in known:
        hint = suggest(metric, known, 0.5, f"known: {', '.join(known)}")
        raise UsageError(f"--metric: no run has {metric!r}; {hint}")
    return sorted(runs, key=lambda run: rank(run, metric))


def rank(run: Json, metric: str) -> float:
    """Return the number that `ranked` sorts by: infinite for a run without a finite value or loss."""
    value = run["numbers"].get(metric)
    if is_number(value) and is_number(run["numbers"].get("loss", 0.0)):
        return (numbers.sign(metric) or -1) * value
    return math.inf


def rows_of(runs: Sequence[Json], metric: str) -> list[list[Any]]:
    """Return a head, and for each run its metrics and the keys in which the runs differ."""
    keys = {key: None for run in runs for key in run["config"] if key != "run_dir"}
    differ = [key for key in keys if len({json.dumps(run["config"].get(key)) for run in runs}) > 1]
    others = [m for m in METRICS if m != metric and any(m in run["numbers"] for run in runs)]
    columns = [metric, *others, "step"]
    rows: list[list[Any]] = [[*columns, *differ, "run"]]
    for run in runs:
        shown = [run["numbers"].get(name) for name in columns]
        values = [json.dumps(run["config"].get(key)).strip('"') for key in differ]
        word = run["state"]["word"]
        marks = [] if word == "finished" else [word]
        if run["config"].get("audit.action") == "warn" and any(
            e["kind"] == "audit_failed" for e in run["events"]
        ):
            marks.append("wrong device")
        name = f"{run['name']} ({', '.join(marks)})" if marks else run["name"]
        rows.append([*shown, *values, name])
    return rows


def table(runs: Sequence[Json], metric: str) -> str:
    """Return lines with the rows of ranked runs, and one that names the best."""
    rows = rows_of(runs, metric)
    cells = [
        [f"{x:.6g}" if isinstance(x, int | float) else str(x or "-") for x in row] for row in rows
    ]
    lines = numbers.table(cells)
    if not numbers.sign(metric):
        lines.append(f"{metric}: its name does not say which is best; the largest is first")
    elif rank(runs[0], metric) < math.inf:
        lines.append(f"best: {rows[1][-1]}, {metric} {cells[1][0]}")
    return "\n".join(lines)


def write_csv(file: pathlib.Path, runs: Sequence[Json], metric: str) -> None:
    """Write the rows of ranked runs as CSV (RFC 4180). Raises UsageError."""
    text = io.StringIO()
    csv.writer(text).writerows(rows_of(runs, metric))
    rundir.write(file, text.getvalue())
