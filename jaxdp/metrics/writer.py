"""The writer interface: receives records (dicts of numbers) and lines of text."""

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
        "params_sha256", "stopped",
    )
)  # fmt: skip
NOT_METRICS = ("step", "split", "time", "goodput", "params_sha256")  # entries of a final record
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
