"""The caller of `fit`: it restores, rolls back after a spike, saves on preemption, and writes the
final record. And what a run continues from, besides its checkpoints."""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp.checkpoint.leaves import params_sha256
from jaxdp.errors import RunFailed, UsageError
from jaxdp.extras import Extra, load_extra
from jaxdp.metrics.meter import Meter
from jaxdp.metrics.writer import Record, Writer
from jaxdp.process.context import SLOW, Context
from jaxdp.process.monitor import Monitor, Stopped
from jaxdp.run import rundir
from jaxdp.run.build import Prepared, restore
from jaxdp.run.callbacks import Callbacks, Profile
from jaxdp.run.datasets import OVERFLOW, loss_of, not_finite
from jaxdp.train.evaluate import evaluate
from jaxdp.train.loop import EXAMINED, Halted, Lookback, NotFinite, fit
from jaxdp.train.observer import Observer, Observers
from jaxdp.train.run import Finish, Host, Progress, Run
from jaxdp.train.skip import DISAGREEING, NONFINITE
from jaxdp.train.state import Batch, TrainState


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


LONGEST = 86_400.0  # seconds that a callback of one rank may take at the end


@dataclasses.dataclass
class Training(Host):
    """A run from its start to its final record.

    progress: where it starts or resumes; with a state if it was recovered from memory. watch,
    profile, callbacks, continuation: observers. extras: of the config; each may have observers.
    layout: the content of layout.json before the first update; None: write no file. per_example: the
    entries of a record for one example per second (`throughput`).
    """

    run: Run
    progress: Progress
    callbacks: Callbacks = dataclasses.field(default_factory=Callbacks)
    continuation: Continuation = dataclasses.field(default_factory=Continuation)
    watch: Monitor = dataclasses.field(default_factory=Monitor)
    profile: Profile = dataclasses.field(default_factory=Profile)
    extras: Sequence[Extra] = ()
    layout: Mapping[str, Any] | None = None
    per_example: Mapping[str, float] = dataclasses.field(default_factory=dict)

    program: Any = dataclasses.field(init=False)
    # The programs that are compiled, each for a shape of the batch.
    called: set[Any] = dataclasses.field(init=False, default_factory=set)

    def begin(self) -> TrainState:
        """Return the state of a new run."""
        with self.compiling():
            return self.run.strategy.init()

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for calls that may compile."""
        return contextlib.nullcontext()

    def account(self) -> Record:
        """Return entries of the final record, about the full run."""
        return {}

    @functools.cached_property
    def observers(self) -> Observers:
        """Return the observers in their order: those of extras come after the callbacks, and before
        anything copies the state."""
        run = self.run
        self.lookback = Lookback(EXAMINED if run.data.train.check else 0)
        self.meter = Meter(
            run.log.writer,
            run.options.log_every,
            run.options.steps,
            self.per_example,
            self.watch.straggler,
            run.derive,
        )
        observers = [
            self.watch,
            self.meter,
            self.lookback,
            self.profile,
            *self.callbacks.observers,
            FirstUpdate(self),
        ]
        for extra in self.extras:
            observers += extra.observers(self)
        return Observers([*observers, self.continuation])

    def train(self) -> tuple[Record, TrainState]:
        """Return the final record and the state after the last update, as the strategy stores it.

        Raises:
            Stopped: the run is preempted; its state is saved.
            RunFailed: the last state cannot be saved, too many consecutive updates are not finite,
                all updates were skipped, or a callback failed.
        """
        run, progress = self.run, self.progress
        self.program = run.strategy.compile(run.step)
        if not progress.recovered:
            with self.watch.suspend_timeout("makes the state"):
                progress.state = restore(run, progress.step) if progress.step else self.begin()
        if self.callbacks.callbacks:
            self.callbacks.start(run)
        initial = self.callbacks.state()  # raises UsageError if no checkpoint could store it
        while True:
            try:
                if progress.stopped is None:
                    fit(run, self.program, progress, self.observers, self)
                    if progress.step < run.options.steps:
                        self.finish_early()
                    if end := progress.data_ended:
                        if not progress.step:
                            raise UsageError(
                                f"batch_size: the stream has no full batch ({end}); make it smaller"
                            )
                        run.log.writer.say(
                            f"{end}: training ends after update {progress.step} of {run.options.steps}"
                        )
                return self.finish(), progress.state
            except NotFinite as error:
                self.examine(error.update)
            except Finish:  # before a batch of the last evaluation
                self.finish_early()
            except (Halted, Stopped) as stop:
                if int(progress.state.guard.halted):  # else it is rolled back already
                    self.called.clear()
                    self.lookback.sent.clear()
                    roll_back(self, initial)
                if isinstance(stop, Stopped) and stop.kind == "preempt":
                    self.save_preempted(stop)
                    raise
                if isinstance(stop, Stopped) and stop.kind == "regroup":
                    self.continuation.keep_state()
                    raise

    def call(self, name: str, program: Callable[..., Any], *args: Any) -> Any:
        key = id(program), args[-1]["mask"].shape
        if key in self.called:
            return self.watch.run_step(name, program, *args)
        with self.compiling():
            result = self.watch.run_step(name, program, *args)
        self.called.add(key)
        return result

    def stop(self, kind: str) -> None:
        self.watch.request(kind, "a callback")

    def save(self) -> None:
        """Start a checkpoint; it is durable when the writer reports it. Raises Halted if training
        has halted.
        """
        run = self.run
        progress = self.progress
        began = time.perf_counter()
        with self.watch.suspend_timeout(f"saves step {progress.step}"):
            if int(progress.state.guard.halted):
                raise Halted
            state = run.strategy.export(progress.state)
            run.checkpoints.save(progress.step, state, self.metadata(), run.log.writer.say)
            if not run.options.asynchronous:
                run.checkpoints.wait()
        run.log.events.note("saving", progress.step, blocked=round(time.perf_counter() - began, 4))
        self.observers.saved(progress.step, run.checkpoints.directory / str(progress.step))

    def metadata(self) -> Record:
        """Return what is needed to resume, besides the state: skipped batches, callbacks, the
        evaluation of this step.

        That of a run without evaluation data is the loss of the last batch, for the final record.
        """
        run, progress = self.run, self.progress
        meta: Record = {
            "offset": progress.offset,
            "rollbacks": progress.rollbacks,
            "stopped": progress.stopped,
            **self.callbacks.state(),
        }
        if run.checkpoints.trusted is not None:
            meta["trusted"] = run.checkpoints.trusted
        if progress.evaluated == progress.step:
            meta |= {"metrics": progress.evaluation, "evaluated": True}
        elif progress.step == run.options.steps and not run.data.eval:
            meta["metrics"] = progress.last_batch()
        return meta

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint being written is durable. Raises RunFailed if it could not be
        saved.
        """
        run = self.run
        began = time.perf_counter()
        with self.watch.suspend_timeout("waits for the checkpoint"):
            failure = run.checkpoints.wait()
        run.log.events.note("settled", blocked=round(time.perf_counter() - began, 4))
        if failure:
            then = "resume from the last one" if run.checkpoints.steps() else "start again"
            raise RunFailed(f"{failure}; fix that and run the same command to {then}", rank=0)

    def save_preempted(self, stop: Stopped) -> None:
        """Save the latest state, so that the next job resumes from it."""
        run, step = self.run, self.progress.step
        self.save_last()
        self.wait_for_checkpoint()
        last = run.checkpoints.last
        state = f"saved step {last}" if last else "nothing to save yet"
        run.log.events.note("preempted", step, reason=str(stop), saved=last)
        run.log.writer.say(
            f"preempted by {stop}, after update {step}: {state}; run the same command to resume"
        )

    def evaluate(self) -> None:
        if self.run.data.eval:
            self.evaluate_and_record("eval")
        if self.progress.stopped is not None:
            raise Finish

    def examine(self, update: int) -> None:
        """Raise UsageError if the examples of an update explain its non-finite loss."""
        with self.watch.suspend_timeout(f"examines the batch of update {update}"):
            self.run.data.train.examine(
                update - 1 + self.progress.offset, f"the batch of update {update}"
            )

    def evaluate_and_record(self, split: str | None = None) -> Record:
        """Evaluate the state; return the metrics, and add them to this step's checkpoint.

        split: the split under which to log the metrics; None: they are those of the final record.
        Raises RunFailed, after saving the state, if a loss is not finite because of the examples.
        """
        run = self.run
        log = run.log
        progress = self.progress
        step = progress.step
        began = time.perf_counter()
        metrics = evaluate(run, self.program, progress.state, self)
        log.events.note("evaluation", step, seconds=round(time.perf_counter() - began, 4))
        if split is not None:
            log.writer.write({"step": step, "split": split, **metrics})
        if not all(map(math.isfinite, metrics.values())):
            with self.watch.suspend_timeout("examines the evaluation data"):
                problem = not_finite(run, metrics)
            if problem is not None:
                text = f"evaluation after update {step}: {problem[0]}"
                if problem[1]:
                    self.save()  # without this evaluation, which the next start repeats
                    self.wait_for_checkpoint()
                    text += f"; step {step} is saved: run the same command to resume"
                    raise RunFailed(text, rank=0)
                log.writer.say(f"warning: {text}")
        best = run.checkpoints.best
        rated = {k: value for k, value in metrics.items() if math.isfinite(value)}
        before = progress.evaluation or {best}
        if best is not None and best not in rated and best in before:  # said once
            value = metrics.get(best, "missing")
            log.writer.say(
                f"checkpoint.best: {best} is {value} after update {step}, which is never the best"
            )
        progress.evaluated = step
        progress.evaluation = rated

        self.observers.evaluated(step, metrics)
        if split or "evaluate" in run.due(step):
            self.finish_early()
        if best is not None and run.checkpoints.is_best(metrics):
            log.writer.say(f"best {best} so far: {metrics[best]:.4g}, after update {step}")
            self.save()
        facts = run.checkpoints.facts
        more = {
            **self.metadata(),
            "evaluated_with": {k: facts.get("config", {}).get(k) for k in ("eval", "callbacks")},
            "eval_contents": facts.get("eval_contents"),
        }
        run.checkpoints.annotate(step, more)
        return metrics

    def finish_early(self) -> None:
        """Set why a callback ends training, the same on all ranks, and report it, if one does."""
        run, step = self.run, self.progress.step
        if not self.callbacks.callbacks:
            return
        own = "".join(self.callbacks.reasons[:1])
        self.callbacks.reasons.clear()
        # Another rank may have more to do.
        reasons = run.checkpoints.context.exchange(f"stop at {step}", own, SLOW)
        reason = next(filter(None, reasons), None)
        if reason is None:  # or an evaluation after the same update has set it
            return
        self.progress.stopped = reason
        if step < run.options.steps:
            run.log.writer.say(
                f"training ends after update {step} of {run.options.steps}: {reason}"
            )
            run.log.events.note("stopped_early", step, reason=reason)

    def finish(self) -> Record:
        """Save and evaluate; return the final record: the evaluation (or the last batch's loss) and
        the digest.
        """
        run, progress = self.run, self.progress
        final: Record = {"step": progress.step, "split": "final"}
        self.save_last()
        if not run.data.eval:
            final |= progress.last_batch()
        elif progress.evaluated == progress.step:
            final |= progress.evaluation
        else:
            final |= self.evaluate_and_record()
        self.wait_for_checkpoint()
        # With a loss scale, in float16, a few are normal.
        skipped = int(progress.state.guard.skipped)
        if skipped and not progress.state.loss_scale:
            text = (
                f"skipped updates: {skipped} of {progress.step}: their gradients were not finite, their examples all "
                "masked, or their loss a spike; --nonfinite.max_consecutive 1 ends a run at the first that is not "
                "finite, and names its examples"
            )
            if skipped == progress.step:
                raise RunFailed(text, rank=0)
            run.log.writer.say(f"warning: {text}")
        if progress.stopped is not None:
            final["stopped"] = progress.stopped
        if wrong := [
            name
            for name in map(loss_of, run.data.eval)
            if not math.isfinite(final.get(name, math.nan))
        ]:
            ended = f" (training ended there: {progress.stopped})" if progress.stopped else ""
            raise RunFailed(
                f"the last evaluation, after update {progress.step}, has no finite {' and '.join(wrong)}{ended}; the "
                "state is saved",
                rank=0,
            )
        with self.watch.suspend_timeout("makes the digest"):
            final["params_sha256"] = params_sha256(run.strategy.export(progress.state).params)
        final |= self.account()
        run.log.writer.write(final)
        run.log.events.note("finished", progress.step)
        self.observers.finished(final)
        if not self.continuation.survives:
            # A rank whose callback fails ends all, or else itself alone.
            run.checkpoints.context.barrier("end", LONGEST)
        return final

    def save_last(self) -> None:
        """Save the state at the end of a run, unless it is still the one that was restored from a
        checkpoint.
        """
        if self.progress.step > self.progress.start or self.progress.recovered:
            self.save()


@dataclasses.dataclass
class FirstUpdate(Observer):
    """Record the first update while the device is busy with it: the event, the memory it takes, and
    whether the callbacks' states can be saved.
    """

    training: Training

    def before(self, updates: range, batch: Batch) -> None:
        self.batch = None if self.training.progress.metrics else batch

    def after(self, updates: range, state: TrainState, metrics: Mapping[str, Any]) -> None:
        if self.batch is None:
            return
        training = self.training
        training.callbacks.state()
        run = training.run
        run.log.events.note("first_update", updates[-1])
        if training.layout and (prediction := load_extra("plan.prediction")):
            prediction.record(
                run.log.directory,
                training.layout,
                run.strategy,
                training.program,
                state,
                self.batch,
                len(updates),
            )


def roll_back(training: Training, initial: Record) -> None:
    """Restore an earlier state; set the progress to continue with the data after the spike.

    initial: the state of the callbacks before the first update.
    Raises RunFailed if the run halted for another cause than a spike, or after `max_rollbacks`.
    """
    run = training.run
    checkpoints = run.checkpoints
    progress = training.progress
    training.callbacks.reasons.clear()  # of updates that are made again
    training.profile.stop()
    training.profile.first = None
    training.profile.ends = ()
    guard = jax.device_get(progress.state.guard)
    first = int(guard.since)
    last = int(guard.halted_at)
    with training.watch.suspend_timeout("waits for the checkpoint"):
        checkpoints.wait()
    halted = last if int(guard.halted) == NONFINITE else first
    for step in checkpoints.steps():
        if step >= halted and checkpoints.writes:  # saved before all replicas knew of it
            checkpoints.set_aside(
                step,
                "halted",
                f"checkpoint {step} has a replica that halted at update {halted}",
                run.log.writer.say,
            )
    if int(guard.halted) == DISAGREEING:
        raise RunFailed(
            f"update {last}: integers of the model state differ between microbatches; a counter must not depend on "
            "the examples (keep such state as a float, or under 'carry')",
            rank=0,
        )
    file = write_batches(run, first, last, progress.offset)
    if int(guard.halted) == NONFINITE:
        last_saved = max(checkpoints.steps(), default=0)
        checkpoint = (
            f"checkpoint {last_saved} is the last" if last_saved else "there is no checkpoint"
        )
        cause = run.data.train.find_not_finite([first - 1 + progress.offset]) or OVERFLOW
        raise RunFailed(
            f"updates {first} to {last} were not finite, {int(guard.in_a_row)} in a row (nonfinite.max_consecutive); "
            f"none of them was applied, {checkpoint}; in the batch of update {first}: {cause}; the indices of all "
            f"their examples are in {file}",
            rank=0,
        )
    if progress.rollbacks >= run.options.max_rollbacks:
        raise RunFailed(
            f"the loss of update {last} is a spike, and the run was rolled back {progress.rollbacks} times already "
            f"(spike.max_rollbacks); the indices of its examples are in {file}",
            rank=0,
        )
    with training.watch.suspend_timeout("restores"):
        step = state_to_return_to(run, halted)
        state = restore(run, step) if step else training.begin()
        meta = checkpoints.context.of_root(
            "meta", lambda: checkpoints.meta(step) if step else initial
        )
        training.callbacks.load(meta)
    run.log.writer.rewind(step)
    run.log.events.note("rolled_back", last, to=step, reason="a spike of the loss")
    run.log.writer.say(
        f"the loss of update {last} is a spike: back to step {step}, continuing with the data after it"
    )
    progress.return_to(step, state, skipped=last - step)


def state_to_return_to(run: Run, halted: int) -> int:
    """Return the step of the state to return to, 0 for the start; remove the checkpoints after it.

    Checkpoints that are no multiple of `rollback_every` do not count: with others, what else is
    saved would decide the numbers. Raises RunFailed if there is none, though one was due before
    update `halted`."""
    checkpoints = run.checkpoints
    every = run.options.rollback_every
    steps = checkpoints.steps()
    step = checkpoints.latest(
        run.log.writer.say, refused=[step for step in steps if every and step % every]
    )
    due = (halted - 1) // every * every if every else step
    if due and not step:
        raise RunFailed(
            f"the loss of update {halted} is a spike, and the checkpoint of update {due} to return to is not in "
            f"{str(checkpoints.directory)!r} (spike.every: {every}); set spike.action to skip, with resume.force",
            rank=0,
        )
    if step < due:
        run.log.writer.say(
            f"warning: no checkpoint of update {due} (spike.every): going back further changes the numbers"
        )
    checkpoints.remove([other for other in steps if other > step])
    return step


def write_batches(run: Run, first: int, last: int, offset: int) -> pathlib.Path:
    """Write halted.json: the indices of the examples of updates `first` to `last`, whose data comes
    after `offset` skipped batches.
    """
    file = run.log.directory / "halted.json"
    order = run.data.train.order
    batches = {
        update: np.sort(order.batch(update - 1 + offset)).tolist()
        for update in range(first, last + 1)
    }
    if run.checkpoints.context.is_root:
        with contextlib.suppress(OSError), rundir.replaced(file) as new:
            new.write_text(json.dumps({"updates": batches}) + "\n", encoding="utf-8")
    return file
