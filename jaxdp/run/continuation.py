"""What a run continues from, besides its checkpoints."""

from collections.abc import Callable
from typing import Any

from jaxdp.metrics.writer import Record, Writer
from jaxdp.process.context import Context
from jaxdp.run.build import Prepared
from jaxdp.run.callbacks import Callbacks
from jaxdp.train.observer import Observer
from jaxdp.train.run import Run
from jaxdp.train.state import TrainState


class Continuation(Observer):
    """What a command keeps that trains more than once, perhaps with other processes: the last
    observer of each of its runs. This base class is that of a command that trains once.

    Attributes:
        runs: those of the job that have ended, also before this process joined it.
        prepared: what a run of this process has built for any number of devices.
        last_save: when the last run saved, in seconds of `time.monotonic`; None: it did not.
        again: updates of the last run that this one makes again.
        survives: whether training goes on without a process that is lost.
        trusted: only states in which no device was found wrong are kept.
    """

    runs = again = 0
    prepared: Prepared | None = None
    last_save: float | None = None
    survives = False
    trusted = False

    def recover(self, run: Run, context: Context) -> tuple[int, Record, TrainState] | None:
        """Return (update, metadata, state) of the newest state in memory; None without one."""
        return None

    def load(self, callbacks: Callbacks, saved: Record) -> None:
        """Load the states of callbacks from the metadata of a state."""
        if saved:
            callbacks.load(saved)

    def begin(self, training: Any, open_writer: Callable[[], Writer]) -> Writer:
        """Return the writer of a run on this rank. The run is built, and its state is that of
        `training.progress`, or is to be made.

        Args:
            training: a `Training`.
            open_writer: opens that of root.
        """
        return open_writer() if training.run.checkpoints.context.is_root else Writer()

    def keep_state(self) -> None:
        """Training is interrupted, and continues in another run: keep the state."""

    def drop_damaged(self) -> bool:
        """Drop what has changed in memory since it was kept; return whether there was any."""
        return False

    def drop_after(self, step: int) -> None:
        """Drop the states of later updates: they may be wrong."""

    def goes_on(self, error: BaseException) -> bool:
        """Return whether an error ends this run, but not the command."""
        return False
