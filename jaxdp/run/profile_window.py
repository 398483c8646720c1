"""Traces of a window of updates for TensorBoard or Perfetto, planned or on request."""

import dataclasses
import os
import pathlib
from collections.abc import Collection

import jax

from jaxdp.errors import one_line
from jaxdp.metrics import safe_print
from jaxdp.train.observer import Observer
from jaxdp.train.state import Batch


@dataclasses.dataclass
class Profile(Observer):
    """A trace of `steps` updates after update `first`, into `directory`; with first None, nothing
    until `ask`.
    """

    directory: str = ""
    first: int | None = None
    steps: int = 5
    requested: bool = False
    running: bool = False
    ends: Collection[int] = ()

    def ask(self) -> None:
        """Request a trace of the next `steps` updates; safe from any thread."""
        self.requested = True

    def before(self, updates: range, batch: Batch) -> None:
        """Start a trace that is due before these updates."""
        if self.requested and not self.running:
            self.requested = False
            self.first = updates[0] - 1
        if self.first is not None and updates[0] == self.first + 1:
            try:
                os.makedirs(
                    self.directory, exist_ok=True
                )  # JAX would say only after the trace that it cannot
                jax.profiler.start_trace(self.directory)
                self.running = True
            except (OSError, RuntimeError) as error:
                report(error)

    def wants(self, step: int) -> Collection[str]:
        is_over = self.running and self.first is not None and step >= self.first + self.steps
        return ("pause",) if is_over else ()

    def pause(self, step: int, last: bool) -> None:
        """End a trace that is due."""
        if self.wants(step):
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
