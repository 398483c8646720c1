"""What each verb of the command does, between a checked config and the loop."""

import contextlib
import dataclasses
import math
import pathlib
import sys
from typing import IO, Any

import jax

from jaxdp import config as schema
from jaxdp import loop, rundir
from jaxdp.build import make_profile, make_run, together
from jaxdp.build.parts import NOTHING, Given, make_parts, set_jax
from jaxdp.build.subject import make_subject
from jaxdp.build.warm import warm
from jaxdp.checkpoint import Checkpoints
from jaxdp.config import Config
from jaxdp.config.check import changed_numbers
from jaxdp.distributed.context import Context
from jaxdp.errors import UsageError
from jaxdp.metrics.console import Console
from jaxdp.metrics.jsonl import JsonLines, read
from jaxdp.metrics.writer import Many, Nothing, Record, Writer
from jaxdp.step import TrainState
from jaxdp.watch import Guarded


def train(
    config: Config, path: str | None, context: Context, given: Given = NOTHING, keep: bool = False
) -> tuple[Record, TrainState | None]:
    """The verb `train`: makes the run directory, then trains to the last update; returns the final record.

    keep: returns the state too, exported. given: see `make_parts`.
    """
    directory = schema.run_dir(config, path)
    config = as_begun(config, directory, context)
    run = make_run(config, directory, context, given)
    held = share(directory, context)
    start, found = resume_step(run, config, context)
    if start > run.steps:
        raise UsageError(f"steps: {run.steps}, but {str(directory)!r} has already made {start}; give more", rank=0)
    final = [record for record in read(directory / "metrics.jsonl") if record.get("split") == "final"]
    if start == run.steps and context.of_root("final", lambda: bool(final)):
        if context.is_root:
            print(f"finished: {directory} is at its last step {start}; nothing to do (another --run_dir starts anew)")
            print(summary(final[-1], directory))
        if held:
            held.close()
        return final[-1], run.checkpoints.restore(start, run.strategy.abstract()) if keep else None
    profile = make_profile(config, directory, start, run.steps)
    run = dataclasses.replace(
        run,
        start=start,
        evaluated=found.get("evaluated", False),
        offset=found.get("offset", 0),
        rollbacks=found.get("rollbacks", 0),
        profile=profile,
    )
    if not start and config.init_from is not None:
        run = warm(run, config, context)
    writer = start_writer(directory, config, context, run)
    watch = Guarded(
        context,
        directory,
        config.watchdog.step_timeout,
        config.watchdog.straggler_factor,
        config.checkpoint.every_minutes,
    )
    run = dataclasses.replace(run, writer=writer, watch=watch)
    try:
        record, state = loop.complete(run)
        writer.say(summary(record, directory))
        return record, run.strategy.export(state) if keep else None
    finally:
        watch.stop()
        writer.close()
        if held:
            held.close()


def summary(final: Record, directory: pathlib.Path) -> str:
    numbers = [f"{name} {final[name]:.4f}" for name in ("loss", "accuracy", "perplexity") if name in final]
    return "  ".join([*numbers, f"params_sha256 {final['params_sha256'][:16]}", f"files in {directory}"])


def eval(config: Config, path: str | None, context: Context) -> None:
    """The verb `eval`: evaluates the last checkpoint of the run directory, and prints the result."""
    directory = schema.run_dir(config, path)
    config = as_begun(config, directory, context)
    run = make_run(config, directory, context)
    step, _ = resume_step(run, config, context, tidy=False)
    if not step:
        raise UsageError(f"run_dir: no checkpoint in {str(directory)!r}; train first, or name another", rank=0)
    if run.eval is None:
        raise UsageError("eval.data: the data has no test split; name what to evaluate on", rank=0)
    record = loop.evaluate(run, run.strategy.lower(run.step), loop.restore(run, step))
    if context.is_root:
        Console(step).write({"step": step, "split": "eval", **record})


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
    start = checkpoints.latest(print, tidy)
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


def start_writer(directory: pathlib.Path, config: Config, context: Context, run: loop.Run) -> Writer:
    """Writes config.yaml and env.json, and opens the writers; a rank other than root writes nothing."""
    if not context.is_root:
        return Nothing()
    devices = run.strategy.devices
    rundir.write_config(directory, dataclasses.asdict(config))
    rundir.write_env(
        directory,
        {
            "devices": {"count": len(devices), "kind": devices[0].device_kind, "platform": devices[0].platform},
            "topology": {
                "processes": context.size,
                "local_processes": context.local_size,
                "hosts": list(context.hosts),
                "pids": list(context.pids),
            },
            "launcher": context.launcher,
            "backend": config.parallel.backend,
        },
    )
    begin = f"goes on after step {run.start}" if run.start else "starts"
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(run.strategy.shapes.params))
    layout, share = "", run.strategy.share()
    if run.strategy.parts > 1 and config.parallel.zero:
        split = share.split_bytes / max(share.total_bytes, 1)
        whole = f", {share.whole} leaves that do not divide stay whole" if share.whole else ""
        layout = f" zero {config.parallel.zero}: {split:.1%} of the state split in {run.strategy.parts}{whole};"
    writer = Many(
        [
            JsonLines(directory / "metrics.jsonl", run.start, run.evaluated),
            Console(run.steps, run.start, context.size == 1),
        ]
    )
    writer.say(
        f"{config.model.target} {count:,} parameters; {config.data.target} {len(run.train.dataset):,} examples; "
        f"batch {config.batch_size} in {config.microbatches} microbatches; {config.optimizer.target}\n"
        f"{len(devices)} x {devices[0].device_kind} in {context.size} process{'es' * (context.size > 1)} "
        f"({context.launcher}), {config.parallel.backend};{layout} {begin} in {directory}"
    )
    return writer


def plan(config: Config, options: dict[str, Any]) -> None:
    """The verb `plan`: what an update needs, moves and takes, stage by stage, and the stage to choose."""
    from jaxdp.cli.planning import report

    set_jax(config)
    print(report(config, make_parts(config), options))


def verify(config: Config, options: dict[str, Any]) -> None:
    """The verb `verify`: exits with code 1 where many devices do not train what one device would."""
    from jaxdp.cli.verifying import compile_quickly, report, report_exact

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


def sample(options: dict[str, Any]) -> None:
    """The verb `sample`: prints a prompt, and what a checkpoint's model goes on with."""
    from jaxdp.cli import sampling

    print(sampling.sample(options))
