"""Curves for TensorBoard, written by tensorboardX: one tag a number, train/loss and eval/loss side by side."""

import pathlib

from jaxdp.errors import UsageError
from jaxdp.metrics.writer import Record


class TensorBoard:
    """Writes event files below the run directory.

    directory: of the run; start: what was written of later updates does not hold; folder: below the directory;
    flush_secs: seconds between two writes to disk. Raises UsageError where tensorboardX is not installed.
    """

    def __init__(self, directory: pathlib.Path, start: int = 0, folder: str = "tensorboard", flush_secs: float = 10):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise UsageError(
                "log.writers: TensorBoard needs tensorboardX, which is not installed; "
                "pip install 'jaxdp-trainer[tensorboard]'"
            ) from None
        self.make = lambda purge: SummaryWriter(
            str(directory / folder), purge_step=purge, flush_secs=flush_secs, write_to_disk=True
        )
        self.writer = self.make(start + 1 if start else None)

    def write(self, record: Record) -> None:
        step, split = record["step"], record["split"]
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("step", "time"):
                self.writer.add_scalar(f"{split}/{name}", value, step)

    def say(self, text: str) -> None: ...

    def rewind(self, step: int) -> None:
        self.writer.close()
        self.writer = self.make(step + 1)

    def close(self) -> None:
        self.writer.close()
