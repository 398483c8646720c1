"""Train a config in a run directory, with writers, a monitor and signals."""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxdp.config import Config
from jaxdp.errors import (
    ReportedError,
    UsageError,
    is_consequence,
    off_fault,
    on_fault,
    one_line,
    user_code,
)
from jaxdp.extras import Train, extras_of
from jaxdp.metrics import safe_print
from jaxdp.metrics.jsonl import Events, NoEvents, read
from jaxdp.metrics.meter import goodput
from jaxdp.metrics.writer import Record
from jaxdp.metrics.writers import check_writers
from jaxdp.parallel.placement import open_collectives
from jaxdp.process import compilation_cache, private_jax, signals
from jaxdp.process.context import SLOW, Context
from jaxdp.process.monitor import RunMonitor, Stopped
from jaxdp.run import rundir
from jaxdp.run.build import (
    Prepared,
    make_profile,
    make_run,
    on_all_ranks,
    per_example,
    prepare_on_all_ranks,
    step_of,
)
from jaxdp.run.callbacks import Callbacks, make_callbacks
from jaxdp.run.components import NOTHING, Objects, choose_accumulate
from jaxdp.run.driver import Continuation, Training
from jaxdp.run.start import (
    check_paths,
    resume_step,
    start_writer,
    warn_of_lost_updates,
)
from jaxdp.train.run import Progress, Run
from jaxdp.train.state import TrainState


def train(
    config: Config,
    path: str | None,
    context: Context,
    objects: Objects = NOTHING,
    keep: bool = False,
    overwrite: bool = False,
) -> tuple[Record, TrainState | None]:
    """Create the run directory and train to the last update; return the final record and the state.

    Args:
        objects: see `make_parts`.
        keep: return the exported state instead of None.
        overwrite: remove an existing run from the directory first.
    """
    directory = rundir.directory_of(config, path)
    wrapped: Train = functools.partial(train_in, directory, config, objects, keep, overwrite)
    for extra in extras_of(config):
        wrapped = extra.around(wrapped, directory)
    return wrapped(context, Continuation())


def train_in(
    directory: pathlib.Path,
    config: Config,
    objects: Objects,
    keep: bool,
    overwrite: bool,
    context: Context,
    continuation: Continuation,
) -> tuple[Record, TrainState | None]:
    """Prepare the directory, find the state to start from, and train with the processes of
    `context`. The other arguments are those of `train`."""
    began = time.time()
    overwrite = overwrite and not continuation.runs
    if overwrite:
        # Not what this job has written before `jaxdp launch` started its processes again.
        since = float(os.environ.get("JAXDP_BEGAN", math.inf))
        overwrite = context.of_root("overwrite", lambda: rundir.began(directory) < since)
    use_compilation_cache(config, context)
    check = context.is_root and not overwrite
    on_all_ranks(context, lambda: check_paths(config, directory) if check else None)
    prepared = prepare_on_all_ranks(config, context, objects, continuation.prepared)
    continuation.prepared = prepared
    run = make_run(config, directory, context, objects, prepared)
    checkpoints = run.checkpoints
    if config.log.writers:
        on_all_ranks(context, lambda: check_writers(config.log.writers))
    callbacks = Callbacks(context=context)
    if config.callbacks:
        callbacks = on_all_ranks(
            context,
            lambda: make_callbacks(config.callbacks, objects.get("callbacks", {}), context),
        )
    check = context.is_root and (overwrite or not checkpoints.steps())
    context.agree(rundir.not_ours(directory, overwrite) if check else None)
    lock, problem = rundir.make(directory) if context.is_root else (None, None)
    context.agree(problem)
    with lock or contextlib.nullcontext():
        nonce = context.of_root("run_dir", lambda: rundir.nonce(directory))
        context.agree(checkpoints.attach(nonce))  # whether this rank can use the directory
        context.agree(rundir.clear(directory) if overwrite and context.is_root else None)
        if overwrite:
            checkpoints.remove(checkpoints.steps())
        run.log.events = Events(directory) if context.is_root else NoEvents()
        checkpoints.events = run.log.events
        recovered = continuation.recover(run, context)
        start, saved, state = recovered or (*resume_step(run, config, context, objects), None)
        if start > (steps := run.options.steps):
            raise UsageError(
                f"steps: {steps}, but {str(directory)!r} is at step {start}; give more", rank=0
            )
        if start and recovered is None:
            record = final_record(run, directory, context, start, saved)
            if record is not None:
                abstract = run.strategy.abstract()
                return record, checkpoints.restore(start, abstract) if keep else None
        progress = Progress(
            state=state,
            recovered=recovered is not None,
            step=start,
            start=start,
            offset=saved.get("offset", 0),
            rollbacks=saved.get("rollbacks", 0),
            evaluated=start if saved.get("evaluated") else -1,
            evaluation=saved.get("metrics", {}),
            stopped=saved.get("stopped"),
        )
        if offset := progress.offset:  # more batches may be padded
            run = dataclasses.replace(
                run, step=step_of(config, prepared.parts, len(run.strategy.devices), offset)
            )
        continuation.load(callbacks, saved)
        run = callbacks.change_step(run, progress)
        training = ConfigTraining(
            run,
            progress,
            callbacks,
            continuation,
            extras=extras_of(config),
            profile=make_profile(config, directory, start, steps),
            per_example=per_example(config, prepared.parts, prepared.flops, run.strategy.devices),
            config=config,
            prepared=prepared,
        )
        if not start and config.init_from is not None:
            from jaxdp.run.initial_weights import initialize_from

            training.initialize = initialize_from(run, config, context, prepared.parts, objects)
        return supervised(training, objects, began, keep)


@dataclasses.dataclass(kw_only=True)
class ConfigTraining(Training):
    """The training of a config. initialize: returns the initial state, of `init_from`."""

    config: Config
    prepared: Prepared
    initialize: Callable[[], TrainState] | None = None

    def begin(self) -> TrainState:
        state = super().begin() if self.initialize is None else self.initialize()
        if self.config.precision.state == "bfloat16":
            warn_of_lost_updates(self.run, self.config.optimizer.lr, state)
        return state

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Store what is compiled in this context. Raises UsageError if user code that can be traced
        cannot be mapped.
        """
        hint = ""
        if choose_accumulate(self.config) == "vmap":
            hint = "; to call it for one microbatch at a time, set parallel.accumulate: scan"
        with user_code(lambda key: hint), contextlib.ExitStack() as stack:
            if jax.process_index() and not self.run.checkpoints.is_saving():
                stack.enter_context(private_jax.store_programs())
            yield

    def account(self) -> Record:
        directory = self.run.log.directory
        return self.run.checkpoints.context.of_root(
            "goodput", lambda: goodput(directory / "metrics.jsonl", rundir.began(directory))
        )


def final_record(
    run: Run, directory: pathlib.Path, context: Context, start: int, saved: Record
) -> Record | None:
    """Return the final record of a run that has finished already, and report this on root; None for
    any other run. Raises UsageError if the checkpoint does not fit, before anything is written.
    """
    run.checkpoints.check_fits(start, run.strategy.abstract())

    def last():
        records = read(directory / "metrics.jsonl")
        final = [
            x for x in records if x.get("split") == "final" and {"step", "params_sha256"} <= {*x}
        ]
        # `dump` writes these numbers as texts
        last = final[-1] if final else {}
        return {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in last.items()}

    final = context.of_root("final", last)
    if final.get("step") != start or (run.data.eval and "changed" in saved):
        return None

    def end():
        if start == run.options.steps:
            return ""
        return run.data.train.end(start + saved.get("offset", 0))

    reason = ("changed" not in saved and final.get("stopped")) or context.of_root(
        "the next batch", end, SLOW
    )
    if reason is None:
        return None
    if context.is_root:
        step = f"{start} ({reason})" if reason else start
        safe_print.say(
            f"finished: {directory} is at its last step {step}; nothing to do (another --run_dir "
            "starts over)"
        )
        safe_print.say(summary(final, run))
        if (directory / rundir.REPORT).is_file():
            safe_print.say(f"report in {directory / rundir.REPORT}")
    final.pop("time", None)
    return final


def use_compilation_cache(config: Config, context: Context) -> None:
    """Enable the config's `compilation_cache`. Rank 0 prints a warning if it cannot be used."""
    problem = compilation_cache.use(config.compilation_cache, context.size)
    if problem and context.is_root:
        safe_print.say(f"jaxdp: {problem}", error=True)


def supervised(
    training: ConfigTraining,
    objects: Objects,
    began: float,
    keep: bool,
) -> tuple[Record, TrainState | None]:
    """Train with writers, a monitor and signals. began: the start of the command, in seconds since
    1970.
    """
    run = training.run
    config = training.config
    continuation = training.continuation
    start = training.progress.step
    context = run.checkpoints.context
    log, directory = run.log, run.log.directory

    log.writer = continuation.begin(
        training, functools.partial(start_writer, training, config, training.prepared, objects)
    )
    training.watch = watch = RunMonitor(
        context,
        directory,
        config.watchdog.step_timeout,
        config.watchdog.straggler_factor,
        config.checkpoint.every_minutes,
        last_save=continuation.last_save or time.monotonic(),
    )

    def on_signal(name):
        if name == signals.TRACE:
            training.profile.ask()
        elif signals.is_starting():  # this process ends after its listeners have returned
            log.events.note("preempted", start, reason=f"{name} on rank {context.rank}")

    signals.subscribe(on_signal)
    try:
        facts: dict[str, Any] = {
            "devices": len(run.strategy.devices),
            "processes": context.size,
            "steps": run.options.steps,
            "observers": training.observers.names,
        }
        if continuation.again:
            facts["again"] = continuation.again
        log.events.note("resume" if start else "start", start, t=round(began, 3), **facts)
        open_collectives(context)
        with log_failure(log.events, context.size == 1, continuation):
            record, state = training.train()
        log.writer.say(summary(record, run))
        return record, run.strategy.export(state) if keep else None
    finally:
        signals.unsubscribe(on_signal)
        training.profile.stop()
        watch.stop()
        continuation.last_save = watch.last_save
        if continuation.survives:
            run.checkpoints.wait()  # the next run reads them
        log.writer.close()


@contextlib.contextmanager
def log_failure(events: NoEvents, alone: bool, continuation: Continuation) -> Iterator[None]:
    """Log an event if training ends by an error of this process or of another.

    alone: whether this is the only process. Otherwise the fault of another one may be reported
    after this error. An error after which the command goes on is not a failure.
    """

    def log(text):
        return events.note("failed", reason=text.rstrip(": "))

    on_fault(log)
    unsubscribe = True
    try:
        yield
    except BaseException as error:
        if continuation.goes_on(error):
            events.note("regroup", reason=getattr(error, "why", str(error))[:300])
            raise
        if isinstance(error, Stopped):
            raise
        unsubscribe = alone
        prefix = "" if alone or not is_consequence(error) else "another process was lost: "
        text = f"{prefix}{type(error).__name__}: {one_line(error)[:300]}"
        log(str(error) if isinstance(error, ReportedError) else text)
        raise
    finally:
        if unsubscribe:
            off_fault(log)


def summary(final: Record, run: Run) -> str:
    """Return the line that ends a run: its final metrics, the best checkpoint if one is kept as
    such, a digest of the parameters, and the directory.
    """
    texts = [
        f"{name} {final[name]:.4f}" for name in ("loss", "accuracy", "perplexity") if name in final
    ]
    if "loss_of" in final:
        texts[0] += f" (of {final['loss_of']}: no evaluation data)"
    if (best := run.checkpoints.best) and (step := run.checkpoints.best_step()):
        value = run.checkpoints.meta(step)["metrics"][best]
        texts.append(f"best {best} {value:.4g} at step {step}")
    return "  ".join(
        [*texts, f"params_sha256 {final['params_sha256'][:16]}", f"files in {run.log.directory}"]
    )
