"""The writer interface: receives records (dicts of numbers) and lines of text."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]
# The names of built-in entries: a loss may not use them for its metrics.
RESERVED = frozenset(
    (
        "step", "split", "time", "loss", "loss_of", "weight", "lr", "grad_norm", "nonfinite_grads", "skipped",
        "skipped_updates", "recomputed", "halted", "disagreeing_state", "loss_scale", "step_time_ms", "examples_per_s",
        "tokens_per_s", "model_flops_per_s", "mfu", "input_wait", "straggler", "straggler_ms", "goodput",
        "params_sha256",
    )
)  # fmt: skip

KEPT = 64  # records that rank 0 may be late with


class Writer:
    """A destination of a run's records; only rank 0 writes any. This base class writes nothing."""

    def write(self, record: Record) -> None:
        """Write a record with `step`, `split` ('train', 'eval', 'final') and numbers by name."""

    def say(self, text: str) -> None:
        """Write a line of text for people."""

    def rewind(self, step: int) -> None:
        """Discard the records of updates after `step`: the run repeats these updates."""

    def close(self) -> None:
        """Close the writer; no call follows."""


class Newest(Writer):
    """Keeps the newest records of a rank of an elastic job: rank 0 may be lost before it has
    written them.
    """

    def __init__(self) -> None:
        self.records: collections.deque[Record] = collections.deque(maxlen=KEPT)

    def write(self, record: Record) -> None:
        self.records.append(record)

    def rewind(self, step: int, evaluated: bool = True) -> None:
        """Discard the records after update `step`; its evaluation too if it is made again: not
        `evaluated`.
        """
        last = {"train": step, "eval": step if evaluated else step - 1}
        kept = [record for record in self.records if record["step"] <= last.get(record["split"], 0)]
        self.records = collections.deque(kept, KEPT)


@dataclasses.dataclass
class Many(Writer):
    """A writer that forwards to several writers."""

    writers: Sequence[Writer]

    def write(self, record: Record) -> None:
        for writer in self.writers:
            writer.write(record)

    def say(self, text: str) -> None:
        for writer in self.writers:
            writer.say(text)

    def rewind(self, step: int) -> None:
        for writer in self.writers:
            writer.rewind(step)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()
