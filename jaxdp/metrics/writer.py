"""A writer takes records, one dict of numbers each, and says; where it goes is its own affair."""

from collections.abc import Sequence
from typing import Any, Protocol

Record = dict[str, Any]
# What a record says by itself: a loss may give none of its metrics such a name.
RESERVED = frozenset(
    (
        "step", "split", "time", "loss", "weight", "lr", "grad_norm", "nonfinite_grads", "skipped", "skipped_updates",
        "halted", "disagreeing_state", "loss_scale", "step_time_ms", "examples_per_s", "tokens_per_s",
        "model_flops_per_s", "mfu", "input_wait", "straggler", "straggler_ms", "goodput", "params_sha256",
    )
)  # fmt: skip


class Writer(Protocol):
    """Where the records of a run go; rank 0 alone has any."""

    def write(self, record: Record) -> None:
        """A record with `step`, `split` ('train', 'eval', 'final') and numbers by name."""

    def say(self, text: str) -> None:
        """A line for people."""

    def rewind(self, step: int) -> None:
        """What was written of updates after `step` does not hold: they are made anew."""

    def close(self) -> None:
        """Nothing follows."""


class Nothing:
    """What the ranks other than root write."""

    def write(self, record: Record) -> None: ...

    def say(self, text: str) -> None: ...

    def rewind(self, step: int) -> None: ...

    def close(self) -> None: ...


class Many:
    """All of several writers."""

    def __init__(self, writers: Sequence[Writer]):
        self.writers = writers

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
