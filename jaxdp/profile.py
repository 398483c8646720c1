"""A profile is a window of updates traced for TensorBoard or Perfetto."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True)
class Profile:
    """Traces `steps` updates after update `start` into `directory`; with start None, nothing."""

    directory: str = ""
    start: int | None = None
    steps: int = 5

    @contextlib.contextmanager
    def trace(self, step: int) -> Iterator[None]:
        """Around update `step` (1 is the first)."""
        if self.start is not None and step == self.start + 1:
            jax.profiler.start_trace(self.directory)
        yield
        if self.start is not None and step == self.start + self.steps:
            jax.effects_barrier()
            jax.profiler.stop_trace()
