"""The writers that a config names, beside the console and metrics.jsonl: built in, or anybody's by its path."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.metrics.soft import Soft
from jaxdp.metrics.tensorboard import TensorBoard
from jaxdp.metrics.wandb import WandB
from jaxdp.metrics.writer import Writer
from jaxdp.targets import bind, locate, parameters, require, targets_in

WRITERS: dict[str, Any] = {"TensorBoard": TensorBoard, "WandB": WandB}
KEY = "log.writers"


def check_writers(entries: Sequence[Any]) -> None:
    """UsageError where a writer is unknown, or does not take its arguments; makes none of them."""
    for target, args in targets_in(KEY, entries, "writer", "TensorBoard"):
        found = locate(KEY, target, WRITERS)
        bind(KEY, found, args, {name: None for name in ("directory", "start", "config") if name in parameters(found)})


def make_writers(
    entries: Sequence[Any], directory: pathlib.Path, start: int, config: Mapping[str, Any]
) -> list[Writer]:
    """The writers, made; those that fail or hang, in being made as later, are warned of, and left.

    A writer's class or function takes, beside its own arguments, any of these by name: directory (of the run), start
    (the update that the run goes on after) and config (a dict).
    """
    given = {"directory": directory, "start": start, "config": config}
    made: list[Writer] = []
    for target, args in targets_in(KEY, entries, "writer", "TensorBoard"):
        found = locate(KEY, target, WRITERS)
        own = {name: value for name, value in given.items() if name in parameters(found)}
        bound = bind(KEY, found, args, own)
        require(KEY, bound)
        made.append(Soft(target, bound))
    return made
