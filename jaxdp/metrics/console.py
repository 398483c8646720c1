"""Console output: a live panel on a terminal, one aligned line per log interval elsewhere."""

import collections
import contextlib
import dataclasses
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxdp.metrics import safe_print
from jaxdp.metrics.numbers import duration, number
from jaxdp.metrics.writer import NOT_METRICS, RESERVED, Record, Writer

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType

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
BARS = "▁▂▃▄▅▆▇█"
POINTS = 32  # characters of the sparkline
SPEED = {
    "examples_per_s": "{} examples/s",
    "tokens_per_s": "{} tokens/s",
    "step_time_ms": "{} ms a step",
    "model_flops_per_s": "{}FLOP/s",
    "mfu": "MFU {}",
    "input_wait": "waiting for input {}",
}


@dataclasses.dataclass
class Clock:
    """The progress of a run and its estimated remaining time, from the speed since it started (or
    was rolled back).
    """

    steps: int
    start: int = 0

    def __post_init__(self) -> None:
        self.step = self.start
        self.began = self.paced = self.seen = time.monotonic()
        self.first = True
        self.pace: float | None = None

    def at(self, step: int, ms: float | None = None) -> None:
        """Record that update `step` is done; ms: recent milliseconds per update, for `left` until
        the second record.
        """
        self.pace = ms
        if (
            self.first and self.step > self.start
        ):  # exclude the time before the first record: it includes compilation
            self.start = self.step
            self.paced = self.seen
            self.first = False
        self.step = step
        self.seen = time.monotonic()

    def rewind(self, step: int) -> None:
        self.start = self.step = step
        self.paced = self.seen = time.monotonic()

    def left(self) -> float | None:
        """Return the estimated remaining seconds; None if the speed is not known yet."""
        done = self.step - self.start
        if self.first and done > 0 and self.pace is not None:
            return self.pace / 1000 * (self.steps - self.step)
        return (self.seen - self.paced) * (self.steps - self.step) / done if done > 0 else None

    def elapsed(self) -> float:
        return time.monotonic() - self.began


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
        step = record["step"]
        split = record["split"]
        if split == "train":
            self.clock.at(step, record.get("step_time_ms"))
        if self.panel:
            self.panel.write(record)
            if split == "train":
                return
        # Of an evaluation, all metrics of the loss too, which may be many.
        own = [k for k in record if k not in RESERVED and split != "train"]
        parts = [
            f"{NAMES.get(k, k)} {number(k, record[k]):>{WIDTHS.get(k, WIDTH)}}"
            for k in dict.fromkeys((*SHOWN, *own))
            if k in record
        ]
        waits = record.get("input_wait", 0.0)
        if waits > TOO_LONG and not self.advised:
            self.advised = True
            self.say(
                f"warning: the devices wait {waits:.0%} of the time for data; data.workers reads it in "
                "processes, data.on_device: true keeps a small data set on the devices"
            )
        if waits > WAITS:
            parts.append(f"waits for data {waits:.0%}")
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


def memory() -> str:
    """Return the use of the fullest device, such as "12.3 of 141.0 GB (most 14.0)", else of the
    process.
    """
    import jax

    stats = [s for s in (device.memory_stats() for device in jax.local_devices()) if s]
    if stats:
        fullest = max(stats, key=lambda s: s.get("peak_bytes_in_use", 0))
        now = fullest.get("bytes_in_use", 0)
        most = fullest.get("peak_bytes_in_use", 0)
        limit = f" of {fullest['bytes_limit'] / 1e9:.1f}" if "bytes_limit" in fullest else ""
        return f"{now / 1e9:.1f}{limit} GB (most {most / 1e9:.1f})"
    most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"at most {most / 1e9:.1f} GB of the host, by this process"


class Panel:
    """The live panel of one run. facts: lines below the numbers, by name; `title` becomes the
    panel's title.

    console: the Rich console to draw on, standard output by default; in_use: returns a text about
    the memory in use."""

    def __init__(
        self,
        clock: Clock,
        facts: Mapping[str, str],
        console: "RichConsole | None" = None,
        in_use: Callable[[], str] = memory,
    ):
        from rich import get_console
        from rich.live import Live

        self.clock = clock
        self.facts = facts
        self.in_use = in_use
        self.train: Record = {}
        self.eval: Record = {}
        self.losses: collections.deque[float] = collections.deque(maxlen=POINTS)
        self.save: tuple[int, float] | None = None
        self.console = console or get_console()
        self.live = Live(get_renderable=self.render, console=self.console, refresh_per_second=4)
        self.live.start()

    def write(self, record: Record) -> None:
        if record["split"] == "train":
            self.train = record
            self.losses.append(float(record["loss"]))
        elif (
            record["split"] == "eval" or self.eval
        ):  # without an evaluation, the final record is of an update
            self.eval = record

    def saved(self, step: int) -> None:
        self.save = (step, time.monotonic())

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.live.stop()

    def render(self) -> "RenderableType":
        """Return the full panel, or the panel without facts if the terminal has too few lines."""
        full = self.frame(self.facts)
        if len(self.console.render_lines(full)) <= self.console.height:
            return full
        return self.frame({"title": self.facts["title"]} if "title" in self.facts else {})

    def frame(self, facts: Mapping[str, str]) -> "RenderableType":
        from rich import box
        from rich.columns import Columns
        from rich.console import Group
        from rich.panel import Panel as Frame
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        clock, train = self.clock, self.train

        def flow(parts):
            # Texts, in which no markup is read.
            return Columns(map(Text.assemble, parts), padding=(0, 2))

        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        done = f"{clock.step:,} of {clock.steps:,}  {clock.step / max(clock.steps, 1):.0%}"
        bar = ProgressBar(
            total=max(clock.steps, 1),
            completed=clock.step,
            complete_style="cyan",
            finished_style="green",
        )
        head.add_row(bar, done)
        left = duration(clock.left() if clock.step < clock.steps else 0)
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column()
        if train:
            loss = Text(number("loss", train["loss"]), style="bold")
            rows.add_row("loss", Text.assemble(loss, "  ", (sparkline(self.losses), "cyan")))
            if metrics := [f"{k} {number(k, v)}" for k, v in train.items() if k not in RESERVED]:
                rows.add_row("metrics", flow(metrics))
            shown = [k for k in ("lr", "grad_norm") if k in train]
            rows.add_row(
                "update", flow([f"{NAMES.get(k, k)} {number(k, train[k])}" for k in shown])
            )
            if train.get("skipped_updates"):
                rows.add_row(
                    "skipped", Text(f"{train['skipped_updates']:.0f} updates", style="yellow")
                )
            if speed := [
                text.format(number(k, train[k])) for k, text in SPEED.items() if k in train
            ]:
                rows.add_row("speed", flow(speed))
        else:
            rows.add_row(
                "",
                Text("compiling; the first numbers follow after the first interval", style="dim"),
            )
        if self.eval:
            ordered = sorted(
                (k for k in self.eval if k not in NOT_METRICS), key=lambda k: k != "loss"
            )
            after = Text(f"after {self.eval['step']:,}", style="dim")
            rows.add_row(
                "evaluated", flow([*(f"{k} {number(k, self.eval[k])}" for k in ordered), after])
            )
        if self.save is not None:
            rows.add_row(
                "saved", f"step {self.save[0]:,}, {duration(time.monotonic() - self.save[1])} ago"
            )
        if in_use := self.in_use():
            rows.add_row("in use", in_use)
        lines = {name: text for name, text in facts.items() if name != "title"}
        if lines:
            rows.add_row("", "")
        for name, text in lines.items():
            rows.add_row(name, Text(text))
        return Frame(
            Group(head, rows),
            title=Text(facts.get("title", "training"), style="bold not dim"),
            title_align="left",
            subtitle=Text(f"{duration(clock.elapsed())} so far, {left} left", style="not dim"),
            subtitle_align="right",
            box=box.ROUNDED,
            border_style="dim",
        )


def sparkline(values: Sequence[float]) -> str:
    """Return one character per value, the lowest ▁ and the highest █; a blank for a non-finite
    value.
    """
    finite = [v for v in values if abs(v) < float("inf")]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    step = (high - low) / (len(BARS) - 1) or 1.0
    return "".join(BARS[round((v - low) / step)] if abs(v) < float("inf") else " " for v in values)
