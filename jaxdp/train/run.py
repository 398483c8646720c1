"""The state of the loop: the built objects of a run, and its progress."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp.checkpoint.store import Checkpoints
from jaxdp.metrics.events import NoEvents
from jaxdp.metrics.writer import Record, Writer
from jaxdp.parallel.strategy import Strategy
from jaxdp.process.monitor import Monitor
from jaxdp.run.callbacks import Callbacks
from jaxdp.run.profile_window import Profile
from jaxdp.run.source import Source
from jaxdp.train.state import TrainState
from jaxdp.train.step import Step


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of a run. eval: the evaluation sets by name; "" is the main one. averaged: evaluate
    the EMA.
    """

    train: Source
    eval: Mapping[str, Source] = dataclasses.field(default_factory=dict)
    averaged: bool = False


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """The last update, and the updates between two records, evaluations, checkpoints and outer
    steps (`outer`).

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
    outer_every: int = 1


def initial_state(run: "Run") -> TrainState:
    with run.hooks.compiling():
        return run.strategy.init()


@dataclasses.dataclass(frozen=True)
class Origin:
    """The point from which a run starts or resumes.

    start: the update to resume after, 0 for a new run. evaluated: True if the evaluation due at
    `start` already ran; metrics: its finite ones; stopped: why a callback ended training there.
    offset: the number of batches skipped after spikes, by `rollbacks` rollbacks.
    begin: returns the state of a new run. recovered: the state to continue with instead, from the
    snapshots of an elastic job.
    """

    start: int = 0
    evaluated: bool = False
    metrics: Record = dataclasses.field(default_factory=dict)
    stopped: str | None = None
    offset: int = 0
    rollbacks: int = 0
    begin: Callable[["Run"], TrainState] = initial_state
    recovered: TrainState | None = None

    def progress(self, state: TrainState) -> "Progress":
        evaluated = self.start if self.evaluated else -1
        return Progress(self.start, state, {}, evaluated, self.metrics, self.stopped)


@dataclasses.dataclass(frozen=True)
class Log:
    """The outputs of a run, besides its checkpoints.

    derive: returns metrics computed from the means of a record; speed: from the milliseconds of an
    update; account: of the full run, at its end. advise: returns warnings about the data, for the
    start. follows_schedule: whether updates are computed with the rate of the config's schedule.
    directory: of the files. layout: the content of layout.json before the first update; None: write
    no file. groups: what weight decay and Muon apply to, in words.
    """

    writer: Writer = Writer()
    events: NoEvents = NoEvents()
    profile: Profile = dataclasses.field(default_factory=Profile)
    derive: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda means: {}
    speed: Callable[[float], Record] = lambda milliseconds: {}
    account: Callable[[], Record] = dict
    advise: Callable[[], list[str]] = list
    follows_schedule: Callable[[], bool] = lambda: True
    directory: pathlib.Path = pathlib.Path()
    layout: Mapping[str, Any] | None = None
    groups: str = ""


@dataclasses.dataclass(frozen=True)
class Hooks:
    """The objects that the loop calls between updates.

    checks: of the devices, such as `jaxdp.audit.Audit`: after an update for which `is_due(run,
    progress)`, `check(run, progress, batch)` runs before anything else reads the new state. After
    the last one, `is_due(..., last=True)`. snapshots: of an elastic job. compiling: returns a
    context for calls that may compile."""

    watch: Monitor = Monitor()
    callbacks: Callbacks = Callbacks()
    checks: Sequence[Any] = ()
    snapshots: Any = None
    compiling: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


@dataclasses.dataclass(frozen=True)
class Run:
    """The built objects of a run."""

    strategy: Strategy
    step: Step
    data: Data
    checkpoints: Checkpoints
    options: LoopOptions
    log: Log
    origin: Origin = Origin()
    hooks: Hooks = Hooks()

    def replace(self, **values: Any) -> "Run":
        """Return the run with other values of these fields, its own or of its records."""
        for section in ("data", "options", "log", "origin", "hooks"):
            record = getattr(self, section)
            if changed := {f.name for f in dataclasses.fields(record)} & values.keys():
                values[section] = dataclasses.replace(
                    record, **{name: values.pop(name) for name in changed}
                )
        return dataclasses.replace(self, **values)

    def evaluation_is_due(self, step: int) -> bool:
        return bool(self.data.eval) and is_due(step, self.options.eval_every)

    def checkpoint_is_due(self, step: int) -> bool:
        return is_due(step, self.options.save_every) or is_due(step, self.options.rollback_every)


@dataclasses.dataclass
class Progress:
    """The progress of a run: the state after update `step`, and the update's metrics on the device.

    evaluated: the last step that was evaluated; evaluation: its finite metrics. stopped: why a
    callback ended training."""

    step: int
    state: TrainState
    metrics: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    evaluated: int = -1
    evaluation: Record = dataclasses.field(default_factory=dict)
    stopped: str | None = None

    def last_batch(self) -> Record:
        """Return the loss of the last batch, which the final record of a run without evaluation
        data has.
        """
        if not self.metrics:
            return self.evaluation  # of the checkpoint or snapshot
        return {
            "loss": float(np.reshape(self.metrics["loss"], -1)[-1]),
            "loss_of": "the last batch",
        }


def is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
