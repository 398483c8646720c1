"""Curves for TensorBoard, written by tensorboardX: one tag per number, such as train/loss and
eval/loss.
"""

import pathlib

from jaxdp.errors import import_optional
from jaxdp.metrics.writer import Record, Writer


class TensorBoard(Writer):
    """A writer of TensorBoard event files.

    directory: the run directory; start: the update that the run resumes after (later points are
    purged); folder: a subfolder of the directory; flush_secs: seconds between writes. Raises
    UsageError if tensorboardX is not installed."""

    def __init__(
        self,
        directory: pathlib.Path,
        start: int = 0,
        folder: str = "tensorboard",
        flush_secs: float = 10,
    ):
        library = import_optional("tensorboardX", "log.writers: TensorBoard", "tensorboard")
        self.make = lambda purge: library.SummaryWriter(
            str(directory / folder), purge_step=purge, flush_secs=flush_secs, write_to_disk=True
        )
        self.writer = self.make(start + 1 if start else None)

    def write(self, record: Record) -> None:
        step = record["step"]
        split = record["split"]
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("step", "time"):
                self.writer.add_scalar(f"{split}/{name}", value, step)

    def rewind(self, step: int) -> None:
        self.writer.close()
        self.writer = self.make(step + 1)

    def close(self) -> None:
        self.writer.close()
