"""Rollback after a spike of the loss: restore an earlier state and continue with the data after the
spike.
"""

import contextlib
import json
import pathlib
from typing import Any

import jax
import numpy as np

from jaxdp.errors import RunFailed
from jaxdp.metrics.writer import Record
from jaxdp.run import rundir
from jaxdp.run.build import restore
from jaxdp.run.source import describe
from jaxdp.train.run import Run
from jaxdp.train.skip import DISAGREEING, NONFINITE


def roll_back(training: Any, initial: Record) -> None:
    """Restore an earlier state; set the progress to continue with the data after the spike.

    training: a `Training`. initial: the state of the callbacks before the first update.
    Raises RunFailed if the run halted for another cause than a spike, or after `max_rollbacks`.
    """
    run = training.run
    checkpoints = run.checkpoints
    progress = training.progress
    watch = training.watch
    offset = progress.offset
    rollbacks = progress.rollbacks
    training.profile.stop()
    training.profile.first = None
    training.profile.ends = ()
    guard = jax.device_get(progress.state.guard)
    first = int(guard.since)
    last = int(guard.halted_at)
    with watch.suspend_timeout("waits for the checkpoint"):
        checkpoints.wait()
    halted = last if int(guard.halted) == NONFINITE else first
    for step in [step for step in checkpoints.steps() if step >= halted and checkpoints.writes]:
        # saved before all replicas knew of it
        why = f"checkpoint {step} has a replica that halted at update {halted}"
        checkpoints.set_aside(step, "halted", why, run.log.writer.say)
    if int(guard.halted) == DISAGREEING:
        raise RunFailed(
            f"update {last}: integers of the model state differ between microbatches; a counter must not depend on "
            "the examples (keep such state as a float, or under 'carry')",
            rank=0,
        )
    file = write_batches(run, first, last, offset)
    if int(guard.halted) == NONFINITE:
        last_saved = max(checkpoints.steps(), default=0)
        checkpoint = (
            f"checkpoint {last_saved} is the last" if last_saved else "there is no checkpoint"
        )
        batch = describe(run.data.train.read(first - 1 + offset))
        raise RunFailed(
            f"updates {first} to {last} were not finite, {int(guard.in_a_row)} in a row (nonfinite.max_consecutive); "
            f"none of them was applied, {checkpoint}; the "
            f"batch of update {first} has {batch}; the indices of all their examples are in {file}",
            rank=0,
        )
    if rollbacks >= run.options.max_rollbacks:
        raise RunFailed(
            f"the loss of update {last} is a spike, and the run was rolled back {rollbacks} times already "
            f"(spike.max_rollbacks); the indices of its examples are in {file}",
            rank=0,
        )
    with watch.suspend_timeout("restores"):
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
