"""The writers of `log.writers`, in addition to the console and metrics.jsonl: built-in, or any
class by its path.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.metrics.background_writer import BackgroundWriter
from jaxdp.metrics.tensorboard import TensorBoard
from jaxdp.metrics.wandb import WandB
from jaxdp.metrics.writer import Writer
from jaxdp.targets import bind, locate, require, targets_in

WRITERS: dict[str, Any] = {"TensorBoard": TensorBoard, "WandB": WandB}
KEY = "log.writers"


def bound_writers(entries: Sequence[Any], available: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (target, function that makes the writer) of each. Raises UsageError if one is unknown,
    or does not accept its arguments."""
    writers = []
    for target, args in targets_in(KEY, entries, "writer", "TensorBoard"):
        make = bind(KEY, locate(KEY, target, WRITERS), args, available)
        require(KEY, make)
        writers.append((target, make))
    return writers


def check_writers(entries: Sequence[Any]) -> None:
    """Raise UsageError as `bound_writers` does; makes no writer."""
    bound_writers(entries, dict.fromkeys(("directory", "start", "config")))


def make_writers(
    entries: Sequence[Any], directory: pathlib.Path, start: int, config: Mapping[str, Any]
) -> list[Writer]:
    """Return the configured writers; a writer that fails or hangs, at the start or later, is
    dropped with a warning.

    If a writer's class or function declares directory (of the run), start (the update that the run
    resumes after) or config (a dict), jaxdp passes them in.
    """
    available = {"directory": directory, "start": start, "config": config}
    return [BackgroundWriter(target, make) for target, make in bound_writers(entries, available)]
