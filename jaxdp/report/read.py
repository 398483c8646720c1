"""Read a run directory as plain data for the report; the page only draws it."""

import fcntl
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

from jaxdp.config.validation import flatten
from jaxdp.config.values import load
from jaxdp.errors import UsageError, one_line
from jaxdp.metrics.jsonl import BEGINS, ENDS, EVENTS, read, sample
from jaxdp.report import media

Json = dict[str, Any]
DIGITS = 6  # significant digits of a number in the page
RATES = ("examples_per_s", "tokens_per_s", "mfu", "goodput")
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
    if not directory.is_dir():
        raise UsageError(
            f"report: no run {str(directory)!r}; give a run directory, such as runs/digits"
        )
    if not any((directory / name).is_file() for name in ("metrics.jsonl", "env.json")):
        raise UsageError(
            f"report: {str(directory)!r} is not a run directory: it has neither metrics.jsonl nor env.json; give one "
            "that `jaxdp train` made"
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
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
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
    config, env, layout = (
        mapping(directory / name) for name in ("config.yaml", "env.json", "layout.json")
    )
    environment = flatten(env)
    environment.pop("topology.pids", None)
    alive = is_held(directory) if alive is None else alive
    periods = sessions(records, events)
    unclean = [s for s in (periods[:-1] if alive else periods) if s["how"] is None]
    events += skipped(records) + [{"t": s["end"], "kind": "stopped"} for s in unclean]
    charts = [e for e in events if e["kind"] == media.KIND]
    events = [e for e in events if e["kind"] != media.KIND]
    # skipped updates may have no time
    events.sort(key=lambda e: math.inf if e["t"] is None else e["t"])
    # The last evaluation, or the last update's record, and the last throughput.
    last = {r["split"]: r for r in records}
    final = last.get("final") or last.get("eval") or last.get("train", {})
    rates = {name: value for name, value in last.get("train", {}).items() if name in RATES}
    return {
        "name": directory.resolve().name,
        "path": str(directory),
        "state": state(records, events, alive),
        "steps": next((e["steps"] for e in reversed(events) if "steps" in e), config.get("steps")),
        "numbers": {**rates, **final},
        "series": {split: columns([r for r in records if r["split"] == split]) for split in SPLITS},
        "events": events,
        "spent": seconds(records, events),
        "sessions": periods,
        "layout": layout,
        "config": flatten(config),
        "environment": environment,
        "diff": text(directory / "git.diff") if runs == 1 else "",
        "histograms": media.histograms(charts) if charts and runs == 1 else {},
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
    known = [e for e in events if e["kind"] in BEGINS + ENDS]
    if not known:
        done = records and records[-1]["split"] == "final"
        return {"word": "finished" if done else "stopped", "reason": ""}
    last = known[-1]
    if last["kind"] in ENDS and last["kind"] != "regroup":  # after one, another session begins
        return {"word": last["kind"], "reason": last.get("reason", "")}
    return {"word": "stopped", "reason": "it logged no final event: killed, or its host went down"}


def skipped(records: Iterable[Json]) -> list[Json]:
    """Return an event for each record with more skipped updates than the record before."""
    before, events = 0.0, []
    for record in records:
        count = record.get("skipped_updates")
        if record["split"] != "train" or count is None:
            continue
        if count > before:
            event = {"t": record.get("time"), "kind": "skipped", "step": record["step"]}
            events.append(event | {"updates": int(count - before)})
        before = count
    return events


def columns(records: list[Json]) -> Json:
    """Return {name: one value per record, or a single value if all are equal}, with six significant
    digits.

    `step` always has one value per record. null: the record lacks it; "nan" and "inf" stay strings;
    non-numbers are dropped. `time` is the milliseconds since the previous record, for the first
    record since the epoch."""
    names = dict.fromkeys(k for record in records for k, x in record.items() if _is_number(x))
    table: Json = {}
    for name in names:
        values = [r.get(name) for r in records]
        if name == "time":
            table[name] = differences(values)
            continue
        table[name] = [rounded(v) for v in values]
        if name != "step" and len(records) > 1 and len({*table[name]}) == 1:
            table[name] = table[name][0]
    return table


def differences(times: list[float | None]) -> list[int]:
    """Convert times in seconds to integer milliseconds since the previous; a missing time counts as
    the previous.
    """
    before, gaps = 0, []
    for t in times:
        now = before if t is None else round(1000 * float(t))
        gaps.append(now - before)
        before = now
    return gaps


def rounded(value: Any) -> Any:
    """Round a number to six significant digits, in as few characters as possible in JSON; None if
    it is no number.
    """
    if type(value) is not float:
        return value if _is_number(value) else None
    if not math.isfinite(value):
        return str(value)
    short = float(f"{value:.{DIGITS}g}") if abs(value) < 10**DIGITS else round(value)
    return int(short) if short == int(short) else short


def _is_number(value: Any) -> bool:
    # `jsonl.dump` writes those as strings.
    return type(value) in (int, float) or value in ("nan", "inf", "-inf")


def text(file: pathlib.Path, most: int = 250_000) -> str:
    """Return the start of a file as text; "" if it is missing or cannot be read."""
    try:
        with file.open("rb") as stream:
            return stream.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


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
    by it; again: updates that were lost and made again; down: no process trained;
    other: the rest. The later of two records sets the time of all updates between them. Empty
    without events, or if the clock was set back."""
    spans = sessions(records, events)
    if not spans:
        return {}
    total = spans[-1]["end"] - spans[0]["start"]
    if total <= 0:  # the clock was set
        return {}
    trained = [r for r in records if r["split"] == "train"]

    def is_within(session, t):
        return t is not None and session["start"] <= t <= session["end"]

    starting = updates = waiting = 0.0
    for span in spans:
        first = next(
            (e for e in events if e["kind"] == "first_update" and is_within(span, e["t"])),
            {"t": span["end"], "step": span["first"]},
        )
        starting += first["t"] - span["start"]
        before = first.get("step", 0)
        for r in trained:
            if is_within(span, r.get("time")):
                work = 1e-3 * _number(r.get("step_time_ms")) * max(r["step"] - before, 0)
                waited = min(max(_number(r.get("input_wait")), 0.0), 1.0)
                waiting += work * waited
                updates += work * (1 - waited)
                before = r["step"]
    times = [t for r in trained if (t := _number(r.get("step_time_ms")))]
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
    return {name: round(value, 3) for name, value in {"total": total, **parts}.items()}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
