"""Where a run's time went, as far as its records and events tell."""

from typing import Any

from jaxdp.metrics.events import BEGINS, ENDS

Json = dict[str, Any]


def sessions(records: list[Json], events: list[Json]) -> list[Json]:
    """The times that a process trained: start, end (seconds since the epoch), first (step), how it ended, or None.

    A session that ended without a word ends with the last sign of life before the next. Empty without events.
    """
    starts = [e for e in events if e["kind"] in BEGINS]
    signs = [x["t"] for x in events if x.get("t")] + [r["time"] for r in records if "time" in r]
    found = []
    for begin, after in zip(starts, [*starts[1:], None]):
        inside = [t for t in signs if t >= begin["t"] and (after is None or t < after["t"])]
        inside = inside or [begin["t"]]  # the clock was set back before the next, or another host's is behind
        ends = [e for e in events if e["kind"] in ENDS and begin["t"] <= e["t"] <= max(inside)]
        if after is not None:
            ends = [e for e in ends if e["t"] < after["t"]]
        session = {"start": begin["t"], "end": max(inside), "first": begin.get("step") or 0}
        session |= {"how": ends[-1]["kind"] if ends else None, "devices": begin.get("devices")}
        found.append({**session, "processes": begin.get("processes")})
    return found


def seconds(records: list[Json], events: list[Json]) -> Json:
    """total: from the first start to the last sign of life; and of it:

    starting: from a start to the end of its first update; updates: device's work, and what of it cannot be told apart;
    input: the loop waited for data; evaluation; saving: the loop was held up; down: no process trained; other: the
    rest, such as updates that were lost and made again. Between two records, all updates count as the second says.
    Empty without events, or where the clock was set back.
    """
    spans = sessions(records, events)
    if not spans:
        return {}
    parts = dict.fromkeys(("starting", "updates", "input", "evaluation", "saving", "down"), 0.0)
    for span, after in zip(spans, [*spans[1:], None]):
        inside = lambda t, span=span: t is not None and span["start"] <= t <= span["end"]
        first = [e for e in events if e["kind"] == "first_update" and inside(e["t"])]
        parts["starting"] += (first[0]["t"] if first else span["end"]) - span["start"]
        before = first[0].get("step", 0) if first else span["first"]
        for r in records:
            if r["split"] == "train" and inside(r.get("time")):
                work = 1e-3 * _number(r.get("step_time_ms")) * max(r["step"] - before, 0)
                waited = min(max(_number(r.get("input_wait")), 0.0), 1.0)
                parts["input"] += work * waited
                parts["updates"] += work * (1 - waited)
                before = r["step"]
        parts["down"] += max(after["start"] - span["end"], 0.0) if after else 0.0
    parts["evaluation"] = sum(_number(e.get("seconds")) for e in events if e["kind"] == "evaluation")
    parts["saving"] = sum(_number(e.get("blocked")) for e in events)
    total = spans[-1]["end"] - spans[0]["start"]
    if total <= 0:  # the clock was set
        return {}
    parts["other"] = max(total - sum(parts.values()), 0.0)
    return {"total": round(total, 3), **{name: round(value, 3) for name, value in parts.items()}}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
