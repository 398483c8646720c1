"""The loop, read from top to bottom: restore, update, log, evaluate, save."""

import collections
import dataclasses
from collections.abc import Callable
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

    begin: the state of a new run. averaged: what is evaluated is the running average of the parameters.
    """

    strategy: Strategy
    step: Step
    train: Source
    eval: Source | None
    steps: int
    writer: Writer
    checkpoints: Checkpoints
    start: int = 0
    log_every: int = 50
    eval_every: int | None = None
    save_every: int | None = None
    profile: Profile = Profile()
    averaged: bool = False
    begin: Callable[["Run"], TrainState] = lambda run: run.strategy.init()


def fit(run: Run) -> Record:
    """Trains to the last update, evaluates, saves; returns the final record."""
    program = run.strategy.lower(run.step)
    state = restore(run, run.start) if run.start else run.begin(run)
    examples = run.train.cursor.size / run.train.cursor.steps_per_epoch
    metrics: dict[str, jax.Array] = {}
    with (
        Meter(run.writer, run.log_every, run.steps, examples) as meter,
        prefetch(lambda step: run.train.batch(step, run.strategy), run.start, run.steps) as batches,
    ):
        for step, batch in enumerate(batches, run.start + 1):
            run.profile.before(step)
            state, metrics = program.update(state, batch)
            run.profile.after(step, metrics)
            meter.update(step, metrics)
            if step < run.steps and _due(step, run.eval_every) and run.eval:
                meter.pause()
                run.writer.write({"step": step, "split": "eval", **evaluate(run, program, state)})
            if step < run.steps and _due(step, run.save_every):
                meter.pause()
                save(run, step, state)
        meter.flush()
    if run.start < run.steps:  # else it is what was restored
        save(run, run.steps, state)
    return finish(run, program, state, metrics)


def finish(run: Run, program: Program, state: TrainState, metrics: dict[str, jax.Array]) -> Record:
    """The final record: the last evaluation (with nothing to evaluate on, the last update's loss), and the digest."""
    final: Record = {"step": run.steps, "split": "final"}
    if run.eval:
        final |= evaluate(run, program, state)
    elif metrics:
        final["loss"] = float(metrics["loss"])
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
    run.checkpoints.save(step, run.strategy.export(state))
    run.writer.say(f"saved step {step}")


def restore(run: Run, step: int) -> TrainState:
    return run.strategy.adopt(run.checkpoints.restore(step, run.strategy.abstract()))


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _add(totals: dict[str, float], sums: dict[str, jax.Array]) -> None:
    for name, value in jax.device_get(sums).items():
        totals[name] += float(value)
