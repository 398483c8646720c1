"""The output of a run before its first update: files in its directory, a summary on the console,
and warnings.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from jaxdp.checkpoint.manifest import Meta
from jaxdp.checkpoint.published import check_unchanged
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.config import Config
from jaxdp.config.validation import as_saved, changed_numbers, flatten
from jaxdp.data.contents import EARLIER, difference, partly
from jaxdp.data.dataset import UNKNOWN, first_example
from jaxdp.data.example_order import RESET
from jaxdp.errors import UsageError
from jaxdp.extras import extras_of, load_extra
from jaxdp.metrics import safe_print
from jaxdp.metrics.console import Console
from jaxdp.metrics.jsonl import JsonLines
from jaxdp.metrics.numbers import size, table
from jaxdp.metrics.writer import Many, Writer
from jaxdp.metrics.writers import make_writers
from jaxdp.models.base import CARRY
from jaxdp.optim import OPTIMIZERS, SCHEDULES
from jaxdp.optim.evaluation import evaluation_arrays
from jaxdp.optim.optimizers import moving_share
from jaxdp.optim.schedule import rate_of
from jaxdp.parallel.placement import state_shapes
from jaxdp.process.context import Context
from jaxdp.run import model_summary, rundir
from jaxdp.run.build import Prepared, on_all_ranks
from jaxdp.run.callbacks import EarlyStopping
from jaxdp.run.components import Objects, describe_groups, schedule_of
from jaxdp.run.datasets import in_updates
from jaxdp.run.driver import Training
from jaxdp.run.preflight import data_warnings, state_of_one, sums_of_one
from jaxdp.split import leaves_by_path
from jaxdp.targets import OF_SCRIPT
from jaxdp.train.run import Run
from jaxdp.train.state import TrainState, floats
from jaxdp.train.step import first_microbatch

DIFF = "git.diff"
LONGEST_DIFF = 200_000  # bytes of the diff
GIT_TIMEOUT = 1.0  # seconds, for a command
SAFE = ("git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false")  # start no other program


def git_facts(directory: pathlib.Path) -> dict[str, Any]:
    """Write the uncommitted changes of tracked files to `directory`/git.diff and return {"git":
    {"commit", "changed"}}.

    Of the repository of the current directory. Empty if it is none, git is missing, or a command
    takes longer than GIT_TIMEOUT."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}

    def ask(*command):
        """Return the first LONGEST_DIFF bytes, and one more if there are any, of what git prints;
        None if it fails or is killed."""
        with subprocess.Popen(
            [*SAFE, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        ) as process:
            killing = threading.Timer(GIT_TIMEOUT, process.kill)
            killing.start()
            assert process.stdout is not None
            answer = process.stdout.read(LONGEST_DIFF + 1)
            if is_cut := len(answer) > LONGEST_DIFF:
                process.kill()
        killing.cancel()
        return answer if is_cut or process.returncode == 0 else None

    commit = diff = None
    with contextlib.suppress(OSError):  # there is no git
        commit = ask("rev-parse", "HEAD")
        diff = ask("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    with contextlib.suppress(OSError):  # a full disk
        if not (commit and diff):
            (directory / DIFF).unlink(missing_ok=True)
        else:
            if len(diff) > LONGEST_DIFF:
                diff = diff[: diff.rfind(b"\n", 0, LONGEST_DIFF) + 1] + b"[cut]\n"
            with rundir.replaced(directory / DIFF, private=True) as new:  # it may have passwords
                new.write_bytes(diff)
    if commit and diff is not None:
        return {"git": {"commit": commit.decode().strip(), "changed": bool(diff)}}
    return {}


FIX = (
    "choose another run_dir (None is a temporary one), replace the run with overwrite=True, or continue it anyway "
    "with resume={'force': True}"
)
FIX_OF_COMMAND = "choose another --run_dir, or continue anyway with --resume.force true"
CODE = {  # what is compared -> what decides it; the first one that differs is named
    "the gradients": "the model, the loss or a transform",
    "the update": "the optimizer",
    "the initial state": "the initial state of the model or the optimizer",
    "the evaluation data": "the evaluation data",
}


def check_same_run(
    saved: Meta,
    now: Meta,
    config: Config,
    step: int,
    objects: Collection[str],
) -> None:
    """Raise UsageError if the checkpoint of `step` was trained with other values, data or objects.

    saved, now: the metadata of that checkpoint, and of this run. objects: the config keys for which
    a script passed objects; other code of the user has a dotted path, and a change of it is only a
    warning. Code is compared by what JAX traces of it, which another version or platform may trace
    differently."""
    spares = config.optimizer.weight_decay and sorted(spared_by(saved)) != sorted(now["spared"])
    changed = changed_numbers(saved["config"], config, () if spares else ("optimizer.no_decay",))
    if digests := difference(saved_contents(saved), now["data_contents"]):
        changed += [f"data fingerprint: {digests}", *moved(config, saved.get("folder"))]
    if changed:
        growing = ""
        if any(line.startswith(("steps: ", "epochs: ")) for line in changed):
            growing = ", as the schedule ends there unless optimizer.schedule_steps is set at first"
        raise UsageError(
            f"{'; '.join(changed)}: this run was trained to step {step} with the old value, which changes "
            f"the numbers{growing}; put it back, {FIX if objects else FIX_OF_COMMAND}"
        )
    if any(saved.get(key) != now[key] for key in ("versions", "traced")):
        if objects:
            text = "as JAX, another package, the platform, accumulate or remat differs"
            safe_print.say(
                f"warning: the script's objects are not compared with those trained to step {step}, {text}"
            )
        return
    old, new = saved["programs"], now["programs"]
    differing = [key for key in CODE if key in new and old.get(key, new[key]) != new[key]]
    if not differing:
        return
    name = CODE[differing[0]]
    if objects:
        raise UsageError(
            f"{name} is not the one that this run was trained with to step {step}; put it back, {FIX}"
        )
    safe_print.say(
        f"warning: {name} has changed since this run was trained to step {step}; the result may not be that of the "
        "current code (another --run_dir starts over)"
    )


def moved(config: Config, folder: str | None, lost: bool = False) -> list[str]:
    """Return "KEY: PATH is FILE, but was FILE" of relative paths that mean other files than where
    the run started.

    folder: the working directory of that start, None if it is unknown. lost: only those that mean
    no file here."""
    texts, here = list[str](), os.getcwd()
    for key, value in flatten(config).items():
        if folder is None or ".args." not in key or not isinstance(value, str) or not value:
            continue
        old, new = (os.path.join(top, os.path.expanduser(value)) for top in (folder, here))
        exists = os.path.exists(new)
        if os.path.exists(old) and not (exists and (lost or os.path.samefile(old, new))):
            texts.append(
                f"{key}: {value!r} is {new!r} here, but was {old!r} where the run was started ({folder!r})"
            )
    return texts


def check_paths(config: Config, directory: pathlib.Path) -> None:
    """Raise UsageError if relative paths of a run that resumes mean files that are only where it
    was started.
    """
    if Checkpoints(directory / "checkpoints").steps() and (
        texts := moved(config, rundir.folder(directory), lost=True)
    ):
        raise UsageError(f"{'; '.join(texts)}; run the command there, or choose another --run_dir")


def saved_contents(saved: Meta) -> Meta:
    """Return the contents of the training data in the metadata of a checkpoint."""
    return saved.get("data_contents", {**EARLIER, "probes": saved["data_fingerprint"]})


def compare_contents(saved: Meta, now: Meta, step: int) -> list[str]:
    """Return the keys of the evaluation sets that have changed since the checkpoint of `step`;
    print a line about them, and one about what was not compared."""
    old = saved.get("eval_contents")
    new = now["eval_contents"]
    pairs = {"data": (saved_contents(saved), now["data_contents"])}
    pairs |= {key: (old[key], content) for key, content in new.items() if old and key in old}
    unknown = [f"{key} (none of it)" for key in new if old is None]
    some = [f"{key} ({text})" for key, pair in pairs.items() if (text := partly(*pair))]
    if some or unknown:
        safe_print.say(
            f"compared only in part with the data of step {step}: {', '.join(some + unknown)}"
        )
    changed = [key for key, pair in pairs.items() if key != "data" and difference(*pair)]
    if changed:
        safe_print.say(
            f"warning: {' and '.join(changed)}: the examples have changed since step {step} was evaluated; earlier "
            "metrics are of the old ones, the next evaluation is of the new ones"
        )
    return changed


def spared_by(saved: Meta) -> list[str]:
    """Return the paths of the parameters without weight decay; a checkpoint older than this fact
    has expressions.
    """
    if "spared" in saved:
        return saved["spared"]
    names = [path.removeprefix("params/") for path in saved["state"] if path.startswith("params/")]
    patterns = saved["config"]["optimizer"]["no_decay"]
    return [name for name in names if any(re.search(x, name) for x in patterns)]


def resume_step(
    run: Run,
    config: Config,
    context: Context,
    objects: Objects,
    tidy: bool = True,
    only: int | None = None,
) -> tuple[int, dict[str, Any]]:
    """Return (the step of the checkpoint to resume from, its metadata), or (0, {}) without a
    checkpoint.

    tidy, only: see `Checkpoints.latest`.
    The metadata has "changed" if `eval`, the evaluation data or `callbacks` differ from those that
    it was saved with. Raises UsageError if the config, the data or an object of a script would
    change the numbers, unless resume.force."""
    start = run.checkpoints.latest(safe_print.say, tidy, only=only)
    return (start, compared(run, config, context, objects, start)) if start else (0, {})


def compared(
    run: Run, config: Config, context: Context, objects: Objects, start: int
) -> dict[str, Any]:
    """Return the metadata of the checkpoint to resume from; see `resume_step`."""
    checkpoints = run.checkpoints
    saved = context.of_root("meta", lambda: checkpoints.meta(start))
    force = config.resume.force
    ordered = "order" in saved["config"].get("data", {})
    if not force and run.data.train.order.sequential and not ordered:
        raise UsageError(
            "data.order: shuffled, as before this key existed -> sequential, because the model carries state; set "
            "data.order to shuffled, or choose another --run_dir",
            rank=0,
        )

    def check():
        try:
            if context.is_root:
                check_unchanged(saved)
                check_same_run(saved, checkpoints.facts, config, start, objects)
        except UsageError as error:
            if not force:
                raise
            safe_print.say(f"warning: resume.force: {error}")

    on_all_ranks(context, check)
    changed = context.of_root("contents", lambda: compare_contents(saved, checkpoints.facts, start))
    old, new = as_saved(saved["config"] | saved.get("evaluated_with", {}), config)
    for tree in (old, new):
        section = tree["eval"]
        section["every"] = in_updates("eval.every", section["every"], run.data.train.order)
    if changed or old["eval"] != new["eval"] or old["callbacks"] != new["callbacks"]:
        # the callback that stopped it may be gone
        saved |= {"stopped": None, "evaluated": False, "changed": True}
    return saved


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
    directory = run.log.directory
    if not training.continuation.runs:
        rundir.write_layout(directory, layout)
        training.layout = layout
    start = training.progress.step
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
            **git_facts(directory),
        },
    )
    params = run.strategy.shapes.params
    rows = model_summary.arrays(run.strategy.shapes, run.step.trainable(params))
    rundir.write(directory / "model.txt", model_summary.text(config.model.target, rows) + "\n")
    optimizers = {**OPTIMIZERS, **objects.get("optimizer", {})}
    groups = describe_groups(config, prepared.parts, params, optimizers)
    facts = summary(run, config, start, layout, groups)
    console = Console(
        run.options.steps, start, context.launcher == "none", {"title": directory.name, **facts}
    )
    events = run.checkpoints.events
    events.tell = console.happened
    console.advised = config.data.on_device  # the console would advise to set it
    was_evaluated = training.progress.evaluated == start
    lines = JsonLines(
        directory / "metrics.jsonl", start, was_evaluated, "evaluate" in run.due(start)
    )
    writers: list[Writer] = [lines, console]
    if report := load_extra("report.html"):
        writers.append(report.Reports(directory, events))
    if config.log.writers:
        writers += make_writers(config.log.writers, directory, start, dataclasses.asdict(config))
    writer = Many(writers)
    if console.panel is None:
        writer.say("\n".join(table([*facts.items()])))
    for text in advice(run, config, prepared, start, training.callbacks.callbacks):
        writer.say(f"warning: {text}")
    return writer


def summary(
    run: Run, config: Config, start: int, layout: dict[str, Any], groups: str
) -> dict[str, str]:
    """Return the lines of a run's summary by name. start: the update after which it starts.
    groups: what weight decay and Muon apply to.
    """
    context = run.checkpoints.context
    devices = run.strategy.devices
    parallel = config.parallel
    opt = config.optimizer
    data = run.data.train
    per_call = run.options.steps_per_call
    model = f"{config.model.target}, {layout['parameters']:,} parameters"

    length = "a stream of unknown length"
    if (examples := len(data.dataset)) < UNKNOWN:
        length = f"{examples:,} examples, {data.order.steps_per_epoch:,} updates an epoch"
    sizes = [
        f"{len(x.dataset):,}{f' ({name})' if name else ''}" for name, x in run.data.eval.items()
    ]
    evaluates = f"; evaluates on {' and '.join(sizes)}" if sizes else ""
    # what the sets were made of, and what was passed over, of those that report it
    sets = {"read": data} | {f"read {name or 'eval'}": x for name, x in run.data.eval.items()}
    inventories = {name: getattr(x.dataset, "inventory", "") for name, x in sets.items()}

    rate = f"{opt.target}, from the script"
    if not opt.target.startswith(f"{OF_SCRIPT} "):
        rate = f"{opt.target}, lr {opt.lr:g} {name_of_schedule(config)}"
    calls = f", {per_call} a call" if per_call > 1 else ""
    several = len(set(context.hosts))
    hosts = f" on {several} hosts" if several > 1 else ""
    counts = {
        text: n for name, text in TREES.items() if (n := layout["bytes_per_device"].get(name))
    }
    each = ", ".join(f"{text} {size(count)}" for text, count in counts.items())
    lines = {
        "run": f"{f'resumes after step {start}' if start else 'starts'} in {run.log.directory}",
        "model": model,
        "data": f"{config.data.target}, {length}{evaluates}",
        **inventories,
        "batch": f"{config.batch_size} examples in {config.microbatches} microbatches of "
        f"{data.order.examples_per_microbatch:,}",
        "optimizer": f"{rate}, {run.options.steps:,} updates{calls}",
        "groups": groups,
        "devices": f"{len(devices)} x {devices[0].device_kind} in {context.size} "
        f"process{'es' * (context.size > 1)}{hosts} ({context.launcher})",
        "layout": f"{parallel.backend}, zero {parallel.zero}{sharding(run, config)}; reduction {parallel.reduction}",
        # of each tree; layout.json has activations, once the program is compiled
        "memory": each and f"{size(sum(counts.values()))} a device, without activations: {each}",
    }
    return {name: text for name, text in lines.items() if text}


def name_of_schedule(config: Config) -> Any:
    schedule = config.optimizer.schedule
    return schedule if isinstance(schedule, str) else schedule.get("target")


def sharding(run: Run, config: Config) -> str:
    """Return the share of the state that is sharded; "" if ZeRO is off or has a single shard."""
    if run.strategy.parts < 2 or not config.parallel.zero:
        return ""
    share = run.strategy.share()
    text = f": {share.split:.1%} of the state in {run.strategy.parts} shards"
    if share.replicated:
        text += f", {share.replicated} leaves that do not divide stay replicated"
    return text


def advice(
    run: Run, config: Config, prepared: Prepared, start: int = 0, callbacks: Sequence[Any] = ()
) -> Iterator[str]:
    """Yield warnings about settings that waste the devices, with better values. start: the update
    after which the run starts.
    """
    strategy, data = run.strategy, run.data.train
    devices, per_device = strategy.assignment.shape
    batch = config.largest_batch
    microbatches = config.microbatches
    padded = microbatches * data.order.examples_per_microbatch
    if 1 - batch / padded > EMPTY:
        yield (
            f"batch_size: {batch} is padded to {padded} ({microbatches} microbatches of "
            f"{data.order.examples_per_microbatch}); use {padded} to avoid the padding (this changes the numbers)"
        )
    if batch > data.order.size:
        yield (
            f"batch_size: {batch} is beyond the {data.order.size} examples of the data: each update takes all of them; "
            f"the other {batch - data.order.size} are padding; make it {data.order.size} or smaller"
        )
    for extra in extras_of(config):
        yield from extra.advice(run)
    shapes, example = strategy.shapes, first_example(data.dataset)
    if CARRY in shapes.kept and not data.order.sequential and RESET not in example:
        yield (
            "data.order: shuffled: the model carries state, and each example starts with that of an unrelated one; "
            "give the examples a true 'reset', or set order to sequential"
        )
    if "segments" in example and not reads(run, "segments"):
        yield "data: the model ignores its segments and reads across documents; use one such as GPT instead"
    yield from data_warnings(config, prepared.parts, shapes, devices)
    opt = config.optimizer
    steps = run.options.steps
    of_script = opt.target.startswith(f"{OF_SCRIPT} ")
    if not of_script and opt.warmup_steps > steps:
        yield (
            f"optimizer.warmup_steps: {opt.warmup_steps}, but the run ends after {steps} updates: the warm-up is cut "
            f"off there, at {steps / opt.warmup_steps:.0%} of lr; make it shorter"
        )
    if opt.final_lr and opt.schedule in ("constant", "one_cycle"):
        yield f"optimizer.final_lr: {opt.final_lr} has no effect with the schedule {opt.schedule}"
    if opt.warmup_steps and opt.schedule == "one_cycle":
        yield "optimizer.warmup_steps: one_cycle begins with its own warm-up; set it to 0 to have only one"
    # The built-in ones all use the rate, and the built-in schedules end with the run.
    built_in = (
        opt.target in OPTIMIZERS
        and opt.schedule in [*SCHEDULES]
        and steps <= (opt.schedule_steps or steps)
    )
    if not (of_script or built_in):
        yield from rate_advice(run, config, prepared, start)
    if evaluation_arrays(shapes.opt_state) and jax.tree.leaves(floats(shapes.model_state)):
        yield (
            f"optimizer.target: {opt.target} evaluates other parameters than it trains, but the model's statistics, as "
            "of BatchNorm, belong to the latter; use a norm without statistics"
        )
    waiting = [type(x).__name__ for x in callbacks if isinstance(x, EarlyStopping)]
    waiting += ["checkpoint.best"] * bool(config.checkpoint.best)
    if steps > 1 and (run.options.eval_every or steps) >= steps:
        for name in waiting:
            yield f"eval.every: {config.eval.every or 'null'} gives {name} only one evaluation; set it below {steps}"
    idle = 1 - microbatches / (devices * per_device)
    if idle > IDLE:
        yield (
            f"microbatches: {microbatches} do not divide evenly over {devices} devices, which are idle {idle:.0%} of "
            f"the time on average; use {devices * per_device} (this changes the numbers)"
        )


def rate_advice(run: Run, config: Config, prepared: Prepared, start: int) -> Iterator[str]:
    """Yield a warning if the optimizer does not use the config's rate, or if the schedule ends
    before the run.
    """
    opt = config.optimizer
    steps = run.options.steps
    shapes = state_shapes(prepared.make_state)
    rule = prepared.parts.rule
    params = rule.trainable(shapes.params)
    rate = jax.eval_shape(functools.partial(rate_of, rule.tx), params, shapes.opt_state, params)
    if rate is None:
        yield (
            f"optimizer.lr: {opt.lr:g} and its schedule have no effect: {opt.target} has a rate of its own; set that "
            "one in optimizer.args (lr is recorded only if the optimizer's state has it)"
        )
        return
    ended = (opt.schedule_steps or steps) < steps
    # optax.MultiSteps counts fewer updates
    several = any(path.endswith("mini_step") for path in leaves_by_path(shapes.opt_state))
    known = opt.schedule in [*SCHEDULES] and (not ended or opt.schedule == "constant")
    if not opt.lr or several or known:
        return
    # The rate of the first update of a warm-up may be that of the last one, 0.
    start = max(start, opt.warmup_steps)
    first, last = constant_from(jax.jit(schedule_of(config, steps)), start, steps)
    last *= abs(last) > 1e-6 * opt.lr  # a line may end at a rounding error
    if steps - first < 2 or (last and (first == start or not ended)):
        return
    if ended:
        cause = f"schedule_steps: {opt.schedule_steps}"
        fix = f"set schedule_steps to {steps}, or final_lr to what the rest needs"
    else:
        cause, fix = f"schedule: {name_of_schedule(config)}", "let it end with the run"
    yield (
        f"optimizer.{cause}: updates {first + 1} to {steps} have the learning rate {last:.3g} ({last / opt.lr:.0%} of "
        f"lr){'' if last else ', which changes no parameter'}; {fix}"
    )


def constant_from(schedule: Callable[[int], Any], start: int, steps: int) -> tuple[int, float]:
    """Return (the count, at least `start`, from which a schedule stays at its last value, that
    value).
    """
    count, back = steps - 1, 1
    last = float(schedule(count))
    while count > start:
        earlier = max(start, count - back)
        if float(schedule(earlier)) == last:
            count, back = earlier, 2 * back
        elif back == 1:
            break
        else:
            back = 1
    return count, last


def warn_of_lost_updates(run: Run, lr: float, state: TrainState) -> None:
    """Print a warning if the optimizer rounds small updates of the initial state away."""
    share = jax.jit(moving_share)(run.step.trainable(state.params), lr)
    run.log.writer.say(
        f"warning: precision.state: bfloat16: an update of the size of optimizer.lr, {lr:g}, changes {share:.1%} "
        "of the parameters and is rounded away in the others; leave it null for float32, where every update counts"
    )


def reads(run: Run, name: str) -> bool:
    """Return whether an entry of the examples changes anything in the evaluation of a microbatch."""
    data = run.data.train
    first, size = first_example(data.dataset), data.order.examples_per_microbatch
    batch = {k: x[None] for k, x in first_microbatch(first, size, None).items()}

    def evaluate(entry, state):
        return sums_of_one(run.step.evaluate)(state, {**batch, name: entry})

    program = jax.make_jaxpr(evaluate)(batch[name], state_of_one(run.strategy.shapes)).jaxpr
    return dce_jaxpr(program, [True] * len(program.outvars))[1][0]


def layout_of(run: Run, config: Config) -> dict[str, Any]:
    """Return the memory and the sharding of the run on each device, for layout.json."""
    strategy = run.strategy
    data = run.data.train
    first = first_example(data.dataset)
    rows = (config.microbatches, data.order.examples_per_microbatch)
    batch = {
        name: jax.ShapeDtypeStruct((*rows, *x.shape[1:]), x.dtype) for name, x in first.items()
    }
    batch.setdefault("mask", jax.ShapeDtypeStruct(rows, np.dtype(bool)))
    prediction = load_extra("plan.prediction")
    sizes = prediction.bytes_by_tree(strategy, run.step, batch) if prediction else {}
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
