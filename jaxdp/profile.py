"""A profile is a window of updates traced for TensorBoard or Perfetto."""

import contextlib
import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Profile:
    """Traces `steps` updates after update `start` into `directory`; with start None, nothing."""

    directory: str = ""
    start: int | None = None
    steps: int = 5

    def before(self, step: int) -> None:
        """Ahead of update `step` (1 is the first)."""
        if self.start is not None and step == self.start + 1:
            jax.profiler.start_trace(self.directory)

    def after(self, step: int, outputs: Any) -> None:
        """After update `step`; waits for its outputs where the trace ends."""
        if self.start is not None and step == self.start + self.steps:
            jax.block_until_ready(outputs)
            jax.profiler.stop_trace()

    def stop(self) -> None:
        """Ends a trace that is under way."""
        if self.start is not None:
            with contextlib.suppress(RuntimeError):
                jax.profiler.stop_trace()
