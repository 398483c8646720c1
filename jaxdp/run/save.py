"""Checkpoints of a run: start one, wait for one, restore one."""

import time

from jaxdp.errors import RunFailed
from jaxdp.metrics.writer import Record
from jaxdp.process.monitor import Stopped
from jaxdp.train.run import Progress, Run
from jaxdp.train.state import TrainState


def save(run: Run, progress: Progress) -> None:
    """Start a checkpoint; it is durable when the writer reports it. Raises Stopped if training has
    halted.
    """
    began = time.perf_counter()
    with run.hooks.watch.suspend_timeout(f"saves step {progress.step}"):
        stop_if_halted(run, progress)
        state, meta = run.strategy.export(progress.state), metadata(run, progress)
        run.checkpoints.save(progress.step, state, meta, run.log.writer.say)
        if not run.options.asynchronous:
            run.checkpoints.wait()
    run.log.events.note("saving", progress.step, blocked=round(time.perf_counter() - began, 4))
    run.hooks.callbacks.call(
        "on_save", progress.step, run.checkpoints.directory / str(progress.step)
    )


def metadata(run: Run, progress: Progress) -> Record:
    """Return what is needed to resume, besides the state: skipped batches, callbacks, the
    evaluation of this step.

    That of a run without evaluation data is the loss of the last batch, for the final record.
    """
    meta: Record = {
        "offset": run.origin.offset,
        "rollbacks": run.origin.rollbacks,
        **run.hooks.callbacks.state(),
    }
    if run.checkpoints.audited is not None:
        meta["audited"] = run.checkpoints.audited
    if progress.evaluated == progress.step:
        meta |= {"metrics": progress.evaluation, "evaluated": True, "stopped": progress.stopped}
    elif progress.step == run.options.steps and not run.data.eval:
        meta["metrics"] = progress.last_batch()
    return meta


def save_last(run: Run, progress: Progress) -> None:
    """Save the state at the end of a run, unless it is still the one that was restored from a
    checkpoint.
    """
    if progress.step > run.origin.start or run.origin.recovered is not None:
        save(run, progress)


def save_preempted(run: Run, progress: Progress, stop: Stopped) -> None:
    """Save the latest state, so that the next job resumes from it."""
    save_last(run, progress)
    wait_for_checkpoint(run)
    last = run.checkpoints.last
    state = f"saved step {last}" if last else "nothing to save yet"
    run.log.events.note("preempted", progress.step, reason=str(stop), saved=last)
    run.log.writer.say(
        f"preempted by {stop}, after update {progress.step}: {state}; run the same command to resume"
    )


def stop_if_halted(run: Run, progress: Progress) -> None:
    """Raise Stopped if training has halted: never evaluate or save such a state."""
    if int(progress.state.guard.halted):
        raise Stopped("halt")


def wait_for_checkpoint(run: Run) -> None:
    """Wait until the checkpoint being written is durable. Raises RunFailed if it could not be
    saved.
    """
    began = time.perf_counter()
    with run.hooks.watch.suspend_timeout("waits for the checkpoint"):
        failure = run.checkpoints.wait()
    run.log.events.note("settled", blocked=round(time.perf_counter() - began, 4))
    if failure:
        then = "resume from the last one" if run.checkpoints.steps() else "start again"
        raise RunFailed(f"{failure}; fix that and run the same command to {then}", rank=0)


def restore(run: Run, step: int) -> TrainState:
    return run.strategy.adopt(run.checkpoints.restore(step, run.strategy.abstract()))
