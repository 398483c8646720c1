"""The updates at which the batch size changes."""

from typing import Any

from jaxdp.train.observer import Observer


class Changes(Observer):
    """Let a call of several updates end where the batch size changes."""

    def start(self, run: Any, progress: Any) -> None:
        self.ends = [update - progress.offset for update in run.data.train.order.batch_sizes]
