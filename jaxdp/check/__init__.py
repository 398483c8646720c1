"""`jaxdp train --check`: all that a run does, tried in a temporary directory before it.

Two updates with an evaluation and a checkpoint after each, the last one again from the checkpoint
before it, and updates with one batch, whose loss must fall. They have the learning rate of the config
without its schedule: the first updates of a warm-up change next to nothing.
"""

import contextlib
import dataclasses
import functools
import io
import math
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator

from jaxdp.checkpoint.leaves import params_sha256
from jaxdp.config import Config
from jaxdp.config.parsing import from_mapping
from jaxdp.errors import RunFailed, UsageError, on_fault
from jaxdp.extras import Extra, Train
from jaxdp.metrics import safe_print
from jaxdp.metrics.jsonl import read
from jaxdp.process import signals
from jaxdp.process.context import Context
from jaxdp.run.build import make_run, prepare_on_all_ranks, restore
from jaxdp.run.components import NOTHING
from jaxdp.run.driver import Continuation
from jaxdp.run.start import advice
from jaxdp.targets import targets_in
from jaxdp.train.run import Progress, Run

UPDATES = 2
PARTS = ("config", "data", "update", "evaluation", "checkpoint", "writers", "restore", "one batch")
OFFLINE = {"WandB": {"mode": "offline"}}  # arguments of writers that would send something
SECONDS, MOST = 10.0, 1000  # of updates with one batch; the first one is not timed
HALF = 0.5  # of the first loss: no more updates are needed
FALL = 0.1  # of the first loss: the least that it must fall
FEW = 20  # after fewer updates, it need not have fallen
LAST = 5  # losses, of which the median counts: dropout and augmentation make noise


class Door(Extra):
    """The check of a config."""

    def around(self, train: Train, directory: pathlib.Path) -> Train:
        return functools.partial(check_run, self.config, directory.absolute(), train)


def check_run(
    config: Config, directory: pathlib.Path, train: Train, context: Context, _: Continuation
) -> None:
    """Try PARTS of a run in a temporary directory beside its own, and print a line about each on
    root.

    train: see `jaxdp.run.training_job.train_in`. Raises what a run raises, and RunFailed if a writer
    fails, an update after a restore has other bits, or the loss of one batch does not fall.
    """
    signals.has_started()  # a signal raises Stopped, and does not end this process at once
    parent = next(path for path in directory.parents if path.exists())
    problem = f"run_dir: cannot write in {str(parent)!r}; choose another with --run_dir"
    context.agree(None if os.access(parent, os.W_OK | os.X_OK) else problem)
    make = functools.partial(tempfile.mkdtemp, prefix=f"{directory.name}-check-", dir=parent)
    folder = pathlib.Path(context.of_root("temporary", make))

    def remove(cause=""):
        shutil.rmtree(folder, ignore_errors=True)

    on_fault(remove)  # of another process, which ends this one
    say = safe_print.say if context.is_root else str
    results = try_parts(config, folder, train, context)
    try:
        for part in PARTS:
            say(f"{part:10} ok: {next(results)}")
        context.barrier("checked")
    except Exception:
        say(f"{part:10} failed")
        raise
    finally:
        remove()
    for extra in {"mirror", "elastic"} & config.extras.keys():
        say(f"left out   {config.extras[extra]}")


def try_parts(
    config: Config, folder: pathlib.Path, train: Train, context: Context
) -> Iterator[str]:
    """Try PARTS, one after the other, and yield what has worked."""
    prepared = prepare_on_all_ranks(config, context)
    run = make_run(config, folder, context, NOTHING, prepared)
    for text in advice(run, config, prepared) if context.is_root else ():
        safe_print.say(f"warning: {text}")
    yield f"{config.model.target}, {config.data.target}, {config.optimizer.target}"
    with run.data.train.batches(0, UPDATES, run.strategy) as batches:
        count = len([*batches])
    if cause := run.data.train.find_not_finite(range(count)):
        raise UsageError(f"data: {cause}", rank=0)
    yield f"{count} batches of {config.batch_size} examples"

    config = with_two_updates(config)
    trained = Trained()

    def fit():
        with contextlib.redirect_stdout(io.StringIO()):
            record, state = train(folder, config, NOTHING, True, False, context, trained)
        return record, params_sha256(state)

    try:
        record, expected = fit()
    except Exception:
        events = {event["kind"] for event in read(folder / "events.jsonl")}
        for kind in ("saving", "save_failed"):  # after the update; after the evaluation
            if kind in events:
                yield "once"
        raise
    step = record["step"]
    yield f"{step} updates"
    yield f"loss {record['loss']:.4g} of {record.get('loss_of', 'the evaluation data')}"
    yield f"after updates {run.checkpoints.steps()}"
    for writer in getattr(trained.run.log.writer, "writers", ()):
        if getattr(writer, "failed", False):
            raise RunFailed(f"log.writers: {writer.name} failed; the warning says why")
    yield f"{len(config.log.writers)} besides the console and metrics.jsonl"

    context.barrier("updated")
    # On each host, which may have a directory of its own.
    shutil.rmtree(folder / "checkpoints" / f"{step}", ignore_errors=True)
    _, digest = fit()
    if digest != expected:
        raise RunFailed(
            f"update {step} after a restore has other bits ({digest[:16]}) than without one ({expected[:16]}): the "
            "model, the data or a callback depends on something that no checkpoint has; on a GPU, set "
            "XLA_FLAGS=--xla_gpu_deterministic_ops=true, so that sums have one order",
            rank=0,
        )
    yield f"update {step} has the same bits after it"
    yield overfit(trained.run, step, context)


def with_two_updates(config: Config) -> Config:
    """Return the config of two updates, with all that is due after each, and nothing that is sent."""
    values = dataclasses.asdict(config) | {"steps": UPDATES, "epochs": None}
    for section in ("log", "eval", "checkpoint", "outer"):
        values[section]["every"] = 1
    # No thread still writes when the directory is removed.
    values["checkpoint"] |= {"keep": UPDATES, "asynchronous": False}
    values["optimizer"] |= {"schedule": "constant", "warmup_steps": 0}
    writers = targets_in("log.writers", config.log.writers, "writer", "TensorBoard")
    values["log"]["writers"] = [
        {"target": target, "args": args | OFFLINE.get(target, {})} for target, args in writers
    ]
    os.environ["WANDB_MODE"] = "offline"  # also for writers and callbacks of the user's
    return from_mapping(values, "--check")


class Trained(Continuation):
    """The runs of a check, which share what they build. run: the last one."""

    def start(self, run: Run, progress: Progress) -> None:
        self.run = run


def overfit(run: Run, step: int, context: Context) -> str:
    """Make updates of a checkpoint's state with the first batch; return how its loss falls. Raises
    RunFailed if it does not.
    """
    program = run.strategy.compile(run.step)
    state = restore(run, step)
    with run.data.train.batches(0, 1, run.strategy) as batches:
        [(_, batch)] = batches
    losses = list[float]()
    fall, ends = 0.0, math.inf

    def has_time():
        return time.monotonic() < ends and len(losses) < MOST

    while fall < HALF and context.of_root("one batch", has_time):
        state, metrics = program.update(state, batch)
        losses.append(float(metrics["loss"]))
        ends = min(ends, time.monotonic() + SECONDS)  # the first update compiles
        fall = (losses[0] - statistics.median(losses[-LAST:])) / (abs(losses[0]) or 1.0)
    text = f"loss {losses[0]:.4g} to {losses[-1]:.4g} in {len(losses)} updates"
    if not fall >= (FALL if len(losses) >= FEW else -math.inf):  # it may be NaN
        raise RunFailed(
            f"the loss of one batch does not fall: {text}; look at its labels and at the loss, or try another "
            "optimizer.lr",
            rank=0,
        )
    return text
