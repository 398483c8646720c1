"""What a run directory says of its run, as plain data: the page draws it, and computes nothing that is not there."""

import fcntl
import json
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from jaxdp import bounded_yaml
from jaxdp.errors import UsageError
from jaxdp.metrics import events as kinds
from jaxdp.metrics.jsonl import read
from jaxdp.report import spent

Json = dict[str, Any]
DIGITS = 6  # significant ones of a number in the page
RATES = ("examples_per_s", "tokens_per_s", "mfu", "goodput")
SPLITS = ("train", "eval", "final")
COUNTS = ("step", "steps", "to", "updates", "devices", "processes", "seconds", "blocked")  # numbers of an event
MOST = 1e300


def read_run(directory: pathlib.Path, alive: bool | None = None) -> Json:
    """All that the page shows of one run.

    alive: whether a process trains there; None: ask its lock, which this process must then not hold, since closing a
    file gives up all locks that a process has on it.
    Raises UsageError where this is no run directory, or nothing has been measured yet.
    """
    check(directory)
    records = [sound for r in read(directory / "metrics.jsonl") if (sound := sound_record(r))]
    events = [sound for e in read(directory / kinds.NAME) if (sound := sound_event(e))]
    if not records and not events:
        raise UsageError(f"report: {str(directory)!r} has no metrics yet; wait for the first line of metrics.jsonl")
    config, env, layout = (_mapping(directory / name) for name in ("config.yaml", "env.json", "layout.json"))
    alive = is_held(directory) if alive is None else alive
    sessions = spent.sessions(records, events)
    silent = [s for s in (sessions[:-1] if alive else sessions) if s["how"] is None]
    events += skipped(records) + [{"t": s["end"], "kind": "stopped"} for s in silent]
    events.sort(key=lambda e: e["t"] if e["t"] is not None else math.inf)  # of what is skipped it may not be known
    return {
        "name": directory.resolve().name,
        "path": str(directory),
        "state": state(records, events, alive),
        "steps": next((e["steps"] for e in reversed(events) if "steps" in e), config.get("steps")),
        "numbers": final_numbers(records),
        "series": {split: columns([r for r in records if r["split"] == split]) for split in SPLITS},
        "events": events,
        "spent": spent.seconds(records, events),
        "sessions": sessions,
        "layout": layout,
        "config": flat(config),
        "environment": {name: value for name, value in flat(env).items() if name != "topology.pids"},
    }


def check(directory: pathlib.Path) -> None:
    """UsageError where this is no directory of a run."""
    if not directory.is_dir():
        raise UsageError(f"report: no run {str(directory)!r}; give the directory of a run, such as runs/digits")
    if not any((directory / name).is_file() for name in ("metrics.jsonl", "env.json")):
        raise UsageError(
            f"report: {str(directory)!r} is no run directory: neither metrics.jsonl nor env.json is in it; give one "
            "that `jaxdp train` made"
        )


def is_held(directory: pathlib.Path) -> bool:
    """Whether a process holds the lock of the run directory; see `jaxdp.rundir.lock`."""
    try:
        with (directory / ".lock").open("r") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        pass
    return False


def sound_record(found: Json) -> Json | None:
    """A record with numbers as JSON has them, what is not finite as text; None for what is no record.

    A crash leaves anything in a file, and other programs write there too.
    """
    step, split = found.get("step"), found.get("split")
    if not isinstance(split, str) or split not in SPLITS or isinstance(step, bool) or not isinstance(step, int):
        return None
    if abs(step) > MOST:
        return None
    record = {k: _sound(v) for k, v in found.items()}
    if not _is_finite(record.get("time", 0.0)):
        del record["time"]
    return record


def sound_event(found: Json) -> Json | None:
    """An event, without those of its numbers that are none; None for what is no event."""
    event = {k: _sound(v) for k, v in found.items()}
    if not isinstance(event.get("kind"), str) or not _is_finite(event.get("t")):
        return None
    event = {k: v for k, v in event.items() if k not in COUNTS or _is_finite(v)}
    return {**event, "reason": str(event["reason"])} if "reason" in event else event


def _sound(value: Any) -> Any:
    kind = type(value)
    if kind is float:
        return value if -math.inf < value < math.inf else str(value)
    if kind is int and not -MOST < value < MOST:
        return "inf" if value > 0 else "-inf"
    return value


def _is_finite(value: Any) -> bool:
    """Whether it is a number that a float has room for."""
    kind = type(value)
    return (kind is float or kind is int) and -MOST < value < MOST


def state(records: list[Json], events: list[Json], alive: bool) -> Json:
    """word: running, finished, preempted, failed, or stopped (it ended without a word: killed, or its host went down).

    reason: what was said of it.
    """
    if alive:
        return {"word": "running", "reason": ""}
    known = [e for e in events if e["kind"] in kinds.BEGINS + kinds.ENDS]
    if not known:
        done = bool(records) and records[-1]["split"] == "final"
        return {"word": "finished" if done else "stopped", "reason": ""}
    last = known[-1]
    if last["kind"] in kinds.ENDS:
        return {"word": last["kind"], "reason": last.get("reason", "")}
    return {"word": "stopped", "reason": "it ended without a word: killed, or its host went down"}


def final_numbers(records: list[Json]) -> Json:
    """Of the last evaluation, else of the last update, with `split` and `step`; and the throughput of the last."""
    last = {r["split"]: r for r in records}
    found = last.get("final") or last.get("eval") or last.get("train", {})
    rates = {name: value for name, value in last.get("train", {}).items() if name in RATES}
    return {**rates, **found}


def skipped(records: Iterable[Json]) -> list[Json]:
    """An event for each record that tells of more updates left out than the one before."""
    before, found = 0.0, []
    for record in records:
        count = record.get("skipped_updates")
        if record["split"] == "train" and count is not None and _is_finite(count):
            if count > before:
                found.append(
                    {"t": record.get("time"), "kind": "skipped", "step": record["step"], "updates": int(count - before)}
                )
            before = count
    return found


def columns(records: list[Json]) -> Json:
    """{name: values by record, or one where all are equal}, with six significant digits; `step` has one for each.

    null: a record without it; "nan", "inf": as they are. What is no number is left out. `time` is milliseconds, each
    since the one before, the first since the epoch.
    """
    names: dict[str, None] = {}
    for record in records:
        for name, value in record.items():
            if name not in names and _is_number(value):
                names[name] = None
    table: Json = {}
    for name in names:
        values = [r.get(name) for r in records]
        table[name] = differences(values) if name == "time" else [rounded(v) for v in values]
        if len(records) > 1 and name not in ("step", "time") and table[name].count(table[name][0]) == len(records):
            table[name] = table[name][0]
    return table


def differences(times: list[float | None]) -> list[int]:
    """Seconds -> whole milliseconds since the one before; one that is missing is that before it."""
    found, before = [], 0
    for time in times:
        now = before if time is None else round(1000 * float(time))
        found.append(now - before)
        before = now
    return found


def rounded(value: Any) -> Any:
    """A number with six significant digits, in as few characters as JSON takes; None for what is none."""
    if type(value) is not float:
        return value if type(value) is int or _is_number(value) else None
    if not math.isfinite(value):
        return str(value)
    short = float(f"{value:.{DIGITS}g}") if abs(value) < 10**DIGITS else round(value)
    return int(short) if short == int(short) else short


def _is_number(value: Any) -> bool:
    if isinstance(value, str):  # as `jsonl` writes what JSON has not
        return value in ("nan", "inf", "-inf")
    return _is_finite(value)


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """{dotted key: value}; lists stay as they are, and so do mappings without keys."""
    if not isinstance(tree, Mapping) or not tree:
        return {path: tree} if path else {}
    return {k: v for name, value in tree.items() for k, v in flat(value, f"{path}.{name}" if path else name).items()}


def _mapping(file: pathlib.Path) -> Json:
    """A YAML or JSON file; empty where it is missing or cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text) if file.suffix == ".json" else bounded_yaml.load(text, str(file))
        return _plain(found) if isinstance(found, dict) else {}
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError):
        return {}


def _plain(found: Any) -> Any:
    """As JSON has it: dates, and numbers that are not finite, as text."""
    return json.loads(json.dumps(found, default=str), parse_constant=str)
