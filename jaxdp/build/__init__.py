"""Config -> Run: the only place that sees both sides. Everything below it takes plain arguments."""

import collections
import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np

from jaxdp import loop, own_code
from jaxdp.build.known import facts, facts_of_programs, note_of, shapes_of
from jaxdp.build.parts import (
    NOTHING,
    Given,
    Parts,
    check_paths,
    first_microbatch,
    make_order,
    make_parts,
    make_strategy,
    make_the_step,
    set_jax,
    state_maker,
)
from jaxdp.checkpoint import Checkpoints
from jaxdp.config import Config
from jaxdp.data.base import Dataset, fingerprint, probes
from jaxdp.data.prefetch import read_batch
from jaxdp.data.resident import Resident
from jaxdp.distributed.context import Context
from jaxdp.errors import UsageError, one_line
from jaxdp.flops import model_flops
from jaxdp.hardware import peak_flops
from jaxdp.losses import attribute, check
from jaxdp.metrics.throughput import throughput
from jaxdp.metrics.writer import Nothing, Record
from jaxdp.models.base import CARRY
from jaxdp.parallel import STAGES, Strategy
from jaxdp.parallel.base import slot_table
from jaxdp.plan import Case
from jaxdp.precision import cast_floats
from jaxdp.profile import Profile
from jaxdp.rundir import versions
from jaxdp.split import path_string
from jaxdp.step import Step, TrainState, View

T = TypeVar("T")
SLOW = 600.0  # seconds that one rank may take longer than another to read its data


def make_run(
    config: Config, directory: pathlib.Path, context: Context, given: Given = NOTHING, offset: int = 0
) -> loop.Run:
    """The built objects of a config, nothing of them computed yet; writes nothing. given: see `make_parts`.

    offset: batches that a run which goes on has left out.
    """
    set_jax(config)
    jax.devices()  # opened by all together: one that opens them on its way to `together` would wait for the others
    parts = together(context, lambda: make_parts(config, given))
    data = together(context, lambda: checked_fingerprint(parts.dataset))
    context.check_same("the run", facts(config, data))
    devices = choose_devices(config, context)
    table = slot_table(config.microbatches, len(devices))
    padded = is_padded(config, parts, table, offset)
    step, make_state = make_the_step(config, parts, padded), state_maker(config, parts)
    flops = together(context, lambda: rehearsed(config, data, parts, given, step, make_state))
    strategy = make_strategy(config, parts, make_state, devices)
    together(context, lambda: check_optimizer(config, strategy, parts.tx, step))

    def source(dataset: Any, order: Any) -> loop.Source:
        resident = Resident(dataset, strategy) if config.data.on_device else None
        return loop.Source(dataset, order, config.data.workers, resident)

    def sources() -> tuple[loop.Source, loop.Source | None]:
        train = source(parts.dataset, parts.cursor)
        if parts.eval_set is None:
            return train, None
        return train, source(parts.eval_set, make_order(config, parts.eval_set, parts.sequential, shuffle=False))

    training, evaluation = together(context, sources)
    return loop.Run(
        strategy=strategy,
        step=step,
        train=training,
        eval=evaluation,
        steps_per_call=config.steps_per_call,
        steps=parts.steps,
        writer=Nothing(),
        checkpoints=Checkpoints(
            directory / "checkpoints",
            config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every,
            best=config.checkpoint.best,
            context=context,
        ),
        log_every=config.log.every,
        eval_every=config.eval.every,
        save_every=config.checkpoint.every,
        asynchronous=config.checkpoint.asynchronous,
        averaged=config.eval.ema,
        derive=attribute(parts.loss, "derive", lambda means: {}),
        speed=speed(config, parts, flops, devices),
        max_rollbacks=config.spike.max_rollbacks,
        directory=directory,
        facts=facts_of_programs(config, data, parts, given, devices, padded),
        meta={
            "config": dataclasses.asdict(config),
            "versions": versions(),
            "microbatches": config.microbatches,
            "data_fingerprint": data,
            "data": parts.facts,
            "saved_by": {"processes": context.size, "devices": len(devices), "backend": config.parallel.backend},
        },
    )


def make_case(config: Config, parts: Parts, zero: int, slots: int, devices: int, split_as: int) -> Case:
    """What a stage would run on so many devices with `slots` microbatches each; leaves split as `split_as` would."""
    own, stages = config.parallel, [name for name, stages in STAGES.items() if zero in stages]
    backend: Any = own.backend if own.backend in stages else stages[0]
    parallel = dataclasses.replace(own, backend=backend, zero=zero, shard_size=own.shard_size if zero else None)
    if devices != split_as or devices > config.microbatches:
        config = dataclasses.replace(config, microbatches=slots * devices)
    config = dataclasses.replace(config, parallel=parallel)
    if devices > len(jax.devices()):
        raise UsageError(f"--devices: {devices}, but only {len(jax.devices())} could be simulated")
    group = parallel.shard_size or devices
    strategy = make_strategy(
        config,
        parts,
        state_maker(config, parts),
        jax.devices()[:devices],
        split_as=split_as if group == devices else group,
    )
    step = make_the_step(config, parts)
    if zero == own.zero:
        check_optimizer(config, strategy, parts.tx, step)
    places = parts.cursor.examples_per_microbatch
    first = parts.dataset.read(np.zeros(1, np.int64))
    example = {k: jax.ShapeDtypeStruct((places, *v.shape[1:]), v.dtype) for k, v in first.items()}
    example.setdefault("mask", jax.ShapeDtypeStruct((places,), np.dtype(np.float32)))
    return Case(strategy, step, cast(Any, example), zero > 1 and parallel.accumulator == "split")


def speed(config: Config, parts: Parts, flops: float, devices: Sequence[jax.Device]) -> Callable[[float], Record]:
    """What the train records say of the devices' use; flops: of an example."""
    shape, dtype = shapes_of(parts.dataset).get("inputs", ((), np.dtype(float)))
    tokens = shape[1] if len(shape) == 2 and np.issubdtype(dtype, np.integer) else None
    dtypes = config.precision
    peak = peak_flops(devices[0].device_kind, dtypes.compute or dtypes.params, dtypes.matmul)
    return throughput(parts.cursor.examples_per_step, tokens, flops or None, peak and peak * len(devices))


def make_profile(config: Config, directory: pathlib.Path, start: int, steps: int) -> Profile:
    """The traced window, where it lies in what is left to do; a signal asks for another."""
    first, place = config.profile.start, str(directory / "profile")
    if first is None or not start <= first < steps:
        return Profile(place, steps=config.profile.steps)
    return Profile(place, first, min(config.profile.steps, steps - first))


def together(context: Context, make: Callable[[], T]) -> T:
    """What `make` gives on this rank; where it is refused on any, every rank raises the `UsageError` of the lowest."""
    try:
        made, problem = make(), None
    except UsageError as error:
        made, problem = None, str(error)
    context.agree(problem, SLOW)
    return cast(T, made)


def checked_fingerprint(dataset: Dataset) -> str:
    with own_code.said():
        return fingerprint(dataset)


def is_padded(config: Config, parts: Parts, table: np.ndarray, offset: int = 0) -> bool:
    """Whether a batch that this run trains on may have a place without an example, or a mask of its own.

    Exact mode always has masks, for the same operations whatever a run's length; a run that may be rolled back reads
    batches that it does not know beforehand.
    """
    order = parts.cursor
    whole = order.size % order.batch_size == 0 or parts.steps + offset <= order.size // order.batch_size
    dealt = order.batch_size % order.microbatches == 0 and (table >= 0).all()
    never = config.parallel.reduction == "exact" or config.spike.action == "rollback"
    return not whole or not dealt or never or "mask" in shapes_of(parts.dataset)


def choose_devices(config: Config, context: Context) -> list[jax.Device]:
    devices, wanted = jax.devices(), config.parallel.devices
    if wanted is None:
        return devices
    if context.size > 1 and wanted != len(devices):
        raise UsageError(
            f"parallel.devices: {wanted}, but {context.size} processes use all {len(devices)}; leave it null", rank=0
        )
    if wanted > len(devices):
        raise UsageError(f"parallel.devices: {wanted}, but there are {len(devices)}; make it smaller")
    return devices[:wanted]


def check_optimizer(config: Config, strategy: Strategy, tx: Any, step: Step) -> None:
    """UsageError, with its name, where the optimizer cannot do what the strategy asks of it."""
    try:
        strategy.check(tx, step.trainable(strategy.shapes.params))
    except UsageError as error:
        named = f"optimizer.target: {config.optimizer.target}: "
        raise UsageError(str(error).replace("optimizer: ", named, 1), rank=error.rank) from None


def rehearse(config: Config, parts: Parts, step: Step, make_state: Callable[[], TrainState]) -> float:
    """Traces one update of one microbatch, by shape alone: what does not fit is said before anything is made.

    Returns the operations that the model asks for, forward and backward, for an example.
    """
    with own_code.said():
        state = jax.eval_shape(make_state)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            raise UsageError(f"model: parameter {path_string(path)!r} is {leaf.dtype}; only floats have a gradient")
        if not leaf.size:
            raise UsageError(f"model: parameter {path_string(path)!r} has shape {leaf.shape}; it holds nothing")

    try:
        trained = step.trainable(state.params)
        jax.eval_shape(parts.tx.update, trained, state.opt_state, trained)
    except TypeError as error:
        raise UsageError(
            f"optimizer.target: {config.optimizer.target!r} cannot be used: its update needs more than gradients, "
            f"state and parameters ({one_line(error)})"
        ) from None
    batch = read_batch(parts.dataset, parts.cursor, 0, np.zeros(1, np.int32))
    slot = np.zeros(1, np.int32)
    with own_code.said(lambda key: called_with(key, parts, state)):
        grads, sums = jax.make_jaxpr(step.grads, return_shape=True)(view_of_one(state), batch, slot)
    _, metrics = jax.eval_shape(step.apply, state, sums)
    check_paths(config, state.params)
    check_best(config, parts, set(metrics))
    check_examples(parts, state)
    if parts.eval_set is not None:
        rehearse_evaluation(config, parts, step, state)
    counted = model_flops(grads, lambda: jax.make_jaxpr(step.evaluate)(view_of_one(state), batch, slot))
    return counted / parts.cursor.examples_per_microbatch


def view_of_one(state: TrainState) -> View:
    """The shapes of what a program for one microbatch sees of a state."""
    one = lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
    return state.view._replace(carry=jax.tree.map(one, state.carry))


def rehearsed(
    config: Config, data: str, parts: Parts, given: Given, step: Step, make_state: Callable[[], TrainState]
) -> float:
    """What `rehearse` gives, or gave when a run of the same code, config and shapes was rehearsed before."""
    note = note_of(config, data, parts, given)
    with contextlib.suppress(TypeError, ValueError):
        return float(note.read())  # type: ignore[arg-type]
    flops = rehearse(config, parts, step, make_state)
    note.write(repr(flops))
    return flops


def check_examples(parts: Parts, state: TrainState) -> None:
    """UsageError where one of a few examples does not fit the model's outputs, as the loss sees them."""
    if attribute(parts.loss, "check", None) is None:
        return
    examples = parts.dataset.read(probes(parts.dataset))
    shapes = output_shapes(parts, state, examples)
    try:
        check(parts.loss, shapes, examples)
    except UsageError:
        if parts.transform is None:
            raise
        mask = {"mask": np.ones(len(next(iter(examples.values()))), bool)}
        check(
            parts.loss,
            shapes,
            parts.transform(jax.tree.map(jax.numpy.asarray, mask | examples), jax.random.key(0), True),
        )


def output_shapes(parts: Parts, state: TrainState, examples: dict[str, np.ndarray]) -> Any:
    """Those of the model's outputs for a microbatch."""
    carry = state.carry

    def outputs(params: Any, model_state: Any) -> Any:
        batch = first_microbatch(examples, parts.cursor.examples_per_microbatch, parts.transform)
        params = cast_floats(params, parts.policy.compute)
        return parts.model.apply(params, model_state, parts.policy.inputs(batch), jax.random.key(0), False)[0]

    def first(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    of_model = state.model_state if carry is None else {**state.model_state, CARRY: jax.tree.map(first, carry)}
    return jax.eval_shape(outputs, state.params, of_model)


def called_with(key: str, parts: Parts, state: TrainState) -> str:
    """What the model or the loss got in a rehearsal, in words."""
    examples = parts.dataset.read(np.zeros(1, np.int64))
    batch = jax.eval_shape(
        lambda: parts.policy.inputs(first_microbatch(examples, parts.cursor.examples_per_microbatch, parts.transform))
    )
    if key == "model":
        return f"; the batch is {in_words(batch)}"
    if key == "loss":
        outputs = in_words(output_shapes(parts, state, examples))
        return f"; a loss is called as (outputs, batch), here with {outputs} and {in_words(batch)}"
    return ""


def in_words(tree: Any) -> str:
    """Shapes and dtypes, such as {inputs: float32[13, 2]}."""
    return str(jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)).replace("'", "")


def rehearse_evaluation(config: Config, parts: Parts, step: Step, state: TrainState) -> None:
    """Traces the evaluation of a microbatch whose examples have other shapes than those to train on."""
    assert parts.eval_set is not None
    ours, others = shapes_of(parts.dataset), shapes_of(parts.eval_set)
    if ours == others:
        return
    order = make_order(config, parts.eval_set, parts.sequential, shuffle=False)
    try:
        slot = np.zeros(1, np.int32)
        jax.eval_shape(step.evaluate, view_of_one(state), read_batch(parts.eval_set, order, 0, slot), slot)
    except Exception as error:
        shapes = [", ".join(f"{k} {v.name}{list(s[1:])}" for k, (s, v) in x.items()) for x in (others, ours)]
        raise UsageError(
            f"eval.data: its examples ({shapes[0]}) do not fit what is trained on ({shapes[1]}): {one_line(error)}"
        ) from None


def check_best(config: Config, parts: Parts, metrics: set[str]) -> None:
    """UsageError where `checkpoint.best` is none of the numbers of an evaluation."""
    best, of_updates = config.checkpoint.best, {"grad_norm", "nonfinite_grads", "weight", "lr", "loss_scale"}
    if best is None:
        return
    if parts.eval_set is None:
        raise UsageError(f"checkpoint.best: {best!r}, but the data has no test split; set eval.data, or leave it null")
    metrics |= set(attribute(parts.loss, "derive", lambda means: {})(collections.defaultdict(float)))
    known = sorted(n for n in metrics - of_updates if not n.startswith(("skipped", "halted", "disagreeing")))
    if best not in known:
        raise UsageError(f"checkpoint.best: {best!r} is not among the numbers of an evaluation: {', '.join(known)}")
