"""Traces of a window of updates for TensorBoard or Perfetto, planned or on request."""

import dataclasses
import os
import pathlib
from typing import Any

import jax

from jaxdp.errors import one_line
from jaxdp.metrics import safe_print


@dataclasses.dataclass
class Profile:
    """A trace of `steps` updates after update `start`, into `directory`; with start None, nothing
    until `ask`.
    """

    directory: str = ""
    start: int | None = None
    steps: int = 5
    requested: bool = False
    running: bool = False

    def ask(self) -> None:
        """Request a trace of the next `steps` updates; safe from any thread."""
        self.requested = True

    def before(self, step: int) -> None:
        """Start a trace that is due before update `step` (1 is the first)."""
        if self.requested and not self.running:
            self.requested, self.start = False, step - 1
        if self.start is not None and step == self.start + 1:
            try:
                os.makedirs(
                    self.directory, exist_ok=True
                )  # JAX would say only after the trace that it cannot
                jax.profiler.start_trace(self.directory)
                self.running = True
            except (OSError, RuntimeError) as error:
                report(error)

    def after(self, step: int, outputs: Any) -> None:
        """End a trace that is due after update `step`, waiting for the update's outputs."""
        if self.running and self.start is not None and step >= self.start + self.steps:
            jax.block_until_ready(outputs)
            self.stop()

    def stop(self) -> None:
        """End the trace that is running, if any."""
        if self.running:
            self.running = False
            try:
                jax.profiler.stop_trace()
            except RuntimeError as error:
                report(error)


def folder(directory: pathlib.Path) -> pathlib.Path:
    """Return the folder of this process's traces in a run directory; the processes of one host
    would share names.
    """
    return (
        directory / "profile" / (f"rank_{jax.process_index()}" if jax.process_count() > 1 else "")
    )


def report(error: Exception) -> None:
    safe_print.say(
        f"jaxdp: profile: no trace is written, and the run continues: {one_line(error)}", error=True
    )
