"""The output of a run before its first update: files in its directory, a summary on the console,
and warnings.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from jaxdp.config import Config
from jaxdp.config.validation import flatten
from jaxdp.data.dataset import UNKNOWN, first_example
from jaxdp.data.example_order import RESET
from jaxdp.errors import install
from jaxdp.extras import extras_of
from jaxdp.metrics.console import Console
from jaxdp.metrics.jsonl import JsonLines
from jaxdp.metrics.numbers import size
from jaxdp.metrics.writer import Many, Writer
from jaxdp.metrics.writers import make_writers
from jaxdp.models.base import CARRY
from jaxdp.optim import OPTIMIZERS, SCHEDULES
from jaxdp.optim.evaluation import evaluation_arrays
from jaxdp.optim.master import moving_share
from jaxdp.parallel.placement import state_shapes
from jaxdp.plan import memory
from jaxdp.process import environment
from jaxdp.process.context import Context
from jaxdp.report.html import Reports
from jaxdp.run import git, rundir
from jaxdp.run import model_summary as model_summary
from jaxdp.run.build import Prepared, follows_schedule
from jaxdp.run.callbacks import EarlyStopping
from jaxdp.run.components import Objects, describe_groups, schedule_of
from jaxdp.run.data_warnings import data_warnings
from jaxdp.run.driver import Training
from jaxdp.run.preflight import state_of_one, sums_of_one
from jaxdp.split import leaves_by_path
from jaxdp.targets import OF_SCRIPT
from jaxdp.train.model_state import floats
from jaxdp.train.run import Run
from jaxdp.train.state import TrainState
from jaxdp.train.step import first_microbatch

EMPTY, IDLE = 0.05, 0.1  # warn above these shares of padding in a batch, and of idle device time
TREES = {
    "params": "parameters",
    "grads": "gradients",
    "opt_state": "optimizer",
    "model_state": "model state",
}


def start_writer(
    training: Training, config: Config, prepared: Prepared, objects: Objects
) -> Writer:
    """Write config.yaml, env.json, layout.json and model.txt, open the writers, and print the
    summary. On root only.
    """
    run = training.run
    layout = layout_of(run, config)
    if not training.continuation.runs:
        rundir.write_layout(run.log.directory, layout)
        training.layout = layout
    start = training.progress.step
    directory = run.log.directory
    context = run.checkpoints.context
    devices = run.strategy.devices
    rundir.write_config(directory, dataclasses.asdict(config))
    rundir.write_env(
        directory,
        {
            "devices": {
                "count": len(devices),
                "kind": devices[0].device_kind,
                "platform": devices[0].platform,
            },
            "topology": {
                "processes": context.size,
                "local_processes": context.local_size,
                "hosts": list(context.hosts),
                "pids": list(context.pids),
            },
            "launcher": context.launcher,
            "backend": config.parallel.backend,
            **git.record(directory),
        },
    )
    shapes = run.strategy.shapes
    rows = model_summary.arrays(shapes, run.step.trainable(shapes.params))
    rundir.write(directory / "model.txt", model_summary.text(config.model.target, rows) + "\n")
    groups = describe_groups(
        config,
        prepared.parts,
        run.strategy.shapes.params,
        {**OPTIMIZERS, **objects.get("optimizer", {})},
    )
    facts = summary(run, config, context, start, layout, groups)
    console = Console(
        run.options.steps, start, context.launcher == "none", {"title": directory.name, **facts}
    )
    run.checkpoints.events.tell = console.happened
    console.advised = config.data.on_device  # the console would advise to set it
    lines = JsonLines(
        directory / "metrics.jsonl",
        start,
        training.progress.evaluated == start,
        "evaluate" in run.due(start),
    )
    reports = Reports(directory, flatten(Config()), run.checkpoints.events)
    writers: list[Writer] = [lines, console, reports]
    if config.log.writers:
        writers += make_writers(config.log.writers, directory, start, dataclasses.asdict(config))
    writer = Many(writers)
    if console.panel is None:
        width = max(map(len, facts))
        writer.say("\n".join(f"{name:{width}}  {text}" for name, text in facts.items()))
    for text in advice(run, config, prepared, start, training.callbacks.callbacks):
        writer.say(f"warning: {text}")
    return writer


def summary(
    run: Run, config: Config, context: Context, start: int, layout: dict[str, Any], groups: str
) -> dict[str, str]:
    """Return the lines of a run's summary by name. start: the update after which it starts.
    groups: what weight decay and Muon apply to.
    """
    devices = run.strategy.devices
    parallel = config.parallel
    order = run.data.train.order
    opt = config.optimizer
    steps = run.options.steps
    per_call = run.options.steps_per_call
    directory = run.log.directory
    sizes = [
        f"{len(x.dataset):,}{f' ({name})' if name else ''}" for name, x in run.data.eval.items()
    ]
    evaluates = f"; evaluates on {' and '.join(sizes)}" if sizes else ""
    hosts = f" on {len(set(context.hosts))} hosts" if len(set(context.hosts)) > 1 else ""
    schedule = opt.schedule if isinstance(opt.schedule, str) else opt.schedule.get("target")
    rate = (
        f"{opt.target}, from the script"
        if opt.target.startswith(f"{OF_SCRIPT} ")
        else f"{opt.target}, lr {opt.lr:g} {schedule}"
    )
    return {
        "run": f"{f'resumes after step {start}' if start else 'starts'} in {directory}",
        "model": f"{config.model.target}, {layout['parameters']:,} parameters",
        "data": f"{config.data.target}, {length_of(run)}{evaluates}",
        **inventories(run),
        "batch": f"{config.batch_size:,} examples in {config.microbatches} microbatches of "
        f"{order.examples_per_microbatch:,}",
        "optimizer": f"{rate}, {steps:,} updates{f', {per_call} a call' if per_call > 1 else ''}",
        **({"groups": groups} if groups else {}),
        "devices": f"{len(devices)} x {devices[0].device_kind} in {context.size} "
        f"process{'es' * (context.size > 1)}{hosts} ({context.launcher})",
        "layout": f"{parallel.backend}, zero {parallel.zero}{sharding(run, config)}; reduction {parallel.reduction}",
        "memory": memory_line(layout),
    }


def inventories(run: Run) -> dict[str, str]:
    """Return what the sets were made of, and what was passed over, of those that report it."""
    sets = {
        "read": run.data.train,
        **{f"read {name or 'eval'}": source for name, source in run.data.eval.items()},
    }
    return {
        name: text
        for name, source in sets.items()
        if (text := getattr(source.dataset, "inventory", ""))
    }


def length_of(run: Run) -> str:
    if (size := len(run.data.train.dataset)) >= UNKNOWN:
        return "a stream of unknown length"
    return f"{size:,} examples, {run.data.train.order.steps_per_epoch:,} updates an epoch"


def sharding(run: Run, config: Config) -> str:
    """Return the share of the state that is sharded; "" if ZeRO is off or has a single shard."""
    share = run.strategy.share()
    if run.strategy.parts < 2 or not config.parallel.zero:
        return ""
    replicated = (
        f", {share.replicated} leaves that do not divide stay replicated"
        if share.replicated
        else ""
    )
    sharded = share.split_bytes / max(share.total_bytes, 1)
    return f": {sharded:.1%} of the state in {run.strategy.parts} shards{replicated}"


def memory_line(layout: dict[str, Any]) -> str:
    """Format the bytes per device of each tree; layout.json has activations, once the program is
    compiled.
    """
    sizes = {
        TREES[name]: count
        for name, count in layout["bytes_per_device"].items()
        if name in TREES and count
    }
    total = sum(sizes.values())
    each = ", ".join(f"{name} {size(count)}" for name, count in sizes.items())
    return f"{size(total)} a device, without activations: {each}"


def advice(
    run: Run, config: Config, prepared: Prepared, start: int = 0, callbacks: Sequence[Any] = ()
) -> Iterator[str]:
    """Yield warnings about settings that waste the devices, with better values. start: the update
    after which the run starts.
    """
    strategy = run.strategy
    devices, per_device = strategy.assignment.shape
    batch = config.batch_size
    microbatches = config.microbatches
    padded = microbatches * (per_microbatch := run.data.train.order.examples_per_microbatch)
    if 1 - batch / padded > EMPTY:
        yield (
            f"batch_size: {batch} is padded to {padded} ({microbatches} microbatches of {per_microbatch}); use "
            f"{padded} to avoid the padding (this changes the numbers)"
        )
    if batch > (size := run.data.train.order.size):
        yield (
            f"batch_size: {batch} is beyond the {size} examples of the data: every update takes all of them, and "
            f"the other {batch - size} are padding; make it {size} or smaller"
        )
    for extra in extras_of(config):
        yield from extra.advice(run)
    data = run.data.train
    if (
        CARRY in strategy.shapes.kept
        and not data.order.sequential
        and RESET not in first_example(data.dataset)
    ):
        yield (
            "data.order: shuffled: the model carries state, and each example starts with that of an unrelated one; "
            "give the examples a true 'reset', or set order to sequential"
        )
    if "segments" in first_example(data.dataset) and not reads(run, "segments"):
        yield (
            "data: the model ignores its segments and reads across documents; use one such as GPT instead"
        )
    yield from data_warnings(config, prepared.parts, strategy.shapes, devices)
    opt = config.optimizer
    steps = run.options.steps
    horizon = min(steps, opt.schedule_steps or steps)
    if not opt.target.startswith(f"{OF_SCRIPT} ") and opt.warmup_steps > horizon:
        end = "the run ends" if horizon == steps else "optimizer.schedule_steps ends the schedule"
        yield (
            f"optimizer.warmup_steps: {opt.warmup_steps}, but {end} after {horizon} updates: the warm-up is cut off "
            f"there, at {horizon / opt.warmup_steps:.0%} of lr; make it shorter"
        )
    if opt.final_lr and opt.schedule in ("constant", "one_cycle"):
        yield (f"optimizer.final_lr: {opt.final_lr} has no effect with the schedule {opt.schedule}")
    if opt.warmup_steps and opt.schedule == "one_cycle":
        yield (
            "optimizer.warmup_steps: one_cycle begins with its own warm-up; set it to 0 to have only one"
        )
    yield from rate_advice(run, config, prepared, start)
    shapes = strategy.shapes
    if evaluation_arrays(shapes.opt_state) and jax.tree.leaves(floats(shapes.model_state)):
        yield (
            f"optimizer.target: {opt.target} evaluates other parameters than it trains, but the model's statistics, as "
            "of BatchNorm, belong to the latter; use a norm without statistics"
        )
    waiting = [type(x).__name__ for x in callbacks if isinstance(x, EarlyStopping)]
    waiting += ["checkpoint.best"] * (config.checkpoint.best is not None)
    if steps > 1 and ((every := run.options.eval_every) or steps) >= steps:
        unused = f"eval.every: {every or 'null'} gives {{}} only the last evaluation; set it below {steps}"
        yield from map(unused.format, waiting)
    idle = 1 - microbatches / (devices * per_device)
    if idle > IDLE:
        yield (
            f"microbatches: {microbatches} do not divide evenly over {devices} devices, which are idle {idle:.0%} of "
            f"the time on average; use {devices * per_device} (this changes the numbers)"
        )
    if (
        strategy.devices[0].platform == "cpu"
        and environment.gpu_count()
        and "cpu" not in os.environ.get("JAX_PLATFORMS", "")
    ):
        yield (f"there is a GPU, but JAX runs on the CPU; {install('cuda12')} or: jaxdp doctor")


def rate_advice(run: Run, config: Config, prepared: Prepared, start: int) -> Iterator[str]:
    """Yield a warning if the optimizer does not use the config's rate, or if the schedule ends
    before the run.
    """
    opt = config.optimizer
    steps = run.options.steps
    if opt.target.startswith(f"{OF_SCRIPT} "):
        return
    if not follows_schedule(prepared.parts, state_shapes(prepared.make_state)):
        yield (
            f"optimizer.lr: {opt.lr:g} and its schedule have no effect: {opt.target} has a rate of its own; set that "
            "one in optimizer.args (lr is recorded only if the optimizer's state has it)"
        )
        return
    ended = (opt.schedule_steps or steps) < steps
    paths = leaves_by_path(run.strategy.shapes.opt_state)
    several = any(
        path.endswith("mini_step") for path in paths
    )  # optax.MultiSteps counts fewer updates
    if (
        not opt.lr
        or several
        or (opt.schedule in SCHEDULES and (not ended or opt.schedule == "constant"))
    ):
        return
    yield from advice_at_the_end(config, start, steps, ended)


def advice_at_the_end(config: Config, start: int, steps: int, ended: bool) -> Iterator[str]:
    """Yield a warning if the last updates of the run have one rate. ended: the schedule ends before
    them."""
    opt = config.optimizer
    first, last = constant_from(jax.jit(schedule_of(config, steps)), start, steps)
    last = last if abs(last) > 1e-6 * opt.lr else 0.0  # a line may end at a rounding error
    if steps - first < 2 or (last and (first == start or not ended)):
        return
    cause = (
        f"schedule_steps: {opt.schedule_steps}"
        if ended
        else f"schedule: {opt.schedule if isinstance(opt.schedule, str) else opt.schedule.get('target')}"
    )
    fix = (
        f"set schedule_steps to {steps}, or final_lr to what the rest needs"
        if ended
        else "let it end with the run"
    )
    nothing = "" if last else ", which changes no parameter"
    rate = f"the learning rate {last:.3g} ({last / opt.lr:.0%} of lr){nothing}"
    yield f"optimizer.{cause}: updates {first + 1} to {steps} have {rate}; {fix}"


def constant_from(schedule: Callable[[int], Any], start: int, steps: int) -> tuple[int, float]:
    """Return (the count, at least `start`, from which a schedule stays at its last value, that
    value).
    """
    last = float(schedule(steps - 1))
    count = steps - 1
    back = 1
    while count > start:
        earlier = max(start, count - back)
        if float(schedule(earlier)) == last:
            count, back = earlier, 2 * back
        elif back == 1:
            break
        else:
            back = 1
    return count, last


def warn_of_lost_updates(run: Run, config: Config, state: TrainState) -> None:
    """Print a warning if the optimizer rounds small updates of the initial state away."""
    lr = config.optimizer.lr
    share = jax.jit(moving_share)(run.step.trainable(state.params), lr)
    run.log.writer.say(
        f"warning: precision.state: bfloat16: an update of the size of optimizer.lr, {lr:g}, changes {share:.1%} "
        "of the parameters and is rounded away in the others; leave it null for float32, where every update counts"
    )


def reads(run: Run, name: str) -> bool:
    """Return whether an entry of the examples changes anything in the evaluation of a microbatch."""
    first, size = (
        first_example(run.data.train.dataset),
        run.data.train.order.examples_per_microbatch,
    )
    batch = {k: x[None] for k, x in first_microbatch(first, size, None).items()}
    program = jax.make_jaxpr(
        lambda entry, state: sums_of_one(run.step.evaluate)(state, {**batch, name: entry})
    )(batch[name], state_of_one(run.strategy.shapes)).jaxpr
    return dce_jaxpr(program, [True] * len(program.outvars))[1][0]


def layout_of(run: Run, config: Config) -> dict[str, Any]:
    """Return the memory and the sharding of the run on each device, for layout.json."""
    strategy = run.strategy
    order = run.data.train.order
    first = first_example(run.data.train.dataset)
    rows = (config.microbatches, order.examples_per_microbatch)
    batch = {
        name: jax.ShapeDtypeStruct((*rows, *x.shape[1:]), x.dtype) for name, x in first.items()
    }
    batch.setdefault("mask", jax.ShapeDtypeStruct(rows, np.dtype(bool)))
    shard_gradients = config.parallel.zero > 1 and config.parallel.gradient_buffer == "sharded"
    sizes = memory.bytes_by_tree(strategy, run.step, batch, shard_gradients)
    devices, per_device = strategy.assignment.shape
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(strategy.shapes.params)),
        "devices": devices,
        "parts": strategy.parts,
        "microbatches_per_device": per_device,
        "share": strategy.share()._asdict(),
        "bytes_per_device": {name: round(count) for name, count in sizes.items()},
        "program": None,
    }
