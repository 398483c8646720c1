"""The loop, read from top to bottom: restore, update, log, evaluate, save."""

import collections
import contextlib
import dataclasses
import gc
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from jaxdp.checkpoint import Checkpoints
from jaxdp.data.cursor import Order
from jaxdp.data.resident import Resident
from jaxdp.data.workers import Steps, prefetch_in_workers
from jaxdp.digest import params_sha256
from jaxdp.errors import RunFailed
from jaxdp.guard import NONFINITE
from jaxdp.metrics.events import NoEvents
from jaxdp.metrics.meter import Meter
from jaxdp.metrics.writer import Record, Writer
from jaxdp.parallel.base import Program, Strategy
from jaxdp.profile import Profile
from jaxdp.step import Batch, Step, TrainState
from jaxdp.watch import Nobody, Stopped, Watch


@dataclasses.dataclass(frozen=True)
class Source:
    """A dataset and the order it is read in, by a thread, or by so many processes; or from the devices' own memory."""

    dataset: Any
    cursor: Order
    workers: int = 0
    resident: Resident | None = None

    def batches(
        self, start: int, stop: int, strategy: Strategy, groups: Iterable[Steps] | None = None
    ) -> AbstractContextManager[Iterator[tuple[Steps, Batch]]]:
        """This process's share of batches `start` to `stop - 1`, on its devices, read ahead: (step, batch).

        groups: these steps, in order, each by itself or several as a range; those are (range, batches[step, ...]).
        """
        if self.resident is not None:
            return self.resident.batches(self.cursor, range(start, stop) if groups is None else groups)

        def then(steps: Steps, batch: Any) -> tuple[Steps, Batch]:
            return steps, strategy.put(batch, isinstance(steps, range))

        return prefetch_in_workers(
            self.dataset, self.cursor, strategy.local_slots, start, stop, self.workers, then=then, groups=groups
        )


@dataclasses.dataclass(frozen=True)
class Run:
    """The built objects that the loop uses. start: the update to go on after, 0 for a new run.

    steps_per_call: updates in one compiled call, where nothing is due between them.
    begin: the state of a new run. evaluated: the evaluation that is due after update `start` was made before. offset:
    batches that were left out because of spikes, in `rollbacks` of at most `max_rollbacks`. averaged: what is evaluated
    is the running average of the parameters. derive: of the means of a record, what else it says; speed: of the
    milliseconds of an update; account: at the end, of the whole run. asynchronous:
    training goes on while a checkpoint is written. meta: what is saved with every checkpoint. directory: of the run.
    events: where what happens is noted. facts: what its programs depend on, None where that is not known.
    prepared(program) is what is called; after_first(program, state, batch, several) sees what the first call takes;
    certain() comes before anything is saved, and raises RunFailed where that would be wrong.
    """

    strategy: Strategy
    step: Step
    train: Source
    eval: Source | None
    steps: int
    writer: Writer
    checkpoints: Checkpoints
    watch: Watch = Nobody()
    steps_per_call: int = 1
    start: int = 0
    offset: int = 0
    rollbacks: int = 0
    max_rollbacks: int = 3
    evaluated: bool = False
    log_every: int = 50
    eval_every: int | None = None
    save_every: int | None = None
    asynchronous: bool = True
    profile: Profile = dataclasses.field(default_factory=Profile)
    averaged: bool = False
    derive: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda means: {}
    speed: Callable[[float], Record] = lambda milliseconds: {}
    account: Callable[[], Record] = dict
    begin: Callable[["Run"], TrainState] = lambda run: run.strategy.init()
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    directory: pathlib.Path = pathlib.Path()
    events: NoEvents = NoEvents()
    facts: str | None = None
    prepared: Callable[[Program], Program] = lambda program: program
    after_first: Callable[[Program, TrainState, Any, bool], None] = lambda *called: None
    certain: Callable[[], None] = lambda: None


@dataclasses.dataclass
class Position:
    """How far a run has come: the state after update `step`, whose metrics are on the device.

    judged: the step that was last evaluated; found: what came out, as far as it is finite.
    """

    step: int
    state: TrainState
    metrics: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    judged: int = -1
    found: Record = dataclasses.field(default_factory=dict)


def fit(run: Run) -> Record:
    """Trains to the last update, evaluates, saves; returns the final record. Raises what `complete` raises."""
    return complete(run)[0]


def complete(run: Run) -> tuple[Record, TrainState]:
    """As `fit`; and the state after the last update, as the strategy has it.

    Raises Stopped where the run is preempted, with its state saved, and RunFailed where it cannot go on: the last state
    cannot be saved, or too many updates in a row are not finite.
    """
    program = run.prepared(run.strategy.lower(run.step))
    with run.watch.patience("makes the state"):
        state = restore(run, run.start) if run.start else run.begin(run)
    at = Position(run.start, state, judged=run.start if run.evaluated else -1)
    try:
        while True:
            try:
                advance(run, program, at)
                return finish(run, program, at), at.state
            except Stopped as stop:
                if int(at.state.guard.halted):  # else it was said of updates that are rolled back already
                    run, at = roll_back(run, at)
                if stop.kind == "preempt":
                    hand_over(run, at, stop)
                    raise
    finally:
        gc.unfreeze()


def advance(run: Run, program: Program, at: Position) -> None:
    """Every update that is left, and what is due between them."""
    examples = run.train.cursor.examples_per_step
    more = lambda milliseconds: {**run.speed(milliseconds), **run.watch.straggler(milliseconds)}
    with (
        Meter(run.writer, run.log_every, run.steps, examples, more, run.derive) as meter,
        run.train.batches(at.step + run.offset, run.steps + run.offset, run.strategy, calls(run, at.step)) as batches,
    ):
        if run.eval and 0 < at.step < run.steps and _due(at.step, run.eval_every) and at.judged != at.step:
            between(run, program, at)
        for updates, batch in run.watch.reading(meter.reading(_numbered(batches, run.offset)), at.step):
            step, several, first = updates[-1], len(updates) > 1, not at.metrics
            run.profile.before(updates[0])
            name = f"updates {updates[0]} to {step}" if several else f"update {step}"
            call: Any = program.updates if several else program.update
            at.state, at.metrics = run.watch.together(name, call, at.state, batch)
            at.step = step
            run.watch.sent(at.metrics)
            run.profile.after(step, at.metrics)
            meter.update(updates, at.metrics)
            if first:  # while the device is at work
                run.events.note("first_update", step)
                run.after_first(program, at.state, batch, several)
                gc.freeze()  # what a start has made stays: to look through it again stops a rank for 0.1 s
            asked = run.watch.save_is_asked()
            if step < run.steps and (asked or _due(step, run.eval_every) or _due(step, run.save_every)):
                meter.pause()
                between(run, program, at, asked)
        meter.flush()


def calls(run: Run, start: int) -> Iterator[Steps]:
    """The batches of each call of a program after update `start`: `steps_per_call` of them, as a range, or one.

    What is due between two updates is due between two calls; so many programs are compiled, and no more.
    """
    ends = [every for every in (run.eval_every if run.eval else None, run.save_every) if every]
    window = [] if run.profile.start is None else [run.profile.start, run.profile.start + run.profile.steps]
    while start < run.steps:
        limit = min([run.steps, *((start // every + 1) * every for every in ends), *(w for w in window if w > start)])
        first = start + run.offset
        if run.steps_per_call > 1 and start + run.steps_per_call <= limit:
            yield range(first, first + run.steps_per_call)
            start += run.steps_per_call
        else:
            yield first
            start += 1


def _numbered(batches: Iterable[tuple[Steps, Batch]], offset: int) -> Iterator[tuple[range, Batch]]:
    """(numbers of the updates, what they are made with); batches count from 0, and some may have been left out."""
    for steps, batch in batches:
        first, count = (steps.start, len(steps)) if isinstance(steps, range) else (steps, 1)
        yield range(first + 1 - offset, first + 1 - offset + count), batch


def between(run: Run, program: Program, at: Position, asked: bool = False) -> None:
    """What is due between two updates: a checkpoint, and an evaluation, which runs while that is written."""
    if asked or _due(at.step, run.save_every):
        save(run, at)
    if run.eval and _due(at.step, run.eval_every):
        judge(run, program, at, "eval")


def judge(run: Run, program: Program, at: Position, split: str | None = None) -> Record:
    """Evaluates the state, writes it as a record of `split`, and keeps with the checkpoint what was found."""
    began = time.perf_counter()
    found = evaluate(run, program, at.state)
    run.events.note("evaluation", at.step, seconds=round(time.perf_counter() - began, 4))
    if split is not None:
        run.writer.write({"step": at.step, "split": split, **found})
    at.judged, at.found = at.step, {name: value for name, value in found.items() if math.isfinite(value)}
    if run.checkpoints.is_best(found):
        save(run, at)
    run.checkpoints.annotate(at.step, {"metrics": at.found, "evaluated": True})
    return found


def finish(run: Run, program: Program, at: Position) -> Record:
    """The last checkpoint, and the final record: the last evaluation (with nothing to evaluate on, the last update's
    loss), and the digest."""
    final: Record = {"step": run.steps, "split": "final"}
    if run.start < run.steps:  # else it is what was restored
        save(run, at)
    if run.eval:
        final |= judge(run, program, at)
    elif at.metrics:
        final["loss"] = float(np.reshape(at.metrics["loss"], -1)[-1])
    settle(run)
    with run.watch.patience("makes the digest"):
        final["params_sha256"] = params_sha256(run.strategy.export(at.state).params)
    final |= run.account()
    run.writer.write(final)
    run.events.note("finished", run.steps)
    return final


def hand_over(run: Run, at: Position, stop: Stopped) -> None:
    """Preempted: saves what there is, for the next job to go on from."""
    if at.step > run.start:
        save(run, at)
    settle(run)
    kept = run.checkpoints.last
    state = f"saved step {kept}" if kept else "nothing to save yet"
    run.events.note("preempted", at.step, reason=str(stop), saved=kept)
    run.writer.say(f"preempted by {stop}, after update {at.step}: {state}; the same command goes on from there")


def roll_back(run: Run, at: Position) -> tuple[Run, Position]:
    """Halted by the guard: goes on from the last checkpoint with the data after the spike.

    Raises RunFailed where it was no spike, but updates that are not finite, or one spike too many.
    """
    run.profile.stop()
    run.profile.start = None
    guard = jax.device_get(at.state.guard)
    first, last = int(guard.since), int(guard.halted_at)
    with run.watch.patience("waits for the checkpoint"):
        run.checkpoints.wait()
    file = write_batches(run, first, last)
    if int(guard.halted) == NONFINITE:
        kept = max(run.checkpoints.steps(), default=0)
        raise RunFailed(
            f"updates {first} to {last} were not finite, {int(guard.in_a_row)} in a row (nonfinite.max_consecutive); "
            f"none of them was made, {f'checkpoint {kept}' if kept else 'no checkpoint'} is the last; the indices of "
            f"their examples are in {file}",
            rank=0,
        )
    if run.rollbacks >= run.max_rollbacks:
        raise RunFailed(
            f"the loss of update {last} is a spike, and the run was rolled back {run.rollbacks} times already "
            f"(spike.max_rollbacks); the indices of its examples are in {file}",
            rank=0,
        )
    with run.watch.patience("restores"):
        step = run.checkpoints.latest(run.writer.say)
        state = restore(run, step) if step else run.begin(run)
    run.writer.rewind(step)
    run.events.note("rolled_back", last, to=step, reason="a spike of the loss")
    run.writer.say(f"the loss of update {last} is a spike: back to step {step}, on with the data after it")
    offset = run.offset + last - step
    run = dataclasses.replace(run, start=step, offset=offset, rollbacks=run.rollbacks + 1)
    return run, Position(step, state, judged=step)


def write_batches(run: Run, first: int, last: int) -> pathlib.Path:
    """halted.json: the indices of the examples of updates `first` to `last`."""
    file = run.directory / "halted.json"
    cursor = run.train.cursor
    slots = np.arange(cursor.microbatches)
    batches = {}
    for update in range(first, last + 1):
        indices, rows = cursor.rows(update - 1 + run.offset, slots)
        batches[update] = np.sort(indices[rows]).tolist()
    if run.checkpoints.context.is_root:
        with contextlib.suppress(OSError):
            file.write_text(json.dumps({"updates": batches}) + "\n")
    return file


def evaluate(run: Run, program: Program, state: TrainState) -> Record:
    """The loss and metrics over the evaluation set, every example exactly once."""
    assert run.eval is not None
    source, totals = run.eval, collections.defaultdict[str, float](float)
    state = run.strategy.averaged(state) if run.averaged else state
    ahead: collections.deque[Any] = collections.deque()
    with source.batches(0, source.cursor.steps_per_epoch, run.strategy) as batches:
        for number, batch in batches:
            sums = run.watch.together(f"evaluation, batch {number}", program.evaluate, state, batch)
            if sums.carry is not None:
                state = state.replace(carry=sums.carry)
            ahead.append({"loss": sums.loss, "weight": sums.weight, **sums.metrics})
            if len(ahead) > 2:  # bounded: at most this many batches wait on the device
                _add(totals, ahead.popleft())
    for sums in ahead:
        _add(totals, sums)
    weight = totals.pop("weight") or 1.0
    means = {name: value / weight for name, value in totals.items()}
    return means | dict(run.derive(means))


def save(run: Run, at: Position) -> None:
    """Begins a checkpoint; it is durable when the writer says so. Raises Stopped where the guard has halted: a state
    that stands still is none to keep."""
    began = time.perf_counter()
    with run.watch.patience(f"saves step {at.step}"):
        run.certain()
        if int(at.state.guard.halted):
            raise Stopped("halt", "", run.checkpoints.context.rank)
        more: Record = {"offset": run.offset, "rollbacks": run.rollbacks}
        if at.judged == at.step:
            more |= {"metrics": at.found, "evaluated": True}
        run.checkpoints.save(at.step, run.strategy.export(at.state), {**run.meta, **more}, run.writer.say)
        if not run.asynchronous:
            run.checkpoints.wait()
    run.events.note("saving", at.step, blocked=round(time.perf_counter() - began, 4))


def settle(run: Run) -> None:
    """Waits until what is being saved is durable. Raises RunFailed where it could not be saved."""
    began = time.perf_counter()
    with run.watch.patience("waits for the checkpoint"):
        failure = run.checkpoints.wait()
    run.events.note("settled", blocked=round(time.perf_counter() - began, 4))
    if failure:
        raise RunFailed(
            f"checkpoint {failure.step} could not be saved: {failure.reason}; mend that, and run the same command: it "
            "goes on from the last one",
            rank=0,
        )


def restore(run: Run, step: int) -> TrainState:
    return run.strategy.adopt(run.checkpoints.restore(step, run.strategy.abstract()))


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _add(totals: dict[str, float], sums: dict[str, jax.Array]) -> None:
    for name, value in jax.device_get(sums).items():
        totals[name] += float(value)
