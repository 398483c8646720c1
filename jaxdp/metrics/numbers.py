"""Formatting of numbers for people, and which of them are better if smaller."""

import datetime
import re
from collections.abc import Sequence
from typing import Any

from jaxdp.data.split_names import CAMEL
from jaxdp.errors import UsageError

# Words in the names of metrics, in any case: better if smaller, or if larger.
SMALLER = "loss|perplexity|error|entropy|mse|rmse|mae|mape|nll|brier|distance"
LARGER = "acc|accuracy|precision|recall|f1|auc|iou|miou|dice|bleu|rouge|r2"


def sign(metric: str, mode: str | None = None) -> int:
    """Return 1 if a metric is better if smaller, -1 if it is better if larger, and 0 if that is not
    known: by the mode 'min' or 'max', or by the words of its name, of which none, or some of each
    kind, may be known. The name of a set before it, as in valid/loss, does not count.
    """
    if mode:
        return 1 if mode == "min" else -1
    name = metric.rpartition("/")[2]
    # Also the parts of words, as in valLoss; but mIoU is one word.
    words = f"{name} {CAMEL.sub(' ', name)}".lower().replace("_", " ")
    smaller, larger = (re.search(rf"\b({kind})\d*\b", words) for kind in (SMALLER, LARGER))
    return bool(smaller) - bool(larger)


def known_sign(key: str, metric: str, mode: str | None) -> int:
    """Return `sign`. Raises UsageError that names `key` if it is not known."""
    if not (known := sign(metric, mode)):
        raise UsageError(
            f"{key}: the name {metric!r} does not say whether its min or its max is best; set mode beside it"
        )
    return known


def duration(seconds: float | None) -> str:
    """Format seconds as h:mm:ss, with days if there are any; None as "?"."""
    return "?" if seconds is None else str(datetime.timedelta(seconds=int(seconds)))


def number(name: str, value: Any) -> str:
    """Format a metric: rates as whole numbers, fractions in percent, losses with four decimals if
    in range.
    """
    if not isinstance(value, int | float):
        return str(value)
    if name in ("examples_per_s", "tokens_per_s"):
        return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"
    if name in ("mfu", "goodput", "input_wait"):
        return f"{value:.1%}"
    if name == "lr":
        return f"{value:.2e}"
    if name == "step_time_ms":
        return f"{value:,.0f}" if value >= 1e4 else f"{value:.2f}"
    if name == "model_flops_per_s":
        return scaled(value)
    if 0 < abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3e}"


def size(n: float) -> str:
    """Format a number of bytes, such as 1.23 GB."""
    return f"{scaled(n)}B"


def scaled(n: float) -> str:
    """Format with three digits and the prefix of a unit that follows: "1.23 G"."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= scale:
            return f"{n / scale:.3g} {prefix}" if n < 999.5 * scale else f"{n / scale:.0f} {prefix}"
    return f"{n:.0f} "


def table(rows: Sequence[Sequence[str]], align: str = "<") -> list[str]:
    """Return aligned lines, one for each row; the first column is aligned left, the others by
    `align`, "<" or ">".
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    aligns = ["<", *align * (len(widths) - 1)]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, aligns, widths)
        ).rstrip()
        for row in rows
    ]
