"""What a person sees: a progress bar on a terminal, one aligned line per interval anywhere else."""

import sys
import time

from jaxdp.metrics.writer import Record

SHOWN = ("loss", "accuracy", "perplexity", "lr", "grad_norm", "step_time_ms", "examples_per_s")
NAMES = {"step_time_ms": "ms/step", "examples_per_s": "examples/s", "grad_norm": "|grad|"}


class Console:
    """Lines to standard output, with time left; on a terminal a bar below them.

    steps: the last update of the run; start: the one it begins after; alone: there are no other processes (some
    launchers give each of theirs a terminal of its own, which the person does not see as one).
    """

    def __init__(self, steps: int, start: int = 0, alone: bool = True):
        self.steps = steps
        self.began = time.monotonic()
        self.start = start
        self.bar = _bar(steps, start) if alone and sys.stdout.isatty() else None

    def write(self, record: Record) -> None:
        step, split = record["step"], record["split"]
        parts = [f"{NAMES.get(k, k)} {_number(k, record[k])}" for k in SHOWN if k in record]
        if record.get("nonfinite_grads"):
            parts.append(f"non-finite gradients {record['nonfinite_grads']:.0f}")
        if record.get("skipped_updates"):
            parts.append(f"skipped {record['skipped_updates']:.0f}")
        if split == "train" and step < self.steps:
            parts.append(f"left {self._left(step)}")
        self.say(f"{split:5} {step:>{len(str(self.steps))}}/{self.steps}  " + "  ".join(parts))
        if self.bar and split == "train":
            self.bar.update(self.bar.task_ids[0], completed=step)

    def say(self, text: str) -> None:
        if self.bar:
            self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def rewind(self, step: int) -> None: ...

    def close(self) -> None:
        if self.bar:
            self.bar.stop()

    def _left(self, step: int) -> str:
        seconds = (time.monotonic() - self.began) * (self.steps - step) / max(step - self.start, 1)
        minutes, seconds = divmod(int(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}"


def _number(name: str, value: float) -> str:
    if name in ("examples_per_s",):
        return f"{value:,.0f}"
    return f"{value:.2e}" if name == "lr" else f"{value:.2f}" if name == "step_time_ms" else f"{value:.4f}"


def _bar(steps: int, start: int):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar.add_task("training", total=steps, completed=start)
    bar.start()
    return bar
