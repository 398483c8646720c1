"""The breakdown of a run's time, from its records and events."""

import itertools
import math
import statistics
from typing import Any

from jaxdp.metrics.jsonl import BEGINS, ENDS

Json = dict[str, Any]


def sessions(records: list[Json], events: list[Json]) -> list[Json]:
    """Return the periods of training: start, end (seconds since the epoch), first (step), how (it
    ended, or None).

    A session without a final event ends at its last record or event. Empty without events.
    """
    starts = [e for e in events if e["kind"] in BEGINS]
    limits = [*(e["t"] for e in starts[1:]), math.inf]
    times = [x["t"] for x in events if x.get("t")] + [r["time"] for r in records if "time" in r]
    result = []
    for begin, limit in zip(starts, limits):
        # none, if the clock was set back before the next session, or differs between hosts
        inside = [t for t in times if begin["t"] <= t < limit] or [begin["t"]]
        ends = [e["kind"] for e in events if e["kind"] in ENDS and begin["t"] <= e["t"] < limit]
        result.append(
            {
                "start": begin["t"],
                "end": max(inside),
                "first": begin.get("step") or 0,
                "how": ends[-1] if ends else None,
                "devices": begin.get("devices"),
                "processes": begin.get("processes"),
            }
        )
    return result


def seconds(records: list[Json], events: list[Json]) -> Json:
    """Return the total seconds from the first start to the last record or event, and the parts of
    it.

    starting: from a start to the end of its first update; updates: the device's work, and anything
    inseparable from it; input: the loop waited for data; evaluation; saving: the loop was blocked
    by it; again: updates of an elastic job that were lost and made again; down: no process trained;
    other: the rest. The later of two records sets the time of all updates between them. Empty
    without events, or if the clock was set back."""
    spans = sessions(records, events)
    if not spans:
        return {}
    parts = dict.fromkeys(
        ("starting", "updates", "input", "evaluation", "saving", "again", "down"), 0.0
    )
    for span in spans:

        def inside(t, span=span):
            return t is not None and span["start"] <= t <= span["end"]

        first = {"t": span["end"], "step": span["first"]}
        first = next((e for e in events if e["kind"] == "first_update" and inside(e["t"])), first)
        parts["starting"] += first["t"] - span["start"]
        before = first.get("step", 0)
        for r in records:
            if r["split"] == "train" and inside(r.get("time")):
                work = 1e-3 * _number(r.get("step_time_ms")) * max(r["step"] - before, 0)
                waited = min(max(_number(r.get("input_wait")), 0.0), 1.0)
                parts["input"] += work * waited
                parts["updates"] += work * (1 - waited)
                before = r["step"]
    parts["down"] = sum(
        max(after["start"] - span["end"], 0.0) for span, after in itertools.pairwise(spans)
    )
    parts["evaluation"] = sum(
        _number(e.get("seconds")) for e in events if e["kind"] == "evaluation"
    )
    parts["saving"] = sum(_number(e.get("blocked")) for e in events)
    times = [t for r in records if r["split"] == "train" and (t := _number(r.get("step_time_ms")))]
    lost = sum(_number(e.get("again")) for e in events)
    parts["again"] = 1e-3 * lost * statistics.median(times) if times else 0.0
    total = spans[-1]["end"] - spans[0]["start"]
    if total <= 0:  # the clock was set
        return {}
    parts["other"] = max(total - sum(parts.values()), 0.0)
    return {"total": round(total, 3), **{name: round(value, 3) for name, value in parts.items()}}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
