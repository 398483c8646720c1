"""metrics.jsonl and events.jsonl: one JSON object per line, flushed as written.

Metrics of a resumed run continue after its checkpoint's step; events, with their times, are
appended across all restarts."""

import collections
import contextlib
import json
import math
import pathlib
import re
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from jaxdp.metrics.writer import KEPT, Record, Writer
from jaxdp.run import rundir

SPLIT = re.compile(rb'"split": *"(\w*)"')
ENOUGH = 2 * KEPT  # records of earlier updates, before which there is none of a later one


class JsonLines(Writer):
    """A writer that appends to `path`, after dropping a torn last line and all lines of steps after
    `keep_until`.

    evaluated: True if the evaluation after update `keep_until` already ran; its line is kept. due:
    it was due, so it gets a line if only a final record has it. Each record gets its `time` in
    seconds since the epoch. If the disk is full, records are written later. `write` raises
    RunFailed if the file is no longer at `path`."""

    def __init__(
        self, path: pathlib.Path, keep_until: int = 0, evaluated: bool = True, due: bool = False
    ):
        self.path = path
        self.pending = b""
        self.file: IO[bytes] | None = None
        self.rewind(keep_until, evaluated, due)

    def rewind(self, step: int, evaluated: bool = True, due: bool = False) -> None:
        self.close()
        self.pending = b""
        last = {"final": 0, "eval": step if evaluated else step - 1}
        lines, records = divide(self.path, step)
        for record in records:
            if evaluated and due and is_evaluation(record, records):
                record = {**record, "split": "eval"}
                record.pop("params_sha256", None)
                record.pop("goodput", None)
            number = record.get("step")
            if isinstance(number, int) and 0 < number <= last.get(str(record.get("split")), step):
                lines.append(dump(record))
        rundir.write(self.path, "".join(lines))  # if the disk is full, the outdated lines stay
        self.file = open(self.path, "ab", buffering=0, opener=rundir.no_link)  # noqa: SIM115

    def write(self, record: Record) -> None:
        self.pending += dump({**record, "time": round(time.time(), 3)}).encode()
        if self.file is not None:
            rundir.require(self.path, self.file)
        with contextlib.suppress(OSError):
            while self.pending and self.file is not None:
                self.pending = self.pending[self.file.write(self.pending) :]

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def is_evaluation(record: Record, records: list[Record]) -> bool:
    """Return whether a final record is the only one of its evaluation, as at the end of a run."""
    if record.get("split") != "final" or {"stopped", "loss_of"} & record.keys():
        return False
    return not any(
        x.get("split") == "eval" and x.get("step") == record.get("step") for x in records
    )


def read(path: pathlib.Path, since: float = 0) -> list[dict[str, Any]]:
    """Return the records of a metrics file since an update, and ENOUGH before it; no torn lines; []
    without a file.
    """
    return divide(path, since)[1]


def divide(path: pathlib.Path, since: float) -> tuple[list[str], list[dict[str, Any]]]:
    """Return (lines, records) of a metrics file: the earlier lines, and the records of `read`.

    Only the lines of these records are parsed: a long run must not wait for those of its beginning.
    """
    lines = (
        path.read_text(encoding="utf-8", errors="replace").splitlines(True)
        if path.is_file()
        else []
    )
    records = collections.deque[dict[str, Any]]()
    earlier = 0
    while lines and earlier < ENOUGH:
        if (record := parse(lines.pop())) is not None:
            records.appendleft(record)
            step = record.get("step")
            earlier = earlier + 1 if isinstance(step, int) and step < since else 0
    return lines, list(records)


def sample(path: pathlib.Path, most: int) -> tuple[list[dict[str, Any]], int]:
    """Return (records of a metrics file, the number of its lines): all, or evenly spaced ones of
    each split.

    most: up to twice as many lines of a split are returned, and the last one. The file is read
    twice: only these lines are in memory, and only they are parsed.
    """
    if not path.is_file():
        return [], 0
    with path.open("rb") as file:
        counts = collections.Counter(map(split_of, file))
    chosen, seen = list[bytes](), collections.Counter[bytes]()
    with path.open("rb") as file:
        for line in file:
            split = split_of(line)
            every = 1 << ((counts[split] - 1) // max(1, 2 * most)).bit_length()
            if seen[split] % every == 0 or seen[split] == counts[split] - 1:
                chosen.append(line)
            seen[split] += 1
    records = [parse(line.decode("utf-8", "replace")) for line in chosen]
    return [record for record in records if record is not None], counts.total()


def split_of(line: bytes) -> bytes:
    """Return the split of a line of a metrics file, unparsed."""
    return match[1] if (match := SPLIT.search(line)) else b""


def parse(line: str) -> dict[str, Any] | None:
    """Return the record in a line; None for a torn one."""
    try:
        record = json.loads(line, parse_constant=str, parse_float=finite)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def finite(text: str) -> float | str:
    """Return a number of a file; "inf" or "-inf" if it overflows, as `dump` writes it."""
    return number if math.isfinite(number := float(text)) else str(number)


def dump(record: Record) -> str:
    """Return a record as a line of JSON."""
    # JSON has no NaN or infinity: write them as strings, which float() reads back.
    clean = {
        k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
    }
    return json.dumps(clean) + "\n"


EVENTS = "events.jsonl"
BEGINS = ("start", "resume")
ENDS = ("finished", "preempted", "failed", "regroup")


class NoEvents:
    """An event log that writes nothing: for ranks other than root, and for a loop without a run
    directory.

    tell: a callback that gets the kind and the step of each event. ended: the newest one of ENDS,
    or ""."""

    ended = ""
    tell: Callable[[str, int | None], None] = staticmethod(lambda kind, step: None)

    def note(self, kind: str, step: int | None = None, **more: Any) -> None:
        """Log `start`, `resume`, `first_update`, `evaluation`, `saved`, `save_failed`,
        `rolled_back`, `stopped_early`, or one of ENDS.

        step: the number of completed updates. more: JSON, such as `seconds`, the duration, and
        `blocked`, the seconds of it that blocked the training loop, and `again`, the updates that a
        resume makes again."""


class Events(NoEvents):
    """Append events to `directory`/events.jsonl, from any thread; after a full disk, retry with the
    next event.
    """

    def __init__(self, directory: pathlib.Path):
        self.path = directory / EVENTS
        self.lock = threading.Lock()
        torn = self.path.is_file() and self.path.read_bytes()[-1:] not in (b"\n", b"")
        self.pending = b"\n" if torn else b""

    def note(self, kind: str, step: int | None = None, **more: Any) -> None:
        at = {} if step is None else {"step": step}
        self.tell(kind, step)
        self.ended = kind if kind in ENDS else self.ended
        event = {"t": round(time.time(), 3), "kind": kind, **at, **more}
        with self.lock, contextlib.suppress(OSError):
            self.pending += dump(event).encode()
            with open(self.path, "ab", buffering=0, opener=rundir.no_link) as file:
                while self.pending:
                    self.pending = self.pending[file.write(self.pending) :]
