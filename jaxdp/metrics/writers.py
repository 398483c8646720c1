"""The writers of `log.writers`, in addition to the console and metrics.jsonl: built-in, or any class by its path."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.metrics.background_writer import BackgroundWriter
from jaxdp.metrics.tensorboard import TensorBoard
from jaxdp.metrics.wandb import WandB
from jaxdp.metrics.writer import Writer
from jaxdp.targets import bind, locate, parameters, require, targets_in

WRITERS: dict[str, Any] = {"TensorBoard": TensorBoard, "WandB": WandB}
KEY = "log.writers"


def check_writers(entries: Sequence[Any]) -> None:
    """Raise UsageError if a writer is unknown or does not accept its arguments; makes no writer."""
    for target, args in targets_in(KEY, entries, "writer", "TensorBoard"):
        make = locate(KEY, target, WRITERS)
        extra: dict[str, Any] = dict.fromkeys({"directory", "start", "config"} & parameters(make).keys())
        require(KEY, bind(KEY, make, args, extra))


def make_writers(
    entries: Sequence[Any], directory: pathlib.Path, start: int, config: Mapping[str, Any]
) -> list[Writer]:
    """Return the configured writers; a writer that fails or hangs, at the start or later, is dropped with a warning.

    If a writer's class or function declares directory (of the run), start (the update that the run resumes after) or
    config (a dict), jaxdp passes them in.
    """
    available = {"directory": directory, "start": start, "config": config}
    writers: list[Writer] = []
    for target, args in targets_in(KEY, entries, "writer", "TensorBoard"):
        make = locate(KEY, target, WRITERS)
        extra = {name: value for name, value in available.items() if name in parameters(make)}
        bound = bind(KEY, make, args, extra)
        require(KEY, bound)
        writers.append(BackgroundWriter(target, bound))
    return writers
