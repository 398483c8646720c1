"""A run: the objects that training consists of, built once, and its progress."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import numpy as np

from jaxdp.parallel.strategy import Program, Strategy
from jaxdp.train.state import TrainState
from jaxdp.train.step import Step

Record = dict[str, Any]


class Source(Protocol):
    """A data set and the order in which its examples are read; `jaxdp.run.datasets` has the real one.

    order: has `steps_per_epoch`, the batches of one pass. program: returns the programs that evaluate
    it, if they are not those of the run.
    """

    order: Any
    program: Callable[[], Program] | None

    def batches(
        self, start: int, stop: int, strategy: Strategy, groups: Iterable[range] | None = None
    ) -> AbstractContextManager[Any]:
        """Read batches `start` to `stop - 1` ahead: iterate over (their numbers, the batch).

        groups: the same numbers in ranges, one for each call of a program; by default of one each.
        What is yielded has `ended`: why the data has ended early, or "".
        """

    def examine(self, number: int, name: str) -> None:
        """Raise UsageError if examples of batch `number` explain its non-finite loss."""


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of a run. eval: the evaluation sets by name; "" is the main one. averaged: evaluate
    the EMA.
    """

    train: Any  # a Source
    eval: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    averaged: bool = False


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """The last update, and the updates between two records, evaluations and checkpoints.

    steps_per_call: the number of updates in one compiled call, if nothing is due between them.
    rollback_every: updates between two checkpoints that a rollback can return to; None: any
    checkpoint. asynchronous: training continues while a checkpoint is written.
    """

    steps: int
    steps_per_call: int = 1
    log_every: int = 50
    eval_every: int | None = None
    save_every: int | None = None
    asynchronous: bool = True
    max_rollbacks: int = 3
    rollback_every: int | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """The objects of a run. None of them is replaced while it trains.

    derive: returns metrics computed from the means of a record. checkpoints: where its states are
    saved. log: its records, events and directory.
    """

    strategy: Strategy
    step: Step
    data: Data
    checkpoints: Any
    options: LoopOptions
    log: Any
    derive: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda means: {}

    def due(self, step: int) -> set[str]:
        """Return "save" and "evaluate" if they are due after update `step`."""
        return {name for name, every in self._every() if step % every == 0}

    def calls(self, start: int, ends: Collection[int] = ()) -> Iterator[range]:
        """Yield the updates of each program call after update `start`, numbered from 1.

        A call has `steps_per_call` updates, or a single one where an end comes first: a checkpoint,
        an evaluation, or one of `ends`. So only these two programs are compiled.
        """
        steps, per_call = self.options.steps, self.options.steps_per_call
        while start < steps:
            due = [(start // every + 1) * every for _, every in self._every()]
            limit = min([steps, *due, *(end for end in ends if end > start)])
            count = per_call if start + per_call <= limit else 1
            yield range(start + 1, start + count + 1)
            start += count

    def _every(self) -> list[tuple[str, int]]:
        """Return what is due, and the updates between two of it."""
        options = self.options
        every = [("save", options.save_every), ("save", options.rollback_every)]
        if self.data.eval:
            every.append(("evaluate", options.eval_every))
        return [(name, n) for name, n in every if n is not None]


@dataclasses.dataclass
class Progress:
    """Where a run is: the state after update `step`, and the metrics of its last call.

    start: the update after which it was started or resumed. offset: the number of batches that were
    skipped after spikes, by `rollbacks` rollbacks; update n has batch n - 1 + offset. evaluated:
    the last update that was evaluated; evaluation: its finite metrics. stopped: why a callback ended
    training; data_ended: why the data did. recovered: the state comes from memory, not from
    a checkpoint.
    """

    state: TrainState | Any = None
    step: int = 0
    metrics: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    start: int = 0
    offset: int = 0
    rollbacks: int = 0
    evaluated: int = -1
    evaluation: Record = dataclasses.field(default_factory=dict)
    stopped: str | None = None
    data_ended: str = ""
    recovered: bool = False

    def return_to(self, step: int, state: TrainState, skipped: int) -> None:
        """Continue after an earlier update, with the data after `skipped` more batches."""
        self.step = self.start = self.evaluated = step
        self.state, self.metrics, self.recovered = state, {}, False
        self.evaluation, self.stopped = {}, None
        self.offset += skipped
        self.rollbacks += 1

    def last_batch(self) -> Record:
        """Return the loss of the last batch, which the final record of a run without evaluation
        data has.
        """
        if not self.metrics:
            return self.evaluation  # of the checkpoint or snapshot
        loss = np.reshape(self.metrics["loss"], -1)[-1]
        return {"loss": float(loss), "loss_of": "the last batch"}


class Finish(Exception):
    """All processes end training before the call that raises this: an observer wants it."""


class Host:
    """What `fit` and `evaluate` leave to the program around them.

    This base class is that of a plain script: it calls programs, and saves nothing.
    """

    def call(self, name: str, program: Callable[..., Any], *args: Any) -> Any:
        """Return program(*args), a call for the updates or the batch that `name` describes.

        The program around may stop all processes before it, by an exception: `Finish`, or its own.
        """
        return program(*args)

    def stop(self, kind: str) -> None:
        """Ask all processes to stop before the same call, one of the next, by an exception of
        `call`.

        kind: "finish" (`Finish`), or "preempt": the program saves, and ends.
        """

    def save(self) -> None:
        """Start a checkpoint of the progress."""

    def evaluate(self) -> None:
        """Evaluate the state of the progress, and tell the observers."""
