"""Console output: a live panel on a terminal, one aligned line per log interval elsewhere."""

import contextlib
from collections.abc import Mapping

from jaxdp.metrics import safe_print
from jaxdp.metrics.numbers import duration, number
from jaxdp.metrics.panel import Clock, Panel
from jaxdp.metrics.writer import Record, Writer

SHOWN = (
    "loss", "accuracy", "perplexity", "lr", "grad_norm", "step_time_ms", "examples_per_s", "tokens_per_s", "mfu",
    "goodput",
)  # fmt: skip
NAMES = {
    "step_time_ms": "ms/step",
    "examples_per_s": "examples/s",
    "tokens_per_s": "tokens/s",
    "grad_norm": "|grad|",
    "mfu": "MFU",
}
TOO_LONG = 0.3  # an `input_wait` above this fraction causes one warning
WAITS = 0.05  # an `input_wait` above this fraction is printed
WIDTHS = {"lr": 8, "mfu": 6, "goodput": 6}  # column widths of numbers
WIDTH = 9  # the column width of all other numbers


class Console(Writer):
    """A writer that prints lines with the remaining time; on a terminal they scroll above a live
    panel.

    steps: the last update of the run; start: the update it resumes after. panel: show the panel if
    standard output is a terminal; set it to false for an evaluation only, and under a launcher
    (Open MPI 5 gives each process a pseudo-terminal). facts: lines about the run for the panel, by
    name."""

    def __init__(
        self, steps: int, start: int = 0, panel: bool = True, facts: Mapping[str, str] | None = None
    ):
        self.steps = steps
        self.clock = Clock(steps, start)
        self.advised = False
        self.panel = Panel(self.clock, facts or {}) if panel and safe_print.draws() else None

    def write(self, record: Record) -> None:
        step, split = record["step"], record["split"]
        if split == "train":
            self.clock.at(step, record.get("step_time_ms"))
        if self.panel:
            self.panel.write(record)
            if split == "train":
                return
        parts = [
            f"{NAMES.get(k, k)} {number(k, record[k]):>{WIDTHS.get(k, WIDTH)}}"
            for k in SHOWN
            if k in record
        ]
        parts += [
            f"{k} {number('loss', record[k])}" for k in record if k.endswith("/loss")
        ]  # of named evaluation sets
        if record.get("input_wait", 0.0) > TOO_LONG and not self.advised:
            self.advised = True
            self.say(
                f"warning: the devices wait {record['input_wait']:.0%} of the time for data; data.workers reads it in "
                "processes, data.on_device: true keeps a small data set on the devices"
            )
        if record.get("input_wait", 0.0) > WAITS:
            parts.append(f"waits for data {record['input_wait']:.0%}")
        if record.get("nonfinite_grads"):
            parts.append(f"non-finite gradients {record['nonfinite_grads']:.0f}")
        if record.get("skipped_updates"):
            parts.append(f"skipped {record['skipped_updates']:.0f}")
        if split == "train" and step < self.steps:
            parts.append(f"left {duration(self.clock.left())}")
        self.say(f"{split:5} {step:>{len(str(self.steps))}}/{self.steps}  " + "  ".join(parts))

    def say(self, text: str) -> None:
        if self.panel:
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone
                self.panel.say(text)
        else:
            safe_print.say(text)

    def happened(self, kind: str, step: int | None) -> None:
        """Handle an event of the run, such as `saved`."""
        if self.panel and kind == "saved" and step is not None:
            self.panel.saved(step)

    def rewind(self, step: int) -> None:
        self.clock.rewind(step)

    def close(self) -> None:
        if self.panel:
            with contextlib.suppress(OSError, ValueError):
                self.panel.close()
