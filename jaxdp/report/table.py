"""A table of several runs, the best first."""

import json
import math
from collections.abc import Sequence
from typing import Any

from jaxdp.errors import UsageError, suggest
from jaxdp.metrics import numbers
from jaxdp.report.media import is_finite
from jaxdp.report.read import RATES

Json = dict[str, Any]
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
        near = suggest(metric, known, 0.5, f"known: {', '.join(known)}")
        raise UsageError(f"--metric: no run has {metric!r}; {near}")
    sign = numbers.sign(metric) or -1

    def rank(run: Json) -> float:
        value = run["numbers"].get(metric)
        if is_finite(value) and is_finite(run["numbers"].get("loss", 0.0)):
            return sign * value
        return math.inf

    return sorted(runs, key=rank)


def table(runs: Sequence[Json], metric: str) -> str:
    """Return lines with each run's metrics and the keys in which the runs differ."""
    keys = {key: None for run in runs for key in run["config"] if key != "run_dir"}
    differ = [key for key in keys if len({json.dumps(run["config"].get(key)) for run in runs}) > 1]
    others = [m for m in METRICS if m != metric and any(m in run["numbers"] for run in runs)]
    columns = [metric, *others, "step"]
    rows = [[*columns, *differ, "run"]]
    for run in runs:
        shown = [run["numbers"].get(name) for name in columns]
        values = [json.dumps(run["config"].get(key)).strip('"') for key in differ]
        marks = [] if run["state"]["word"] == "finished" else [run["state"]["word"]]
        if run["config"].get("audit.action") == "warn" and any(
            e["kind"] == "audit_failed" for e in run["events"]
        ):
            marks.append("wrong device")
        name = f"{run['name']} ({', '.join(marks)})" if marks else run["name"]
        cells = [f"{x:.6g}" if isinstance(x, int | float) else str(x or "-") for x in shown]
        rows.append([*cells, *values, name])
    lines = numbers.table(rows)
    if not numbers.sign(metric):
        lines.append(f"{metric}: its name does not say which is best; the largest is first")
    return "\n".join(lines)
