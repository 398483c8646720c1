"""Rollback after a spike of the loss: restore the last checkpoint and continue with the data after the spike."""

import contextlib
import dataclasses
import json
import pathlib

import jax
import numpy as np

from jaxdp.core.skip import NONFINITE
from jaxdp.errors import RunFailed
from jaxdp.training.run import Progress, Run
from jaxdp.training.save import restore
from jaxdp.training.source import describe


def roll_back(run: Run, progress: Progress) -> tuple[Run, Progress]:
    """Restore the last checkpoint; return (the run, its progress), set to continue with the data after the spike.

    Raises RunFailed if the run halted on non-finite updates, or after `max_rollbacks`.
    """
    run.profile.stop()
    run.profile.start = None
    guard = jax.device_get(progress.state.guard)
    first, last = int(guard.since), int(guard.halted_at)
    with run.watch.suspend_timeout("waits for the checkpoint"):
        run.checkpoints.wait()
    file = write_batches(run, first, last)
    if int(guard.halted) == NONFINITE:
        last_saved = max(run.checkpoints.steps(), default=0)
        checkpoint = f"checkpoint {last_saved} is the last" if last_saved else "there is no checkpoint"
        batch = describe(run.train.read(first - 1 + run.offset))
        raise RunFailed(
            f"updates {first} to {last} were not finite, {int(guard.in_a_row)} in a row (nonfinite.max_consecutive); "
            f"none of them was applied, {checkpoint}; the "
            f"batch of update {first} has {batch}; the indices of all their examples are in {file}",
            rank=0,
        )
    if run.rollbacks >= run.max_rollbacks:
        raise RunFailed(
            f"the loss of update {last} is a spike, and the run was rolled back {run.rollbacks} times already "
            f"(spike.max_rollbacks); the indices of its examples are in {file}",
            rank=0,
        )
    with run.watch.suspend_timeout("restores"):
        step = run.checkpoints.latest(run.writer.say)
        state = restore(run, step) if step else run.begin(run)
    run.writer.rewind(step)
    run.events.note("rolled_back", last, to=step, reason="a spike of the loss")
    run.writer.say(f"the loss of update {last} is a spike: back to step {step}, continuing with the data after it")
    offset = run.offset + last - step
    run = dataclasses.replace(run, start=step, offset=offset, rollbacks=run.rollbacks + 1)
    return run, Progress(step, state, evaluated=step)


def write_batches(run: Run, first: int, last: int) -> pathlib.Path:
    """Write halted.json: the indices of the examples of updates `first` to `last`."""
    file = run.directory / "halted.json"
    updates = range(first, last + 1)
    batches = {update: np.sort(run.train.indices(update - 1 + run.offset)).tolist() for update in updates}
    if run.checkpoints.context.is_root:
        with contextlib.suppress(OSError):
            file.write_text(json.dumps({"updates": batches}) + "\n")
    return file
