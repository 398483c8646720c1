"""A profile is a window of updates traced for TensorBoard or Perfetto: a planned one, or the next ones when asked."""

import contextlib
import dataclasses
from typing import Any

import jax


@dataclasses.dataclass
class Profile:
    """Traces `steps` updates after update `start` into `directory`; with start None, nothing until `ask` is called."""

    directory: str = ""
    start: int | None = None
    steps: int = 5
    asked: bool = False
    running: bool = False

    def ask(self) -> None:
        """The next `steps` updates are traced; from any thread."""
        self.asked = True

    def before(self, step: int) -> None:
        """Ahead of update `step` (1 is the first)."""
        if self.asked and not self.running:
            self.asked, self.start = False, step - 1
        if self.start is not None and step == self.start + 1:
            jax.profiler.start_trace(self.directory)
            self.running = True

    def after(self, step: int, outputs: Any) -> None:
        """After update `step`; waits for its outputs where the trace ends."""
        if self.running and self.start is not None and step >= self.start + self.steps:
            jax.block_until_ready(outputs)
            self.stop()

    def stop(self) -> None:
        """Ends a trace that is under way."""
        if self.running:
            self.running = False
            with contextlib.suppress(RuntimeError):
                jax.profiler.stop_trace()
