"""The records of an elastic job, whose rank 0 may be lost before it has written the newest ones."""

import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxdp.metrics import safe_print
from jaxdp.metrics.jsonl import read
from jaxdp.metrics.writer import KEPT, Record, Writer


class Newest(Writer):
    """Keeps the newest records of a rank that writes none."""

    records: Sequence[Record] = ()

    def write(self, record: Record) -> None:
        self.records = *self.records[1 - KEPT :], record

    def rewind(self, step: int, evaluated: bool = True) -> None:
        """Discard the records after update `step`; its evaluation too if it is made again: not
        `evaluated`.
        """
        last = {"train": step, "eval": step if evaluated else step - 1}
        self.records = [x for x in self.records if x["step"] <= last.get(x["split"], 0)]


def missing_records(texts: Sequence[str], file: pathlib.Path) -> list[Record]:
    """Return the records that are not in root's file, of the process that has most.

    An update that a lost process has interrupted may have succeeded in some processes, and failed
    on root. texts: the records of each process, as JSON."""

    def key(record: Record) -> tuple[Any, Any]:
        return record.get("step"), record.get("split")

    written = set(map(key, read(file, math.inf)))
    missing = [[x for x in json.loads(text) if key(x) not in written] for text in texts]
    return max(missing, key=len)


def report_lost_updates(directory: pathlib.Path, start: int) -> None:
    """Print that updates are made again, from a checkpoint or from the first one, if no process has
    their state.
    """
    reached = max(
        (record.get("step", 0) for record in read(directory / "metrics.jsonl", math.inf)), default=0
    )
    if reached > start:
        checkpoint = f"its checkpoint of update {start}"
        origin = checkpoint if start else "the first update: it has no checkpoint"
        text = (
            f"jaxdp: elastic: no process has the state after update {reached} any more: the job "
            f"continues from {origin}"
        )
        safe_print.say(text, error=True)
