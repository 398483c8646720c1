"""Observers: the one door for everything that happens between two updates."""

import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from jaxdp.train.run import Progress, Record, Run
from jaxdp.train.state import Batch, TrainState
from jaxdp.train.step import Step

WANTS = {"pause", "save", "evaluate", "stop"}  # what an observer may ask for


class Observer:
    """The base class of what looks at updates: the meter, the look back, a callback.

    Override the methods that you need; the others cost nothing. No method but `pause` may wait for
    the device, except for results that are several updates old: else the device waits for the host.
    A value of this update that decides something is therefore read some updates later, the same
    number on every rank, as `Lookback` does. An observer asks for something in `wants`. It must not
    keep `state`: the next update donates its arrays.

    ends: updates after which a call of several updates must end, since the observer acts there.
    """

    ends: Collection[int] = ()

    def start(self, run: Run, progress: Progress) -> None:
        """Training starts or resumes after update `progress.step`; again after a rollback."""

    def reading(self, step: int) -> None:
        """The loop waits for the data of the updates after `step`."""

    def before(self, updates: range, batch: Batch) -> None:
        """The batch of these updates is on the devices; earlier updates may still be running."""

    def after(self, updates: range, state: TrainState, metrics: Mapping[str, jax.Array]) -> None:
        """These updates were dispatched in one call.

        metrics: arrays on the device, [] of one update, [update] of several.
        """

    def wants(self, step: int) -> Collection[str]:
        """Return any of "pause", "save", "evaluate" and "stop" for after update `step`.

        The first three must be the same on all processes. "stop" is enough on one of them: all stop
        before the same update, save the state and end with code 75, and the same command resumes.
        It is ignored after the last update. A callback may raise `jaxdp.StopTraining` instead: the
        run has then finished, with this update if all processes raise it, else with one of the
        next, the same on all.
        """
        return ()

    def pause(self, step: int, last: bool) -> None:
        """All updates are complete; the state is about to be saved or evaluated, or an observer
        wants a pause.

        last: training ends after update `step`.
        """

    def saved(self, step: int, path: pathlib.Path) -> None:
        """The checkpoint of update `step` was started; `path` is its folder."""

    def evaluated(self, step: int, record: Record) -> None:
        """The state after update `step` was evaluated; record: floats, the same on every rank."""

    def finished(self, record: Record) -> None:
        """The run has finished; record: the final one, with the digest of the parameters."""

    def end(self, step: int) -> None:
        """Training ends, in whatever way; release what `start` took."""

    def change_step(self, run: Run, progress: Progress) -> Step:
        """Return the step to train with in the place of `run.step`; called before `start`,
        and before anything is compiled."""
        return run.step


class Observers:
    """Several observers as one, called in their order, `end` in the reverse order.

    A method that an observer does not override is never called.
    """

    def __init__(self, observers: Sequence[Observer] = ()):
        self.observers = observers
        self.names = [getattr(each, "name", type(each).__name__) for each in observers]

        def methods(point: str) -> list[Callable[..., Any]]:
            ordered = observers[::-1] if point == "end" else observers
            found = [getattr(each, point) for each in ordered]
            plain = getattr(Observer, point)
            return [method for method in found if getattr(method, "__func__", None) is not plain]

        def together(point: str) -> Callable[..., None]:
            overridden = methods(point)

            def call(*args: Any) -> None:
                for method in overridden:
                    method(*args)

            return call

        self.start = together("start")
        self.reading = together("reading")
        self.before = together("before")
        self.after = together("after")
        self.pause = together("pause")
        self.saved = together("saved")
        self.evaluated = together("evaluated")
        self.finished = together("finished")
        self.end = together("end")
        self._wants = methods("wants")

    def wants(self, step: int) -> set[str]:
        """Return what any of the observers wants after update `step`."""
        return {name for wants in self._wants for name in wants(step)}
