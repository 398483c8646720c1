"""An observer that ends a run after a wall-clock limit."""

import time

from jaxdp.errors import UsageError
from jaxdp.train.observer import Observer


class TimeLimit(Observer):
    """End the run after `minutes` since its start: all processes save after the same update, and the
    command ends with exit code 75. The same command goes on, for as long again.

    Raises UsageError if minutes is not positive.
    """

    def __init__(self, minutes: float):
        if not minutes > 0:
            raise UsageError(f"callbacks.args.minutes: {minutes!r} is not a positive number")
        self.ends_at = time.monotonic() + 60 * minutes

    def wants(self, step: int) -> set[str]:
        return {"stop"} if time.monotonic() > self.ends_at else set()
