"""The loop, read from top to bottom: restore, update, log, evaluate, save."""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxdp.checkpoint import Checkpoints
from jaxdp.data.cursor import Cursor
from jaxdp.data.prefetch import prefetch, read_batch
from jaxdp.digest import params_sha256
from jaxdp.metrics.meter import Meter
from jaxdp.metrics.writer import Record, Writer
from jaxdp.parallel.base import Program, Strategy
from jaxdp.profile import Profile
from jaxdp.step import Batch, Step, TrainState


@dataclasses.dataclass(frozen=True)
class Source:
    """A dataset and the order it is read in."""

    dataset: Any
    cursor: Cursor

    def batch(self, step: int, strategy: Strategy) -> Batch:
        """This process's share of batch `step`, on its devices."""
        return strategy.put(read_batch(self.dataset, self.cursor, step, strategy.local_slots))


@dataclasses.dataclass(frozen=True)
class Run:
    """The built objects that the loop uses. start: the update to go on after, 0 for a new run.

    begin: the state of a new run. evaluated: the evaluation that is due after update `start` was made before.
    averaged: what is evaluated is the running average of the parameters. meta: what is saved with every checkpoint.
    """

    strategy: Strategy
    step: Step
    train: Source
    eval: Source | None
    steps: int
    writer: Writer
    checkpoints: Checkpoints
    start: int = 0
    evaluated: bool = False
    log_every: int = 50
    eval_every: int | None = None
    save_every: int | None = None
    profile: Profile = Profile()
    averaged: bool = False
    begin: Callable[["Run"], TrainState] = lambda run: run.strategy.init()
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class SaveFailed(RuntimeError):
    """The state after the last update is not saved."""


def fit(run: Run) -> Record:
    """Trains to the last update, evaluates, saves; returns the final record.

    Raises SaveFailed where the last state could not be saved.
    """
    program = run.strategy.lower(run.step)
    state = restore(run, run.start) if run.start else run.begin(run)
    examples = run.train.cursor.size / run.train.cursor.steps_per_epoch
    metrics: dict[str, jax.Array] = {}
    with (
        Meter(run.writer, run.log_every, run.steps, examples) as meter,
        prefetch(lambda step: run.train.batch(step, run.strategy), run.start, run.steps) as batches,
    ):
        if run.start and run.start < run.steps and run.eval and _due(run.start, run.eval_every) and not run.evaluated:
            between(run, program, run.start, state)
        for step, batch in enumerate(batches, run.start + 1):
            run.profile.before(step)
            state, metrics = program.update(state, batch)
            run.profile.after(step, metrics)
            meter.update(step, metrics)
            if step < run.steps and (_due(step, run.eval_every) or _due(step, run.save_every)):
                meter.pause()
                between(run, program, step, state)
        meter.flush()
    return finish(run, program, state, metrics)


def between(run: Run, program: Program, step: int, state: TrainState) -> None:
    """What is due after update `step`: a checkpoint, and an evaluation, which runs while that is written."""
    if _due(step, run.save_every):
        save(run, step, state)
    if run.eval and _due(step, run.eval_every):
        found = judge(run, program, step, state)
        run.writer.write({"step": step, "split": "eval", **found})


def judge(run: Run, program: Program, step: int, state: TrainState) -> Record:
    """Evaluates the state, and keeps with its checkpoint what was found."""
    found = evaluate(run, program, state)
    if run.checkpoints.is_best(found):
        save(run, step, state)
    numbers = {name: value for name, value in found.items() if math.isfinite(value)}
    run.checkpoints.annotate(step, {"metrics": numbers, "evaluated": True})
    return found


def finish(run: Run, program: Program, state: TrainState, metrics: dict[str, jax.Array]) -> Record:
    """The last checkpoint, and the final record: the last evaluation (with nothing to evaluate on, the last update's
    loss), and the digest."""
    final: Record = {"step": run.steps, "split": "final"}
    if run.start < run.steps:  # else it is what was restored
        save(run, run.steps, state)
    if run.eval:
        final |= judge(run, program, run.steps, state)
    elif metrics:
        final["loss"] = float(metrics["loss"])
    if failure := run.checkpoints.wait():
        raise SaveFailed(f"checkpoint {failure.step} could not be saved: {failure.reason}; the run is not finished")
    final["params_sha256"] = params_sha256(run.strategy.export(state).params)
    run.writer.write(final)
    return final


def evaluate(run: Run, program: Program, state: TrainState) -> Record:
    """The loss and metrics over the evaluation set, every example exactly once."""
    assert run.eval is not None
    source, totals = run.eval, collections.defaultdict[str, float](float)
    state = run.strategy.averaged(state) if run.averaged else state
    ahead: collections.deque[Any] = collections.deque()
    with prefetch(lambda step: source.batch(step, run.strategy), 0, source.cursor.steps_per_epoch) as batches:
        for batch in batches:
            sums = program.evaluate(state, batch)
            ahead.append({"loss": sums.loss, "weight": sums.weight, **sums.metrics})
            if len(ahead) > 2:  # bounded: at most this many batches wait on the device
                _add(totals, ahead.popleft())
    for sums in ahead:
        _add(totals, sums)
    weight = totals.pop("weight") or 1.0
    return {name: value / weight for name, value in totals.items()}


def save(run: Run, step: int, state: TrainState) -> None:
    """Begins a checkpoint; it is durable when the writer says so."""
    run.checkpoints.save(step, run.strategy.export(state), run.meta, run.writer.say)


def restore(run: Run, step: int) -> TrainState:
    return run.strategy.adopt(run.checkpoints.restore(step, run.strategy.abstract()))


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _add(totals: dict[str, float], sums: dict[str, jax.Array]) -> None:
    for name, value in jax.device_get(sums).items():
        totals[name] += float(value)
