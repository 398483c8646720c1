"""The loop: read a batch, update, observe, and now and then save and evaluate."""

import jax

from jaxdp.parallel.strategy import Program
from jaxdp.train.observer import Observers
from jaxdp.train.run import Host, Progress, Run


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
        # The run was interrupted between an update and its evaluation.
        resumes = 0 < progress.step < options.steps and progress.evaluated != progress.step
        if resumes and "evaluate" in (due := run.due(progress.step)):
            between(progress, observers, host, due)
            if progress.stopped is not None:
                return

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
                        host.stop()
                    between(progress, observers, host, due)
                    if progress.stopped is not None:
                        break
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
