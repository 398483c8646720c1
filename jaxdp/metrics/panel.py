"""The live panel: where a run stands, at a glance, redrawn four times a second."""

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from jaxdp.metrics.memory import memory
from jaxdp.metrics.numbers import duration, number
from jaxdp.metrics.writer import Record

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

BARS = "▁▂▃▄▅▆▇█"
POINTS = 32  # of the sparkline
RATES = (("examples_per_s", "{} examples/s"), ("tokens_per_s", "{} tokens/s"), ("step_time_ms", "{} ms a step"))
SHARES = (("mfu", "MFU"), ("input_wait", "waiting for input"))
OWN = {"loss", "lr", "grad_norm", "step", "split", "time", "skipped", "skipped_updates", "nonfinite_grads"}


class Progress(Protocol):
    """How far a run is: see `jaxdp.metrics.console.Clock`."""

    steps: int
    step: int

    def left(self) -> float | None: ...
    def elapsed(self) -> float: ...


class Panel:
    """Of one run, on the terminal. facts: what is said of it below its numbers, by name; `title` is its head.

    console: where it is drawn, standard output by itself; in_use: what is said of memory.
    """

    def __init__(
        self,
        clock: Progress,
        facts: Mapping[str, str],
        console: "Console | None" = None,
        in_use: Callable[[], str] = memory,
    ):
        from rich.live import Live

        self.clock, self.facts, self.in_use = clock, facts, in_use
        self.train: Record = {}
        self.eval: Record = {}
        self.losses: collections.deque[float] = collections.deque(maxlen=POINTS)
        self.save: tuple[int, float] | None = None
        self.live = Live(get_renderable=self.render, console=console, refresh_per_second=4)
        self.live.start()

    def write(self, record: Record) -> None:
        if record["split"] == "train":
            self.train = record
            self.losses.append(float(record["loss"]))
        elif record["split"] == "eval":
            self.eval = record

    def saved(self, step: int) -> None:
        self.save = (step, time.monotonic())

    def say(self, text: str) -> None:
        self.live.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.live.stop()

    def render(self) -> "RenderableType":
        from rich import box
        from rich.console import Group
        from rich.panel import Panel as Frame
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        clock, train = self.clock, self.train
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        done = f"{clock.step:,} of {clock.steps:,}  {clock.step / max(clock.steps, 1):.0%}"
        head.add_row(ProgressBar(total=max(clock.steps, 1), completed=clock.step), done)
        left = duration(clock.left()) if clock.step < clock.steps else duration(0)
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column()
        if train:
            loss = Text(number("loss", train["loss"]), style="bold")
            rows.add_row("loss", Text.assemble(loss, "  ", (sparkline(self.losses), "cyan")))
            metrics = [f"{k} {number(k, v)}" for k, v in train.items() if _is_metric(k)]
            steps = [f"lr {number('lr', train['lr'])}"] if "lr" in train else []
            steps += [f"|grad| {number('grad_norm', train['grad_norm'])}"] if "grad_norm" in train else []
            if metrics:
                rows.add_row("batch", Text("  ".join(metrics)))
            rows.add_row("update", "  ".join(steps))
            if train.get("skipped_updates"):
                rows.add_row("skipped", Text(f"{train['skipped_updates']:.0f} updates", style="yellow"))
            speed = [text.format(number(k, train[k])) for k, text in RATES if k in train]
            shares = [f"{text} {number(k, train[k])}" for k, text in SHARES if k in train]
            if speed:
                rows.add_row("speed", "  ".join(speed))
            if shares:
                rows.add_row("", "  ".join(shares))
        else:
            rows.add_row("", Text("compiles; the first numbers come with the first interval", style="dim"))
        if self.eval:
            found = {k: v for k, v in self.eval.items() if k not in ("step", "split", "time")}
            numbers = "  ".join(f"{k} {number(k, v)}" for k, v in found.items())
            rows.add_row("evaluated", Text.assemble(numbers, "  ", (f"after {self.eval['step']:,}", "dim")))
        if in_use := self.in_use():
            rows.add_row("memory", in_use)
        if self.save is not None:
            rows.add_row("saved", f"step {self.save[0]:,}, {duration(time.monotonic() - self.save[1])} ago")
        for name, text in self.facts.items():
            if name != "title":
                rows.add_row(name, Text(text))
        return Frame(
            Group(head, rows),
            title=Text(self.facts.get("title", "training"), style="bold"),
            title_align="left",
            subtitle=f"{duration(clock.elapsed())} so far, {left} left",
            subtitle_align="right",
            box=box.ROUNDED,
            border_style="dim",
        )


def sparkline(values: Sequence[float]) -> str:
    """One character a value, the lowest ▁ and the highest █; what is not finite is a blank."""
    finite = [v for v in values if abs(v) < float("inf")]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    step = (high - low) / (len(BARS) - 1) or 1.0
    return "".join(BARS[round((v - low) / step)] if abs(v) < float("inf") else " " for v in values)


def _is_metric(name: str) -> bool:
    known = {key for key, _ in (*RATES, *SHARES)}
    return name not in OWN | known and not name.startswith(("straggler", "goodput", "loss_scale"))
