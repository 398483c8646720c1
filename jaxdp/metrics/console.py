"""What a person sees: a live panel on a terminal, one aligned line per interval anywhere else."""

import contextlib
import time
from collections.abc import Mapping

from jaxdp.metrics import aloud
from jaxdp.metrics.numbers import duration, number
from jaxdp.metrics.panel import Panel
from jaxdp.metrics.writer import Record

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
TOO_LONG = 0.3  # a still larger one is worth a warning, once
WAITS = 0.05  # a larger share of the time in waiting for data is shown
WIDTHS = {"lr": 8, "mfu": 6, "goodput": 6}  # of a number, so that what follows stays in its column; others:
WIDTH = 9


class Console:
    """Lines to standard output, with time left; on a terminal they scroll above a panel.

    steps: the last update of the run; start: the one it begins after. panel: show it if standard output is a terminal;
    not for an evaluation alone, nor under a launcher (Open MPI 5 gives each process a pseudo-terminal). facts: what the
    panel says of the run, by name.
    """

    def __init__(self, steps: int, start: int = 0, panel: bool = True, facts: Mapping[str, str] | None = None):
        self.steps = steps
        self.clock = Clock(steps, start)
        self.advised = False
        self.panel = Panel(self.clock, facts or {}) if panel and aloud.draws() else None

    def write(self, record: Record) -> None:
        step, split = record["step"], record["split"]
        if split == "train":
            self.clock.at(step, record.get("step_time_ms"))
        if self.panel:
            self.panel.write(record)
            if split == "train":
                return
        parts = [f"{NAMES.get(k, k)} {number(k, record[k]):>{WIDTHS.get(k, WIDTH)}}" for k in SHOWN if k in record]
        if record.get("input_wait", 0.0) > TOO_LONG and not self.advised:
            self.advised = True
            self.say(
                f"warning: the devices wait {record['input_wait']:.0%} of the time for data; data.workers reads it in "
                "processes, data.on_device: true keeps a small set on the devices"
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
            aloud.say(text)

    def happened(self, kind: str, step: int | None) -> None:
        """An event of the run, such as `saved`."""
        if self.panel and kind == "saved" and step is not None:
            self.panel.saved(step)

    def rewind(self, step: int) -> None:
        self.clock.rewind(step)

    def close(self) -> None:
        if self.panel:
            with contextlib.suppress(OSError, ValueError):
                self.panel.close()


class Clock:
    """How far a run is, and how long the rest takes at the pace since it began (or went back)."""

    def __init__(self, steps: int, start: int = 0):
        self.steps, self.start, self.step = steps, start, start
        self.began = self.paced = time.monotonic()
        self.seen, self.first = self.began, True
        self.pace: float | None = None

    def at(self, step: int, ms: float | None = None) -> None:
        """An update was made; ms: what one took of late, by which `left` goes until there are two records."""
        self.pace = ms
        if self.first and self.step > self.start:  # up to the first record it was compilation too
            self.start, self.paced, self.first = self.step, self.seen, False
        self.step, self.seen = step, time.monotonic()

    def rewind(self, step: int) -> None:
        self.start = self.step = step
        self.paced = self.seen = time.monotonic()

    def left(self) -> float | None:
        """Seconds; None where there is no pace yet."""
        made = self.step - self.start
        if self.first and made > 0 and self.pace is not None:
            return self.pace / 1000 * (self.steps - self.step)
        return (self.seen - self.paced) * (self.steps - self.step) / made if made > 0 else None

    def elapsed(self) -> float:
        return time.monotonic() - self.began
