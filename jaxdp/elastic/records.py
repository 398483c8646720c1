"""The records of an elastic job, whose rank 0 may be lost before it has written the newest ones."""

import json
import math
import pathlib

from jaxdp.metrics import safe_print
from jaxdp.metrics.jsonl import read
from jaxdp.metrics.writer import KEPT, Record, Writer
from jaxdp.process.context import Context


class Newest(Writer):
    """Keeps the newest records of a rank that writes none."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records = [*self.records[1 - KEPT :], record]

    def rewind(self, step: int, evaluated: bool = True) -> None:
        """Discard the records after update `step`; its evaluation too if it is made again: not
        `evaluated`.
        """
        last = {"train": step, "eval": step if evaluated else step - 1}
        self.records = [x for x in self.records if x["step"] <= last.get(x["split"], 0)]


def missing_records(newest: Newest, context: Context, file: pathlib.Path) -> list[Record]:
    """Return the newest records of the process that has most of those that are not in root's file.

    An update that a lost process has interrupted may have succeeded in some processes, and failed
    on root."""

    def key(record):
        return [record.get("step"), record.get("split")]

    written = context.of_root("written records", lambda: [*map(key, read(file, math.inf))])
    missing = [record for record in newest.records if key(record) not in written]
    texts = context.exchange("missing records", json.dumps(missing))
    return json.loads(max(texts, key=len))


def report_lost_updates(directory: pathlib.Path, start: int) -> None:
    """Print that updates are made again, from a checkpoint or from the first one, if no process has
    their state.
    """
    reached = max(
        (record.get("step", 0) for record in read(directory / "metrics.jsonl", math.inf)), default=0
    )
    if reached > start:
        origin = "the first update: it has no checkpoint"
        if start:
            origin = f"its checkpoint of update {start}"
        text = (
            f"jaxdp: elastic: no process has the state after update {reached} any more: the job "
            f"continues from {origin}"
        )
        safe_print.say(text, error=True)
