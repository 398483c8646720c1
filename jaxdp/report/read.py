"""Read a run directory as plain data for the report; the page only draws it."""

import fcntl
import itertools
import json
import math
import pathlib
import statistics
from typing import Any

from jaxdp.config.validation import flatten
from jaxdp.config.values import load
from jaxdp.errors import UsageError, one_line
from jaxdp.metrics.jsonl import BEGINS, ENDS, EVENTS, read, sample
from jaxdp.report import media
from jaxdp.report.media import Json

DIGITS = 6  # significant digits of a number in the page
RATES = ("examples_per_s", "tokens_per_s", "mfu", "goodput")
DIFF = 250_000  # bytes of git.diff, at most
LINES = 2000  # of metrics.jsonl that are read, up to twice as many of each split
SPLITS = ("train", "eval", "final")


def read_run(directory: pathlib.Path, alive: bool | None = None, runs: int = 1) -> Json:
    """Return all data that the page shows of one run.

    alive: whether a process trains in the directory; None: test its lock. Do not use None in the
    process that has the lock: closing a file releases all locks of the process on it.
    runs: the number of runs of the page; of several, the diff and histograms are left out, and each
    has its share of the media.
    Raises UsageError if this is not a run directory, if it has no metrics yet, or if another
    version or program wrote lines in it that cannot be read.
    """
    if not any((directory / name).is_file() for name in ("metrics.jsonl", "env.json")):
        raise UsageError(
            f"report: {str(directory)!r} is no run: it has neither metrics.jsonl nor env.json; give a run directory "
            "that `jaxdp train` made, such as runs/digits"
        )
    records, lines = sample(directory / "metrics.jsonl", LINES // runs)
    events = read(directory / EVENTS)
    if not records and not events:
        raise UsageError(
            f"report: {str(directory)!r} has no metrics yet; wait for the first line of metrics.jsonl"
        )
    try:
        page = tables(directory, records, events, alive, runs)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"report: {str(directory)!r} has lines that this version of jaxdp cannot read "
            f"({type(error).__name__}: {one_line(error)}); use the version that its env.json names"
        ) from None
    if len(records) < lines:
        page["environment"]["records"] = (
            f"{len(records):,} of {lines:,} lines of metrics.jsonl, evenly spaced"
        )
    return page


def tables(
    directory: pathlib.Path, records: list[Json], events: list[Json], alive: bool | None, runs: int
) -> Json:
    """Return the data of `read_run`."""
    records = [r for r in records if r.get("split") in SPLITS]  # a callback may write others
    if not all(type(r.get("step")) is int for r in records):
        raise ValueError("metrics.jsonl: a line needs a step")
    if not all(type(e.get("t")) in (int, float) and type(e.get("kind")) is str for e in events):
        raise ValueError("events.jsonl: a line needs t (seconds) and kind")
    config, env, layout, confusion = (
        mapping(directory / name)
        for name in ("config.yaml", "env.json", "layout.json", "confusion.json")
    )
    environment = flatten(env)
    environment.pop("topology.pids", None)
    alive = is_held(directory) if alive is None else alive
    periods = sessions(records, events)
    ended = periods[:-1] if alive else periods
    events += [{"t": s["end"], "kind": "stopped"} for s in ended if s["how"] is None]
    events += skipped(records)
    events.sort(key=when)
    # The last evaluation, or the last update's record, and the last throughput.
    last = {r["split"]: r for r in records}
    train = last.get("train", {})
    rates = {name: value for name, value in train.items() if name in RATES}
    return {
        "name": directory.resolve().name,
        "path": str(directory),
        "state": state(records, events, alive),
        "steps": next((e["steps"] for e in reversed(events) if "steps" in e), config.get("steps")),
        "numbers": rates | (last.get("final") or last.get("eval") or train),
        "series": {split: columns([r for r in records if r["split"] == split]) for split in SPLITS},
        "events": [e for e in events if e["kind"] != media.KIND],
        "spent": seconds(records, events),
        "sessions": periods,
        "layout": layout,
        "confusion": confusion,
        "config": flatten(config),
        "environment": environment,
        "diff": media.start(directory / "git.diff", DIFF).decode("utf-8", "replace")
        if runs == 1
        else "",
        "histograms": media.histograms(events) if runs == 1 else {},
        "media": media.read(directory, media.PAGE // runs),
    }


def is_held(directory: pathlib.Path) -> bool:
    """Return True if a process has the lock of the run directory; see `jaxdp.run.rundir.lock`."""
    try:
        with (directory / ".lock").open("rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        pass
    return False


def state(records: list[Json], events: list[Json], alive: bool) -> Json:
    """Return {"word", "reason"}: running, finished, preempted, failed, or stopped (it logged no
    final event).

    reason: the reason in the final event, if any.
    """
    if alive:
        return {"word": "running", "reason": ""}
    done = records and records[-1]["split"] == "final"
    unlogged = {"kind": "finished" if done else "stopped"}
    last = next((e for e in reversed(events) if e["kind"] in BEGINS + ENDS), unlogged)
    if last["kind"] in (*BEGINS, "regroup"):  # after a `regroup`, another session begins
        reason = "it logged no final event: killed, or its host went down"
        return {"word": "stopped", "reason": reason}
    return {"word": last["kind"], "reason": last.get("reason", "")}


def skipped(records: list[Json]) -> list[Json]:
    """Return an event for each record with more skipped updates than the record before."""
    before, events = 0.0, []
    for record in records:
        if record["split"] == "train" and "skipped_updates" in record:
            count = record["skipped_updates"]
            if count > before:
                events.append(
                    {
                        "t": record.get("time"),
                        "kind": "skipped",
                        "step": record["step"],
                        "updates": int(count - before),
                    }
                )
            before = count
    return events


def columns(records: list[Json]) -> Json:
    """Return {name: one value per record}, with six significant digits, but the full `time`, in
    seconds since the epoch.

    null: the record lacks it; "nan" and "inf" stay strings; names without numbers are dropped."""
    names = dict.fromkeys(name for record in records for name in record)
    table = {
        name: [r.get(name) if name == "time" else rounded(r.get(name)) for r in records]
        for name in names
    }
    return {name: values for name, values in table.items() if {*values} != {None}}


def rounded(value: Any) -> Any:
    """Round a number to six significant digits, and to a whole number if it is large; None if it is
    no number.
    """
    if type(value) is float:
        return float(f"{value:.{DIGITS}g}") if abs(value) < 10**DIGITS else round(value)
    # `jsonl.dump` writes those as strings
    return value if type(value) is int or value in ("nan", "inf", "-inf") else None


def mapping(file: pathlib.Path) -> Json:
    """Return the mapping in a YAML or JSON file, with non-finite numbers as strings; {} if it is
    missing.

    Raises UsageError if the file is damaged.
    """
    if not file.is_file():
        return {}
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text) if file.suffix == ".json" else load(text, file.name)
        if not isinstance(content, dict):
            raise ValueError("not a mapping")
        return json.loads(json.dumps(content, default=str), parse_constant=str)
    except (RecursionError, TypeError, ValueError) as error:
        raise UsageError(
            f"report: {str(file)!r} is damaged ({one_line(error)[:200]}); restore or remove it"
        ) from None


def divided(records: list[Json], events: list[Json]) -> list[list[Json]]:
    """Return the events and records of each session by their times, its start first."""
    starts = [e for e in events if e["kind"] in BEGINS]
    # only the start, if the clock was set back before the next one, or differs between hosts
    return [
        [begin, *(x for x in events + records if begin["t"] <= when(x) < following["t"])]
        for begin, following in itertools.pairwise([*starts, {"t": math.inf}])
    ]


def when(entry: Json) -> float:
    """Return the time of an event or a record, in seconds since the epoch; 0 if it has none."""
    return entry.get("t") or entry.get("time") or 0.0


def sessions(records: list[Json], events: list[Json]) -> list[Json]:
    """Return the periods of training: start, end (seconds since the epoch), first (step), how (it
    ended, or None).

    A session without a final event ends at its last record or event. Empty without events.
    """
    result = []
    for inside in divided(records, events):
        begin = inside[0]
        ends = (x["kind"] for x in reversed(inside) if x.get("kind") in ENDS)
        result.append(
            {
                "start": begin["t"],
                "end": max(map(when, inside)),
                "first": begin.get("step") or 0,
                "how": next(ends, None),
                "processes": begin.get("processes"),
            }
        )
    return result


def seconds(records: list[Json], events: list[Json]) -> Json:
    """Return the total seconds from the first start to the last record or event, and the parts of
    it.

    starting: from a start to the end of its first update; updates: the device's work, and anything
    inseparable from it; input: the loop waited for data; evaluation; saving: the loop was blocked
    by it; again: updates that were lost and made again; down: no process trained;
    other: the rest. The later of two records sets the time of all updates between them. Empty
    without events, or if the clock was set back."""
    spans = sessions(records, events)
    total = spans[-1]["end"] - spans[0]["start"] if spans else 0.0
    if total <= 0:
        return {}
    starting = updates = waiting = 0.0
    for span, inside in zip(spans, divided(records, events)):
        first = next(
            (x for x in inside if x.get("kind") == "first_update"),
            {"t": span["end"], "step": span["first"]},
        )
        starting += first["t"] - span["start"]
        before = first.get("step", 0)
        for r in inside:
            if r.get("split") == "train":
                work = 1e-3 * _number(r.get("step_time_ms")) * max(r["step"] - before, 0)
                waited = work * _number(r.get("input_wait"))  # a fraction
                waiting += waited
                updates += work - waited
                before = r["step"]
    times = [t for r in records if (t := _number(r.get("step_time_ms")))]
    lost = sum(_number(e.get("again")) for e in events)
    parts = {
        "starting": starting,
        "updates": updates,
        "input": waiting,
        "evaluation": sum(_number(e.get("seconds")) for e in events if e["kind"] == "evaluation"),
        "saving": sum(_number(e.get("blocked")) for e in events),
        "again": 1e-3 * lost * statistics.median(times) if times else 0.0,
        "down": sum(max(b["start"] - a["end"], 0.0) for a, b in itertools.pairwise(spans)),
    }
    parts["other"] = max(total - sum(parts.values()), 0.0)
    parts["total"] = total
    return {name: round(value, 3) for name, value in parts.items()}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
