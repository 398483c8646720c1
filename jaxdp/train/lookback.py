"""Checks of updates that the device has finished, a few updates behind the loop, the same update on
every rank.

The loop waits only if it is `BEHIND` updates (or one call) ahead of the device. All ranks see the
same values, so they take the same decision without exchanging messages.
"""

import collections
from collections.abc import Mapping

import jax
import numpy as np

from jaxdp.train.observer import Observer
from jaxdp.train.state import Batch, TrainState

BEHIND = 8  # updates: keeps the device busy while the host stalls for a few milliseconds
EXAMINED = 10  # updates whose examples are checked: the first of consecutive non-finite ones


class Halted(Exception):
    """Training has halted, as the guard in the state says."""


class NotFinite(Exception):
    """The loss of `update` is not finite; its examples may show the cause."""

    def __init__(self, update: int):
        super().__init__(f"the loss of update {update} is not finite")
        self.update = update


class Lookback(Observer):
    """Raise NotFinite if the loss of an update is not finite, and Halted once the guard has halted.

    examine: the maximum number of updates to report as NotFinite.
    """

    def __init__(self, examine: int = EXAMINED):
        self.examine, self.finite = examine, True
        self.sent: collections.deque[tuple[range, jax.Array, jax.Array]] = collections.deque()

    def before(self, updates: range, batch: Batch) -> None:
        self.look(updates[0] - 1 - BEHIND)

    def after(self, updates: range, state: TrainState, metrics: Mapping[str, jax.Array]) -> None:
        self.sent.append((updates, metrics["loss"], metrics["halted"]))
        self.guard = state.guard  # until the next update

    def pause(self, step: int, last: bool) -> None:
        """Never save or evaluate a state in which training has halted."""
        if last:
            self.look(step)
        elif self.sent and int(self.guard.halted):
            raise Halted

    def look(self, last: int) -> None:
        """Wait for the calls up to update `last`, and check their updates."""
        while self.sent and self.sent[0][0][-1] <= last:
            updates, *arrays = self.sent.popleft()
            losses, halted = (np.asarray(x).reshape(-1) for x in arrays)
            for update, finite in zip(updates, np.isfinite(losses), strict=True):
                before, self.finite = self.finite, bool(finite)
                if before and not finite and self.examine:
                    self.examine -= 1
                    raise NotFinite(update)
            if halted.any():
                raise Halted
