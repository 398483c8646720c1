"""Build a `Run` from a config."""

import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np
from jax.tree_util import Partial

from jaxdp.checkpoint.local import LocalCheckpoints
from jaxdp.checkpoint.published import model_sha256
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.config import Config, Parallel
from jaxdp.config.validation import flatten
from jaxdp.cpu import on_cpu
from jaxdp.data.contents import contents, has_parts
from jaxdp.data.dataset import UNKNOWN
from jaxdp.data.resident import Resident
from jaxdp.errors import UsageError, user_code
from jaxdp.extras import load_extra
from jaxdp.losses import derive_of
from jaxdp.metrics.jsonl import NoEvents
from jaxdp.metrics.meter import throughput
from jaxdp.metrics.writer import Writer
from jaxdp.parallel.placement import assign_microbatches
from jaxdp.parallel.strategy import Strategy
from jaxdp.process import environment, membership
from jaxdp.process.context import SLOW, Context
from jaxdp.run.callbacks import Profile, folder
from jaxdp.run.components import (
    NOTHING,
    STAGES,
    Objects,
    Parts,
    choose_accumulate,
    choose_remat,
    make_parts,
    make_strategy,
    make_the_step,
    set_jax,
    spared,
    state_maker,
)
from jaxdp.run.datasets import Source, eval_key, facts_of, in_updates, make_order, shapes_of
from jaxdp.run.preflight import check_examples, check_optimizer, rehearse
from jaxdp.run.programs import Digest, check_same, digest, lines
from jaxdp.run.rundir import versions
from jaxdp.targets import attribute
from jaxdp.train.run import Data, LoopOptions, Run
from jaxdp.train.state import Batch, TrainState
from jaxdp.train.step import Step

T = TypeVar("T")


class Prepared(NamedTuple):
    """What a run needs on any number of devices.

    contents, eval_contents: of the training set, and of the evaluation sets by key, to compare on
    resume (`jaxdp.data.contents`). facts: what all processes must have alike. flops: of an example,
    forward and backward. programs: digests of those that `rehearse` traces, if they are to be
    compared."""

    parts: Parts
    contents: dict[str, Any]
    eval_contents: dict[str, dict[str, Any]]
    facts: dict[str, str]
    flops: float
    programs: dict[str, Digest]
    make_state: Partial


def prepare(config: Config, objects: Objects = NOTHING, several: bool = False) -> Prepared:
    """Build and check what does not depend on the devices. several: there are other processes to
    compare with.

    Raises UsageError if the config, the data or the model is wrong, or they do not fit.
    """
    parts = make_parts(config, objects)
    with user_code():
        own = contents(parts.dataset, "data" in objects)
        others = {
            eval_key(name): contents(x, "eval.data" in objects)
            for name, x in parts.eval_sets.items()
        }
    same = facts(config, parts, own, others) if several else {}
    make_state = state_maker(config, parts)
    # How many updates that are not finite end a run may differ from start to start.
    same_end = parts._replace(rule=parts.rule._replace(max_nonfinite=10))
    flops, programs = rehearse(config, parts, make_the_step(config, same_end), make_state)
    named = [v for k, v in flatten(config).items() if k.endswith(("target", "schedule"))]
    digests = dict[str, Digest]()
    if several or objects or any("." in str(name) for name in named):  # code of the user's
        digests = {name: digest(lines(program)) for name, program in programs.items()}
    return Prepared(parts, own, others, same, flops, digests, make_state)


def prepare_on_all_ranks(
    config: Config, context: Context, objects: Objects = NOTHING, before: Prepared | None = None
) -> Prepared:
    """Return the result of `prepare`, after all ranks have compared theirs.

    before: that of an earlier run of these processes, which is not made again. Raises UsageError on
    every rank."""
    set_jax(config)
    jax.devices()  # opening them waits for the other processes, so do it outside of `on_all_ranks`
    several = membership.current() is not None  # others may join later, and compare theirs
    prepared = on_all_ranks(context, lambda: before or prepare(config, objects, several))
    if context.size > 1:
        context.check_same("the run", prepared.facts)
        check_same(context, prepared.programs, SLOW)
    return prepared


def make_run(
    config: Config,
    directory: pathlib.Path,
    context: Context,
    objects: Objects = NOTHING,
    prepared: Prepared | None = None,
) -> Run:
    """Build the objects of a run; compute no arrays, write no files.

    Raises UsageError on every rank, if any rank rejects its config, data or model.

    Args:
        objects: see `make_parts`.
        prepared: the result of `prepare_on_all_ranks`, if it was called before.
    """
    saving = config.checkpoint
    prepared = prepared or prepare_on_all_ranks(config, context, objects)
    parts = prepared.parts
    devices = choose_devices(config, context)
    step = step_of(config, parts, len(devices))

    def build():
        strategy = make_strategy(config, parts, prepared.make_state, devices)
        check_optimizer(config, strategy, parts.rule.tx, step)
        return strategy, make_sources(config, parts, strategy, step, context)

    strategy, data = on_all_ranks(context, build)
    spike = config.spike
    rollback_every = (
        spike.every if spike.factor is not None and spike.action == "rollback" else None
    )
    checkpoints = (LocalCheckpoints if saving.local else Checkpoints)(
        directory / "checkpoints",
        saving.keep,
        keep_every=saving.keep_every,
        return_every=rollback_every,
        best=saving.best,
        mode=saving.mode,
        context=context,
        facts={
            **describe_config(config, prepared, objects),
            "spared": spared(config, parts, strategy.shapes.params)
            if config.optimizer.weight_decay
            else [],
            "data_fingerprint": prepared.contents["probes"],
            "data_contents": prepared.contents,
            "eval_contents": prepared.eval_contents,
            "data": facts_of(parts.dataset),
            "saved_by": {
                "processes": context.size,
                "devices": len(devices),
                "backend": config.parallel.backend,
            },
        },
    )
    options = LoopOptions(
        parts.steps,
        steps_per_call=config.steps_per_call
        if len(parts.dataset) < UNKNOWN
        else 1,  # it may end within a call
        log_every=config.log.every,
        eval_every=in_updates("eval.every", config.eval.every, parts.order),
        save_every=in_updates("checkpoint.every", saving.every, parts.order),
        asynchronous=saving.asynchronous,
        max_rollbacks=spike.max_rollbacks,
        rollback_every=rollback_every,
    )
    return Run(
        strategy=strategy,
        step=step,
        data=data,
        checkpoints=checkpoints,
        options=options,
        log=Log(directory),
        derive=derive_of(parts.forward.loss),
    )


@dataclasses.dataclass
class Log:
    """The outputs of a run, besides its checkpoints. `writer` and `events` are opened on root when
    the run starts; they write nothing before.
    """

    directory: pathlib.Path = pathlib.Path()
    writer: Writer = Writer()
    events: NoEvents = NoEvents()


def restore(run: Run, step: int) -> TrainState:
    """Return the state of a checkpoint, as the strategy stores it."""
    return run.strategy.adopt(run.checkpoints.restore(step, run.strategy.abstract()))


def describe_config(config: Config, prepared: Prepared, objects: Objects) -> dict[str, Any]:
    """Return what a checkpoint stores to compare on resume: the config, digests of what it
    computes, and what these depend on although the numbers do not."""
    model = prepared.parts.forward.model
    digests = {name: total for name, (total, _) in prepared.programs.items()}
    if objects:
        digests["the evaluation data"] = fingerprint_of(prepared.eval_contents)
    return {
        "config": dataclasses.asdict(config),
        "folder": os.getcwd(),
        "model_sha256": model_sha256(dataclasses.asdict(config)),
        "versions": versions(),
        "microbatches": config.microbatches,
        "programs": digests,
        "traced": [on_cpu(), choose_accumulate(config), choose_remat(config, model)],
    }


def step_of(config: Config, parts: Parts, devices: int, offset: int = 0) -> Step:
    """Return the step of a run on this number of devices. offset: the number of batches that a
    resumed run has skipped."""
    assignment = assign_microbatches(config.microbatches, devices, config.parallel.exact_group)
    return make_the_step(config, parts, is_padded(config, parts, assignment, offset))


def make_sources(
    config: Config, parts: Parts, strategy: Strategy, step: Step, context: Context
) -> Data:
    """Return the sources for training and evaluation. Raises UsageError."""
    checked = attribute(parts.forward.loss, "check", None) is not None
    first = getattr(next(iter(parts.eval_sets.values()), None), "transform", None)

    def source(dataset, order, train):
        own = parts if train else parts.evaluating(dataset)
        resident = Resident(dataset, strategy) if config.data.on_device else None
        known = checked and (strategy.shares_loss or not train)
        check = functools.partial(check_examples, own, strategy.shapes, train) if known else None

        def evaluation():
            return strategy.compile(step._replace(evaluate=make_the_step(config, own).evaluate))

        shared = train or getattr(dataset, "transform", None) == first
        program = None if shared else functools.cache(evaluation)
        return Source(dataset, order, config.data.workers, resident, check, program, context)

    evaluation_sources = {
        name: source(x, make_order(config, x, parts.sequential, shuffle=False), False)
        for name, x in parts.eval_sets.items()
    }
    return Data(source(parts.dataset, parts.order, True), evaluation_sources, config.eval.ema)


def changes_for(parallel: Parallel, zero: int) -> dict[str, Any]:
    """Return the keys that a run must set to use this ZeRO stage, besides `zero`."""
    backends = [name for name, stages in STAGES.items() if zero in stages]
    changes: dict[str, Any] = {} if parallel.backend in backends else {"backend": backends[0]}
    unused: dict[str, Any] = {} if zero else {"shard_size": None, "rules": {}}
    return changes | {key: value for key, value in unused.items() if getattr(parallel, key)}


class Case(NamedTuple):
    """A strategy over simulated devices and its step; example: the shapes of a microbatch {name:
    [example, ...]}.
    """

    strategy: Strategy
    step: Step
    example: Batch


def make_case(
    config: Config, parts: Parts, zero: int, per_device: int, devices: Sequence[jax.Device]
) -> Case:
    """Build the case that `plan` compiles: a ZeRO stage with `per_device` microbatches on each
    device. The devices may be those of a target, which store nothing.
    """
    parallel = dataclasses.replace(config.parallel, zero=zero, **changes_for(config.parallel, zero))
    if len(devices) > config.microbatches:
        config = dataclasses.replace(config, microbatches=per_device * len(devices))
    config = dataclasses.replace(config, parallel=parallel)
    strategy = make_strategy(config, parts, state_maker(config, parts), devices)
    step = make_the_step(config, parts)
    check_optimizer(config, strategy, parts.rule.tx, step)
    first, size = parts.first
    example: Any = {
        k: jax.ShapeDtypeStruct((size, *v.shape[1:]), v.dtype) for k, v in first.items()
    }
    example.setdefault("mask", jax.ShapeDtypeStruct((size,), np.dtype(np.float32)))
    return Case(strategy, step, example)


def per_example(
    config: Config, parts: Parts, flops: float, devices: Sequence[jax.Device]
) -> dict[str, float]:
    """Return throughput and device utilization for one example per second. flops: per example."""
    shape, dtype = shapes_of(parts.dataset).get("inputs", ((), np.dtype(float)))
    tokens = shape[1] if len(shape) == 2 and np.issubdtype(dtype, np.integer) else None
    dtypes = config.precision
    hardware = load_extra("plan.hardware")
    peak = hardware and hardware.peak_flops(
        devices[0].device_kind, dtypes.compute or dtypes.params, dtypes.matmul
    )
    return throughput(tokens, flops or None, peak and peak * len(devices))


def make_profile(config: Config, directory: pathlib.Path, start: int, steps: int) -> Profile:
    """Return the window of updates to trace, if it lies after `start`; a signal can request
    another.
    """
    profile = Profile(str(folder(directory)), steps=config.profile.steps)
    first = config.profile.start
    if first is not None and start <= first < steps:
        profile.first = first
        profile.steps = min(profile.steps, steps - first)
        profile.ends = (first, first + profile.steps)
    return profile


def on_all_ranks(context: Context, make: Callable[[], T]) -> T:
    """Run `make` on every rank. If any rank fails, all raise the lowest rank's `UsageError`."""
    try:
        result, problem = make(), None
    except UsageError as error:
        result, problem = None, str(error)
    context.agree(problem, SLOW)
    return cast(T, result)


def is_padded(config: Config, parts: Parts, assignment: np.ndarray, offset: int = 0) -> bool:
    """Return True if a batch of this run may have padding or a mask.

    A reduction in groups always has masks, so that its operations do not depend on the run's
    length; a run that may be rolled back reads batches that are not known beforehand. Where the batch
    size changes, the size of an epoch's last batch depends on where the change is.
    """
    order = parts.order
    full_batches = (
        order.size % order.batch_size == 0 or parts.steps + offset <= order.size // order.batch_size
    )
    even_split = order.batch_size % order.microbatches == 0 and (assignment >= 0).all()
    always = config.parallel.in_groups or config.spike.action == "rollback"
    always |= isinstance(config.batch_size, dict)
    return not full_batches or not even_split or always or "mask" in shapes_of(parts.dataset)


def choose_devices(config: Config, context: Context) -> list[jax.Device]:
    devices = jax.devices()
    wanted = config.parallel.devices or len(devices)
    if context.size > 1 and wanted != len(devices):
        raise UsageError(
            f"parallel.devices: {wanted}, but {context.size} processes use all {len(devices)}; leave it null",
            rank=0,
        )
    if wanted > len(devices):
        raise UsageError(
            f"parallel.devices: {wanted}, but there are {len(devices)}; make it smaller"
        )
    return devices[:wanted]


def facts(
    config: Config,
    parts: Parts,
    contents: Mapping[str, Any],
    eval_contents: Mapping[str, Mapping[str, Any]],
) -> dict[str, str]:
    """Return the values that must be equal on every rank: config keys, the package's code, the
    data's fingerprints, flags, and the number of devices. contents: see `Prepared`.
    """
    sets = {"data": parts.dataset, **{eval_key(name): x for name, x in parts.eval_sets.items()}}
    every = {"data": contents, **eval_contents}
    code = hashlib.sha256()
    for file in sorted(pathlib.Path(__file__).parent.parent.rglob("*.py")):
        code.update(file.read_bytes())
    return {
        **{k: repr(v) for k, v in flatten(config).items()},
        "the jaxdp package's code": code.hexdigest()[:16],
        "data fingerprint": contents["probes"],
        "eval data fingerprint": fingerprint_of(eval_contents),
        # no time decides it
        **{f"{key} digest": str(every[key]["all"]) for key, x in sets.items() if has_parts(x)},
        "XLA_FLAGS": environment.flags_of_numbers(),
        "local devices": str(jax.local_device_count()),
    }


def fingerprint_of(contents: Mapping[str, Mapping[str, Any]]) -> str:
    return " ".join(content["probes"] for content in contents.values())
