"""The loop: read a batch, update, observe, and now and then save and evaluate.

`Lookback` checks updates that the device has finished, a few updates behind the loop, the same
update on every rank. The loop waits only if it is `BEHIND` updates (or one call) ahead of the
device. All ranks see the same values, so they take the same decision without exchanging messages."""

import collections
import contextlib
from collections.abc import Mapping

import jax
import numpy as np

from jaxdp.parallel.strategy import Program
from jaxdp.train.observer import Observer, Observers
from jaxdp.train.run import Finish, Host, Progress, Run
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
            updates, loss, halted = self.sent.popleft()
            for update, finite in zip(updates, np.ravel(np.isfinite(loss))):
                before, self.finite = self.finite, bool(finite)
                if before and not finite and self.examine:
                    self.examine -= 1
                    raise NotFinite(update)
            if np.asarray(halted).any():
                raise Halted


def fit(run: Run, program: Program, progress: Progress, observers: Observers, host: Host) -> None:
    """Make the updates after `progress.step`, until the last one, a stop or the end of the data.

    Args:
        run: the built objects; `run.options.steps` is the last update.
        program: of `run.step`, compiled by the caller, who may call `fit` again.
        progress: where to begin. It is kept up to date, so that the caller can save or roll back
            after an exception. Its state is consumed by the next update.
        observers: called between updates, in their order. Their exceptions end training.
        host: calls the programs, saves and evaluates.
    """
    options, offset = run.options, progress.offset
    observers.start(run, progress)
    try:
        with contextlib.suppress(Finish):
            # The run was interrupted between an update and its evaluation.
            resumes = 0 < progress.step < options.steps and progress.evaluated != progress.step
            if resumes and "evaluate" in (due := run.due(progress.step)):
                between(progress, observers, host, due)

            # Updates count from 1, batches from 0.
            ends = {update for each in observers.observers for update in each.ends}
            calls = run.calls(progress.step, ends)
            numbers = (range(of.start - 1 + offset, of.stop - 1 + offset) for of in calls)
            first, end = progress.step + offset, options.steps + offset
            with run.data.train.batches(first, end, run.strategy, numbers) as batches:
                observers.reading(progress.step)
                for number, batch in batches:
                    updates = range(number.start + 1 - offset, number.stop + 1 - offset)
                    observers.before(updates, batch)
                    if len(updates) > 1:
                        name, call = f"updates {updates[0]} to {updates[-1]}", program.updates
                    else:
                        name, call = f"update {updates[0]}", program.update
                    progress.state, progress.metrics = host.call(name, call, progress.state, batch)
                    progress.step = updates[-1]
                    observers.after(updates, progress.state, progress.metrics)

                    due = run.due(progress.step) | observers.wants(progress.step)
                    if due and progress.step < options.steps:
                        if "stop" in due:
                            host.stop("preempt")
                        between(progress, observers, host, due)
                        if "finish" in due:
                            host.stop("finish")
                    observers.reading(progress.step)
                progress.data_ended = batches.ended
        jax.block_until_ready(progress.metrics)
        observers.pause(progress.step, True)
    finally:
        observers.end(progress.step)


def between(progress: Progress, observers: Observers, host: Host, due: set[str]) -> None:
    """Save and evaluate between two updates; the evaluation runs while the checkpoint is written."""
    jax.block_until_ready(progress.metrics)
    observers.pause(progress.step, False)
    if "save" in due:
        host.save()
    if "evaluate" in due:
        host.evaluate()
