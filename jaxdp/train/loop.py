"""The loop, read from top to bottom: restore, update, log, evaluate, save."""

import contextlib
import functools
import math
import time
from collections.abc import Iterator
from typing import Any

from jaxdp.checkpoint.digest import params_sha256
from jaxdp.data.stream import StreamEnded
from jaxdp.errors import RunFailed, UsageError
from jaxdp.metrics.meter import Meter
from jaxdp.metrics.writer import Record
from jaxdp.parallel.strategy import Program
from jaxdp.plan import memory
from jaxdp.process.monitor import Stopped
from jaxdp.run.rollback import roll_back
from jaxdp.run.save import (
    metadata,
    restore,
    save,
    save_last,
    save_preempted,
    stop_if_halted,
    wait_for_checkpoint,
)
from jaxdp.run.source import until_the_end
from jaxdp.train.evaluate import evaluate, not_finite
from jaxdp.train.lookback import BEHIND, EXAMINED, Lookback, NotFinite
from jaxdp.train.run import Progress, Run
from jaxdp.train.state import TrainState

LONGEST = 86_400.0  # seconds that a callback of one rank may take at the end


def fit(run: Run) -> tuple[Record, TrainState]:
    """Train; return the final record and the state after the last update, as the strategy stores
    it.

    Raises:
        Stopped: the run is preempted; its state is saved.
        RunFailed: the last state cannot be saved, too many consecutive updates are not finite, or a
            callback failed.
    """
    program = run.strategy.compile(run.step)
    watch, origin = run.hooks.watch, run.origin
    with watch.suspend_timeout("makes the state"):
        state = origin.recovered or (
            restore(run, origin.start) if origin.start else origin.begin(run)
        )
    progress = origin.progress(state)
    lookback = Lookback(EXAMINED if run.data.train.check else 0)
    run.hooks.callbacks.call("on_start", run)
    initial = (
        run.hooks.callbacks.state()
    )  # raises UsageError for a state that no checkpoint could store
    while True:
        try:
            if progress.stopped is None:
                advance(run, program, progress, lookback)
            return finish(run, program, progress), progress.state
        except NotFinite as error:
            name = f"the batch of update {error.update}"
            with watch.suspend_timeout(f"examines {name}"):
                run.data.train.examine(
                    error.update - 1 + run.origin.offset, name, run.checkpoints.context
                )
        except Stopped as stop:
            if int(progress.state.guard.halted):  # else the halted updates are rolled back already
                run, progress = roll_back(run, progress, initial)
                lookback.sent.clear()
            if stop.kind == "preempt":
                save_preempted(run, progress, stop)
                raise
            if stop.kind == "regroup":
                run.hooks.snapshots.take_now(run, progress)
                raise


def advance(run: Run, program: Program, progress: Progress, lookback: Lookback) -> None:
    """Run the remaining updates, with checkpoints and evaluations, until `progress.stopped`.

    Raises the errors of `lookback`.
    """
    log, watch, train, offset = run.log, run.hooks.watch, run.data.train, run.origin.offset
    start, steps = progress.step, run.options.steps

    def more(milliseconds):
        return {**log.speed(milliseconds), **watch.straggler(milliseconds)}

    with (
        Meter(
            log.writer,
            run.options.log_every,
            steps,
            train.order.examples_per_step,
            more,
            log.derive,
        ) as meter,
        train.batches(start + offset, steps + offset, run.strategy, calls(run, start)) as batches,
    ):
        resumes = 0 < start < steps and run.evaluation_is_due(start) and progress.evaluated != start
        if resumes and between(run, program, progress):
            return
        every = until_the_end(
            batches, run.checkpoints.context, functools.partial(stream_ended, run, progress)
        )
        numbered = (
            (range(of.start + 1 - offset, of.stop + 1 - offset), batch) for of, batch in every
        )
        for updates, batch in watch.reading(meter.reading(numbered), start):
            lookback.look(progress.step - BEHIND)
            step, several, first = updates[-1], len(updates) > 1, not progress.metrics
            log.profile.before(updates[0])
            name = f"updates {updates[0]} to {step}" if several else f"update {step}"
            call: Any = program.updates if several else program.update
            with run.hooks.compiling() if first else contextlib.nullcontext():
                progress.state, progress.metrics = watch.run_step(name, call, progress.state, batch)
            progress.step = step
            watch.sent(progress.metrics)
            lookback.add(updates, progress.metrics)
            log.profile.after(step, progress.metrics)
            meter.update(updates, progress.metrics)
            run.hooks.callbacks.on_update(updates, progress.metrics)
            if first:  # while the device is busy
                run.hooks.callbacks.state()
                log.events.note("first_update", step)
                if log.layout is not None:
                    memory.record(
                        log.directory,
                        log.layout,
                        run.strategy,
                        program,
                        progress.state,
                        batch,
                        len(updates),
                    )
            for check in run.hooks.checks:
                if check.is_due(run, progress):
                    meter.pause()
                    check.check(run, progress, batch)
            if run.hooks.snapshots is not None:
                run.hooks.snapshots.take(run, progress)
            save_requested = watch.is_asked("save")
            if step < steps and (
                save_requested or run.evaluation_is_due(step) or run.checkpoint_is_due(step)
            ):
                meter.pause()
                if between(run, program, progress, save_requested):
                    break
        for check in run.hooks.checks if progress.step > start else ():
            if check.is_due(run, progress, last=True):
                meter.pause()
                check.check(run, progress, batch)
        lookback.look(progress.step)
        meter.flush()


def stream_ended(run: Run, progress: Progress, end: StreamEnded) -> None:
    """Report that there is no batch for the next update. Raises UsageError if there was none at
    all.
    """
    if not progress.step:
        raise UsageError(
            f"batch_size: the stream has no full batch ({end}); make it smaller"
        ) from None
    run.log.writer.say(f"{end}: training ends after update {progress.step} of {run.options.steps}")


def calls(run: Run, start: int) -> Iterator[range]:
    """Yield the batches of each program call after update `start`: `steps_per_call` of them, or a
    single one.

    Checkpoints and evaluations fall between two calls, so that only these two programs are
    compiled."""
    options, profile = run.options, run.log.profile
    intervals = (
        options.eval_every if run.data.eval else None,
        options.save_every,
        options.rollback_every,
    )
    ends = [every for every in intervals if every]
    window = [] if profile.start is None else [profile.start, profile.start + profile.steps]
    while start < options.steps:
        limit = min(
            [
                options.steps,
                *((start // n + 1) * n for n in ends),
                *(w for w in window if w > start),
            ]
        )
        first, count = start + run.origin.offset, options.steps_per_call
        count = count if start + count <= limit else 1
        yield range(first, first + count)
        start += count


def between(
    run: Run, program: Program, progress: Progress, save_requested: bool = False
) -> str | None:
    """Save and evaluate between two updates, if due; the evaluation runs while the checkpoint is
    written.

    Returns why a callback ends training here, or None.
    """
    stop_if_halted(run, progress)
    if save_requested or run.checkpoint_is_due(progress.step):
        save(run, progress)
    if run.evaluation_is_due(progress.step):
        evaluate_and_record(run, program, progress, "eval")
    return progress.stopped


def evaluate_and_record(
    run: Run, program: Program, progress: Progress, split: str | None = None
) -> Record:
    """Evaluate the state; return the metrics, and add them to this step's checkpoint.

    split: the split under which to log the metrics; None: they are those of the final record.
    Raises RunFailed, after saving the state, if a loss is not finite because of the examples.
    """
    began = time.perf_counter()
    metrics = evaluate(run, program, progress.state)
    run.log.events.note("evaluation", progress.step, seconds=round(time.perf_counter() - began, 4))
    if split is not None:
        run.log.writer.write({"step": progress.step, "split": split, **metrics})
    say, best = run.log.writer.say, run.checkpoints.best
    if (problem := not_finite(run, metrics)) is not None:
        text = f"evaluation after update {progress.step}: {problem[0]}"
        if problem[1]:
            save(run, progress)  # without this evaluation, which the next start repeats
            wait_for_checkpoint(run)
            raise RunFailed(
                f"{text}; step {progress.step} is saved: run the same command to resume", rank=0
            )
        say(f"warning: {text}")
    if best is not None and not math.isfinite(value := metrics.get(best, math.nan)):
        say(
            f"checkpoint.best: {best} is {value} after update {progress.step}, which is never the best"
        )
    progress.evaluated = progress.step
    progress.evaluation = {name: value for name, value in metrics.items() if math.isfinite(value)}
    stopped = run.hooks.callbacks.on_eval(progress.step, metrics)
    progress.stopped = stopped if run.evaluation_is_due(progress.step) else None
    if progress.stopped is not None and progress.step < run.options.steps:
        say(
            f"training ends after update {progress.step} of {run.options.steps}: {progress.stopped}"
        )
        run.log.events.note("stopped_early", progress.step, reason=progress.stopped)
    if run.checkpoints.is_best(metrics):
        save(run, progress)
    facts = run.checkpoints.facts
    evaluated_with = {name: facts.get("config", {}).get(name) for name in ("eval", "callbacks")}
    more = {"evaluated_with": evaluated_with, "eval_contents": facts.get("eval_contents")}
    run.checkpoints.annotate(progress.step, {**metadata(run, progress), **more})
    return metrics


def finish(run: Run, program: Program, progress: Progress) -> Record:
    """Save and evaluate; return the final record: the evaluation (or the last batch's loss) and the
    digest.
    """
    final: Record = {"step": progress.step, "split": "final"}
    save_last(run, progress)
    if lost := progress.step % run.options.outer_every:
        run.log.writer.say(
            f"the last {lost} updates came after the last outer step, and changed no parameters"
        )
    if run.data.eval and progress.evaluated != progress.step:
        final |= evaluate_and_record(run, program, progress)
    elif run.data.eval:
        final |= progress.evaluation | (
            {} if progress.stopped is None else {"stopped": progress.stopped}
        )
    else:
        final |= progress.last_batch()
    wait_for_checkpoint(run)
    losses = [f"{name}/loss" if name else "loss" for name in run.data.eval]
    if wrong := [name for name in losses if not math.isfinite(final.get(name, math.nan))]:
        ended = f" (training ended there: {progress.stopped})" if progress.stopped else ""
        text = f"the last evaluation, after update {progress.step}, has no finite {' and '.join(wrong)}{ended}"
        raise RunFailed(f"{text}; the state is saved", rank=0)
    with run.hooks.watch.suspend_timeout("makes the digest"):
        final["params_sha256"] = params_sha256(run.strategy.export(progress.state).params)
    final |= run.log.account()
    run.log.writer.write(final)
    run.log.events.note("finished", progress.step)
    run.hooks.callbacks.call("on_end", final)
    if (
        run.hooks.snapshots is None
    ):  # a rank whose callback fails ends all; in an elastic job, it ends alone
        run.checkpoints.context.barrier("end", LONGEST)
    return final
