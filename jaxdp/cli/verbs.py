"""What each verb of the command does, between a checked config and the loop."""

import concurrent.futures
import contextlib
import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

import jax

from jaxdp import ahead, compilation_cache, loop, own_code, rundir, signals
from jaxdp import config as schema
from jaxdp.build import make_profile, make_run, together
from jaxdp.build.known import keys_of_programs
from jaxdp.build.parts import NOTHING, Given, make_parts, set_jax
from jaxdp.checkpoint import Checkpoints
from jaxdp.cli.starting import layout_of, start_writer, with_layout
from jaxdp.config import Config
from jaxdp.config.check import changed_numbers
from jaxdp.distributed import last_words
from jaxdp.distributed.context import Context
from jaxdp.distributed.sentinel import is_consequence
from jaxdp.environment import processor
from jaxdp.errors import Said, UsageError, one_line
from jaxdp.metrics import aloud
from jaxdp.metrics.console import Console
from jaxdp.metrics.events import Events, NoEvents
from jaxdp.metrics.jsonl import read
from jaxdp.metrics.throughput import goodput
from jaxdp.metrics.writer import Nothing, Record, Writer
from jaxdp.metrics.writers import check_writers
from jaxdp.report import writer as report_file
from jaxdp.step import TrainState
from jaxdp.untraced import Updates
from jaxdp.watch import Guarded, Stopped


def train(
    config: Config, path: str | None, context: Context, given: Given = NOTHING, keep: bool = False
) -> tuple[Record, TrainState | None]:
    """The verb `train`: makes the run directory, then trains to the last update; returns the final record.

    keep: returns the state too, exported. given: see `make_parts`.
    """
    began = time.time()
    directory = schema.run_dir(config, path)
    config = as_begun(config, directory, context)
    keep_programs(config, context)
    set_jax(config)
    start = start_of(config, context)
    with (
        ahead.written_by_all(),
        ahead.loading(start) as asked,
        concurrent.futures.ThreadPoolExecutor(1, "jaxdp-update") as pool,
    ):
        updates = Updates(start if context.size == 1 else None, asked, pool)
        try:
            return trained(config, directory, context, given, keep, began, updates)
        except Stopped:  # it is saved, or there was nothing to save
            raise
        except BaseException:
            updates.doubt()
            raise


def trained(
    config: Config,
    directory: pathlib.Path,
    context: Context,
    given: Given,
    keep: bool,
    began: float,
    updates: Updates,
) -> tuple[Record, TrainState | None]:
    """As `train`, in a directory. began: when."""
    run = make_run(config, directory, context, given)
    together(context, lambda: check_writers(config.log.writers))
    held = share(directory, context)
    events = run.checkpoints.events = Events(directory) if context.is_root else NoEvents()
    start, found = resume_step(run, config, context)
    if start > run.steps:
        raise UsageError(f"steps: {run.steps}, but {str(directory)!r} has already made {start}; give more", rank=0)
    final = [record for record in read(directory / "metrics.jsonl") if record.get("split") == "final"]
    if start == run.steps and context.of_root("final", lambda: bool(final)):
        if context.is_root:
            aloud.say(
                f"finished: {directory} is at its last step {start}; nothing to do (another --run_dir starts anew)"
            )
            aloud.say(summary(final[-1], directory))
            if (directory / report_file.NAME).is_file():
                aloud.say(report_file.said(directory))
        if held:
            held.close()
        final[-1].pop("time", None)  # as it was returned then
        return final[-1], run.checkpoints.restore(start, run.strategy.abstract()) if keep else None
    if offset := found.get("offset", 0):
        run = dataclasses.replace(make_run(config, directory, context, given, offset), checkpoints=run.checkpoints)
    profile = make_profile(config, directory, start, run.steps)
    run = dataclasses.replace(
        run,
        start=start,
        evaluated=found.get("evaluated", False),
        offset=offset,
        rollbacks=found.get("rollbacks", 0),
        profile=profile,
        events=events,
    )
    if not start and config.init_from is not None:
        from jaxdp.build.warm import warm

        run = warm(run, config, context)
    writer: Writer = Nothing()
    if context.is_root:
        layout = layout_of(run, config)
        writer = start_writer(directory, config, context, run, layout)
        run = with_layout(run, config, directory, layout, updates)
    facts = {"devices": len(run.strategy.devices), "processes": context.size, "steps": run.steps}
    events.note("resume" if start else "start", start, t=round(began, 3), **facts)
    watch = Guarded(
        context,
        directory,
        config.watchdog.step_timeout,
        config.watchdog.straggler_factor,
        config.checkpoint.every_minutes,
    )
    account = lambda: context.of_root("goodput", lambda: goodput(directory / "metrics.jsonl", rundir.began(directory)))
    run = dataclasses.replace(run, writer=writer, watch=watch, account=account)

    def heard(name: str) -> None:
        if name == signals.TRACE:
            profile.ask()

    signals.subscribe(heard)
    try:
        with noting_the_end(events, context.size == 1):
            record, state = loop.complete(run)
        writer.say(summary(record, directory))
        return record, run.strategy.export(state) if keep else None
    finally:
        signals.unsubscribe(heard)
        profile.stop()
        watch.stop()
        writer.close()
        if held:
            held.close()


@contextlib.contextmanager
def noting_the_end(events: NoEvents, alone: bool) -> Iterator[None]:
    """Notes why training ended, where it did by an error, or another process's.

    alone: there is no other, whose error might be the cause of this one's and be heard of after it.
    """
    ended = lambda text: events.note("failed", reason=text.rstrip(": "))
    last_words.subscribe(ended)
    over = True
    try:
        yield
    except Stopped:
        raise
    except BaseException as error:
        over = alone
        lost = "" if alone or not is_consequence(error) else "another process was lost: "
        ended(str(error) if isinstance(error, Said) else f"{lost}{type(error).__name__}: {one_line(error)[:300]}")
        raise
    finally:
        if over:
            last_words.unsubscribe(ended)


def summary(final: Record, directory: pathlib.Path) -> str:
    numbers = [f"{name} {final[name]:.4f}" for name in ("loss", "accuracy", "perplexity") if name in final]
    return "  ".join([*numbers, f"params_sha256 {final['params_sha256'][:16]}", f"files in {directory}"])


def eval(config: Config, path: str | None, context: Context) -> None:
    """The verb `eval`: evaluates the last checkpoint of the run directory, and prints the result."""
    directory = schema.run_dir(config, path)
    config = as_begun(config, directory, context)
    keep_programs(config, context)
    run = make_run(config, directory, context)
    step, _ = resume_step(run, config, context, tidy=False)
    if not step:
        raise UsageError(f"run_dir: no checkpoint in {str(directory)!r}; train first, or name another", rank=0)
    if run.eval is None:
        raise UsageError("eval.data: the data has no test split; name what to evaluate on", rank=0)
    record = loop.evaluate(run, run.strategy.lower(run.step), loop.restore(run, step))
    if context.is_root:
        Console(step).write({"step": step, "split": "eval", **record})


def keep_programs(config: Config, context: Context) -> None:
    """As `compilation_cache` says; a cache that cannot be used is one warning."""
    problem = compilation_cache.use(config.compilation_cache)
    if problem and context.is_root:
        print(f"jaxdp: {problem}", file=sys.stderr)


def start_of(config: Config, context: Context) -> str:
    """What the programs of a start depend on, as far as the config and the hosts tell."""
    own = context.rank if jax.default_backend() == "cpu" else 0  # there each process has programs of its own
    place = (context.size, own, len(jax.devices()), jax.devices()[0].device_kind, processor())
    return repr(("start", keys_of_programs(config), sorted(rundir.versions().items()), place))


def as_begun(config: Config, directory: pathlib.Path, context: Context) -> Config:
    """The config, with what a run that is there did of its own accord before there was a key for it."""

    def older() -> bool:
        checkpoints = Checkpoints(directory / "checkpoints")
        with contextlib.suppress(Exception):  # what is damaged is told of where it is restored
            return "order" not in checkpoints.meta(checkpoints.steps()[-1])["config"]["data"]
        return False

    if config.data.order is None and context.of_root("begun", older):
        return dataclasses.replace(config, data=dataclasses.replace(config.data, order="shuffled"))
    return config


def share(directory: pathlib.Path, context: Context) -> IO[str] | None:
    """Makes the run directory on rank 0 and locks it, and checks that every rank sees the same one."""
    held, problem = rundir.make(directory) if context.is_root else (None, None)
    context.agree(problem)
    nonce = context.of_root("run_dir", lambda: rundir.nonce(directory))
    context.agree(rundir.is_shared(directory, nonce))
    return held


def resume_step(run: loop.Run, config: Config, context: Context, tidy: bool = True) -> tuple[int, dict[str, Any]]:
    """(the checkpoint to go on from, what was saved with it), or (0, {}).

    UsageError where the config or the data would change its numbers, unless it is forced.
    """
    checkpoints = run.checkpoints
    start = checkpoints.latest(aloud.say, tidy)
    if not start:
        return 0, {}
    found = context.of_root("meta", lambda: checkpoints.meta(start))
    if not config.resume.force:
        together(context, lambda: check_same_numbers(found, run, config, start))
    return start, found


def check_same_numbers(found: dict[str, Any], run: loop.Run, config: Config, step: int) -> None:
    """UsageError where the run that is there was trained with other values of what changes the numbers."""
    changed = changed_numbers(found["config"], config)
    if found["data_fingerprint"] != run.meta["data_fingerprint"]:
        changed.append(f"data fingerprint: {found['data_fingerprint']} -> {run.meta['data_fingerprint']}")
    if changed:
        raise UsageError(
            f"{'; '.join(changed[:8])}{f' (and {len(changed) - 8} more)' if changed[8:] else ''}: this run was trained "
            f"to step {step} with the former, and it changes the numbers; put it back, choose another --run_dir, or "
            "go on all the same with --resume.force true"
        )


def plan(config: Config, options: dict[str, Any]) -> None:
    """The verb `plan`: what an update needs, moves and takes, stage by stage, and the stage to choose."""
    from jaxdp.cli.planning import report

    set_jax(config)
    print(report(config, make_parts(config), options))


def verify(config: Config, options: dict[str, Any]) -> None:
    """The verb `verify`: exits with code 1 where many devices do not train what one device would."""
    from jaxdp.build.subject import make_subject
    from jaxdp.cli.verifying import compile_quickly, report, report_exact

    with own_code.said():
        if options["exact"]:
            text, verified = report_exact(config, options)
        else:
            compile_quickly()
            set_jax(config)
            text, verified = report(config, make_subject(config), options)
    print(text)
    if not verified:
        sys.exit(1)


def export(options: dict[str, Any]) -> None:
    """The verb `export`: writes the parameters of a checkpoint to a file."""
    from jaxdp.cli import exporting

    print(exporting.export(options))


def profile(config: Config, path: str | None, context: Context, options: dict[str, Any]) -> None:
    """The verb `profile`: traces a few updates, and prints where their time went."""
    from jaxdp.cli.profiling import profile

    text = profile(config, path, context, options)
    if context.is_root:
        print(text)


def sample(options: dict[str, Any]) -> None:
    """The verb `sample`: prints a prompt, and what a checkpoint's model goes on with."""
    from jaxdp.cli import sampling

    print(sampling.sample(options))
