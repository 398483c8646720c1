"""Checks before training: trace one update of one microbatch from shapes, to report misfits early;
warn about data that does not suit the model: padding, few rows for BatchNorm, unscaled pixels."""

import collections
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
from jax.tree_util import Partial

from jaxdp.config import Config
from jaxdp.data.dataset import Dataset, probes, read_examples, tokenizer_spec
from jaxdp.data.example_order import RESET
from jaxdp.data.prefetch import read_batches
from jaxdp.errors import UsageError, one_line, user_code
from jaxdp.losses import check, derive_of
from jaxdp.metrics.numbers import known_sign
from jaxdp.metrics.writer import RESERVED
from jaxdp.models.base import CARRY
from jaxdp.optim.interpreter import inside
from jaxdp.parallel.strategy import Strategy
from jaxdp.precision import is_key
from jaxdp.run.components import Parts, apply_model, check_paths, make_the_step
from jaxdp.run.datasets import eval_key, make_order, shapes_of
from jaxdp.run.model_summary import model_flops
from jaxdp.split import path_string
from jaxdp.targets import attribute, targets_in
from jaxdp.train.carry import split_carry
from jaxdp.train.state import TrainState, make_record
from jaxdp.train.step import Replica, Step, first_microbatch

T = TypeVar("T")
OWNERS = {"params": "model: parameter", "opt_state": "optimizer: its state"}
RESERVED_NAMES = ("model_state", "__metadata__")  # in files of weights


def rehearse(
    config: Config, parts: Parts, step: Step, make_state: Partial
) -> tuple[float, dict[str, jex.ClosedJaxpr]]:
    """Trace one update of one microbatch from shapes alone. Raises UsageError if model, data, loss
    or optimizer misfit.

    Returns the model's FLOPs per example, forward and backward, and the traced programs by name.
    """
    with user_code():
        first, state = jax.make_jaxpr(make_state, return_shape=True)()
    check_leaves(state)
    trained = step.trainable(state.params)

    def shapes(updates, opt_state):
        # Updates are added in the dtype of the parameters.
        return jax.tree.flatten(
            (
                jax.tree.map(lambda x: x.shape, updates),
                jax.tree.map(lambda x: (x.shape, x.dtype), opt_state),
            )
        )

    updated = jax.eval_shape(parts.rule.tx.update, trained, state.opt_state, trained)
    if shapes(*updated) != shapes(trained, state.opt_state):
        raise UsageError(
            f"optimizer.target: {config.optimizer.target!r} cannot be used: its update must return updates like the "
            "parameters, and a state like the one that it got, in shapes and dtypes"
        )
    batch = read_batches(parts.dataset, parts.order, [0], np.zeros(1, np.int32))
    with user_code(lambda key: called_with(key, parts, state)):
        grads, sums = jax.make_jaxpr(sums_of_one(step.grads), return_shape=True)(
            state_of_one(state), batch
        )
    update, (_, metrics) = jax.make_jaxpr(step.apply, return_shape=True)(state, sums)
    check_paths(config, state.params)
    check_names(config, parts, metrics)
    check_examples(parts, state, True, read_examples(parts.dataset, probes(parts.dataset)))
    for name, dataset in parts.eval_sets.items():
        own = parts.evaluating(dataset)
        if shapes_of(dataset) != shapes_of(parts.dataset):
            rehearse_evaluation(config, own, state, dataset, eval_key(name))
        check_examples(own, state, False, read_examples(dataset, probes(dataset), eval_key(name)))
    counted = model_flops(
        grads, lambda: jax.make_jaxpr(sums_of_one(step.evaluate))(state_of_one(state), batch)
    )
    programs = {"the initial state": first, "the gradients": grads, "the update": update}
    return counted / batch["mask"].shape[1], programs


def check_leaves(state: TrainState) -> None:
    """Raise UsageError if an array of the state (shapes) cannot be saved, or not be found by its
    name.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    paths = collections.Counter(path_string(key) for key, _ in leaves)
    for key, leaf in leaves:
        path = path_string(key)
        field, _, name = path.partition("/")
        owner = OWNERS.get(field, "model: its state")
        if not leaf.size and field != "exponents":
            raise UsageError(
                f"{owner} {name!r} has shape {leaf.shape}; it is empty and cannot be saved; leave it out"
            )
        if paths[path] > 1:
            raise UsageError(
                f"model: {paths[path]} arrays of {field} have the path {name!r}; rename all but one"
            )
        if re.search("[\ud800-\udfff]", name):
            raise UsageError(
                f"{owner} {name!r} has half a character in its name, which no file can store; rename it"
            )
        if field == "params" and name.partition("/")[0] in RESERVED_NAMES:
            raise UsageError(
                f"{owner} {name!r} has a name that files of weights use for something else; rename it"
            )
        if field == "model_state" and is_key(leaf):
            raise UsageError(
                f"model: its state {name!r} is a random key; use the key of the call instead"
            )


def state_of_one(state: TrainState) -> TrainState:
    """Return the shapes of a state for a program of one microbatch."""

    def one(x):
        return jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)

    seed = jax.ShapeDtypeStruct((), np.dtype(np.uint32))
    return state.replace(kept=jax.tree.map(one, state.kept), seed=seed)


def sums_of_one(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return (state, batch) -> sums of a function of a step on the first microbatch."""

    def sums(state, batch):
        return f(state, batch, Replica(jnp.zeros(1, jnp.int32)))

    return sums


def check_examples(
    parts: Parts, state: TrainState, train: bool, examples: Mapping[str, Any]
) -> None:
    """Raise UsageError if the loss finds that an example does not fit the model's outputs."""
    forward = parts.forward
    if attribute(forward.loss, "check", None) is None:
        return
    shapes = output_shapes(parts, state)
    transform = forward.transform if train else forward.eval_transform
    try:
        check(forward.loss, shapes, examples)
    except UsageError:
        if transform is None:
            raise
        batch = {"mask": np.ones(len(next(iter(examples.values()))), bool), **examples}
        transformed = transform(jax.tree.map(jnp.asarray, batch), jax.random.key(0), train)
        if jnp.isnan(transformed.get("labels", 0.0)).any():
            raise
        check(forward.loss, shapes, transformed)


def output_shapes(parts: Parts, state: TrainState) -> Any:
    """Return the shapes of the model's outputs for a microbatch."""
    example, size = parts.first
    carry, model_state = carry_of_one(state), state.model_state
    if carry is not None:
        model_state = {**model_state, CARRY: carry}

    def outputs(params, model_state):
        batch = first_microbatch(example, size, parts.forward.transform)
        return apply_model(parts.forward, params, model_state, batch, False)[0]

    return jax.eval_shape(outputs, state.params, model_state)


def carry_of_one(state: TrainState) -> Any:
    """Return the shapes of what the model carries from one microbatch to the next, or None."""
    kept = state.kept.get(CARRY)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), kept)


def called_with(key: str, parts: Parts, state: TrainState) -> str:
    """Describe the arguments that the model or the loss was called with."""
    example, size = parts.first
    forward = parts.forward
    batch = jax.eval_shape(
        lambda: forward.policy.inputs(first_microbatch(example, size, forward.transform))
    )
    if key == "model":
        return f"; the batch is {in_words(batch)}"
    if key == "loss":
        outputs = in_words(output_shapes(parts, state))
        return (
            f"; a loss is called as (outputs, batch), here with {outputs} and {in_words(batch)}; one whose second "
            "argument is called labels or targets, as Optax's, as (outputs, labels), and returns a loss of each example"
        )
    return ""


def in_words(tree: Any) -> str:
    """Format shapes and dtypes, such as {inputs: float32[13, 2]}."""
    return str(jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)).replace("'", "")


def rehearse_evaluation(
    config: Config, parts: Parts, state: TrainState, dataset: Dataset, key: str
) -> None:
    """Trace the evaluation of a microbatch whose examples have other shapes or dtypes than those for
    training. Raises UsageError, also if an entry has integers in one of the two sets alone: a model
    of pixels from 0 to 255 takes those from 0 to 1 for black.
    """
    step = make_the_step(config, parts)
    order = make_order(config, dataset, parts.sequential, shuffle=False)
    own, trained = shapes_of(dataset), shapes_of(parts.dataset)
    try:
        for name in own.keys() & trained.keys() - {"labels", "mask"}:
            if len({shapes[name][1].kind in "iub" for shapes in (own, trained)}) > 1:
                raise UsageError(f"{name!r} has integers in one of them")
        batch = read_batches(dataset, order, [0], np.zeros(1, np.int32))
        jax.eval_shape(sums_of_one(step.evaluate), state_of_one(state), batch)
    except Exception as error:

        def listed(shapes):
            return ", ".join(f"{k} {v.name}{list(s[1:])}" for k, (s, v) in shapes.items())

        raise UsageError(
            f"{key}: its examples ({listed(own)}) do not match the training examples ({listed(trained)}): "
            f"{one_line(error)}; make them alike"
        ) from None


def check_names(config: Config, parts: Parts, metrics: Mapping[str, Any]) -> None:
    """Raise UsageError if `checkpoint.best` or the metric of EarlyStopping is not a metric of the
    evaluation, or it is not known which of two values is better.

    metrics: the shapes of those of an update.
    """
    named = [
        ("callbacks.args.metric", args.get("metric", "loss"), args.get("mode"))
        for name, args in targets_in("callbacks", config.callbacks, "callback", "EarlyStopping")
        if name == "EarlyStopping"
    ]
    saving = config.checkpoint
    if saving.best is not None:
        named.append(("checkpoint.best", saving.best, saving.mode))
    if not named:
        return
    derive = derive_of(parts.forward.loss)
    record = make_record({name: np.ones(x.shape) for name, x in metrics.items()}, derive)
    names = {*record} - RESERVED | {"loss"}
    known = sorted(f"{name}/{n}" if name else n for name in parts.eval_sets for n in names)
    for key, metric, mode in named:
        if not known:
            raise UsageError(
                f"{key}: {metric!r}, but the data has no test split; set eval.data, or leave it out"
            )
        if metric not in known:
            raise UsageError(
                f"{key}: {metric!r} is not among the numbers of an evaluation: {', '.join(known)}"
            )
        known_sign(key, metric, mode)


def check_optimizer(config: Config, strategy: Strategy, tx: Any, step: Step) -> None:
    """Raise UsageError, with the optimizer's name, if it does not work with the strategy."""
    try:
        strategy.check(tx, step.trainable(strategy.shapes.params))
    except UsageError as error:
        named = f"optimizer.target: {config.optimizer.target}: "
        raise UsageError(str(error).replace("optimizer: ", named, 1), rank=error.rank) from None


# warn if BatchNorm normalizes by the statistics of fewer rows (Wu and He, arXiv 1803.08494, figure
# 1)
FEW = 8
EXAMPLES = 8  # examples whose values are looked at
# pixels exceed 100, not 255, and are at least 64 in an example
BRIGHT, WHITE, PIXELS = 100, 255, 64
NOT_INPUTS = ("labels", "mask", "segments", RESET)
MOVES = {  # operations that change no value of their first operand
    "broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "gather", "pad", "reduce_precision", "reshape",
    "rev", "slice", "split", "squeeze", "transpose",
}  # fmt: skip
JOINS = {"concatenate", "optimization_barrier", "select_n"}  # the same, of all operands
PRODUCTS = {"conv_general_dilated", "dot_general"}


def data_warnings(config: Config, parts: Parts, state: TrainState, devices: int) -> list[str]:
    """Return the warnings. state: the shapes of the state."""
    warnings = list[str]()
    floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(state.model_state)]
    if any(floats):
        warnings += warnings_of_state(config, parts, state, devices, floats)
    if pixels := pixels_of(parts):
        warnings += warnings_of_scale(parts, state, pixels)
    return warnings


def warnings_of_state(
    config: Config, parts: Parts, state: TrainState, devices: int, floats: list[bool]
) -> Iterator[str]:
    """Warn if averages in the model state count padding, or if BatchNorm normalizes by few rows.

    Computes nothing: the traced model shows what its new state and its outputs depend on. floats:
    which arrays of the model state are averages.
    """
    order = parts.order
    size = order.size
    batch = order.batch_size
    count = order.microbatches
    ragged = size % batch if parts.steps > size // batch else 0
    rows = batch // count * (devices if config.model.args.get("sync") is True else 1)
    if not (ragged or batch % count or rows < FEW):
        return
    program, entries = trace(parts, state, True)
    own = slice(1 + len(entries), 1 + len(entries) + len(floats))  # the state, among the arguments
    of_state = floats + [False] * (len(program.outvars) - len(floats))
    masked, *others = dce_jaxpr(program, of_state)[1]
    if not any(others[: len(entries)]):  # the averages are not of examples
        return
    if (ragged or batch % count) and not masked:
        where = [
            f"{batch} examples are {count} microbatches of {order.examples_per_microbatch}"
        ] * bool(batch % count)
        where += [f"the last batch of an epoch has {ragged} of {batch} examples"] * bool(ragged)
        yield (
            f"model: its state, such as the averages of BatchNorm, counts padding ({' and '.join(where)}); give the "
            f"module an argument mask, or set batch_size to a multiple of {count} that divides {size:,}"
        )
    if rows < FEW:
        training, evaluation = (
            dce_jaxpr(x, [False] * len(floats) + [True] * (len(x.outvars) - len(floats)))[1][own]
            for x in (program, trace(parts, state, False)[0])
        )
        if any(f and e and not t for f, t, e in zip(floats, training, evaluation, strict=True)):
            fewer = f"microbatches to {batch // FEW} or " if batch // FEW >= devices else ""
            yield (
                f"microbatches: {count} of {max(rows, 1)} examples: BatchNorm normalizes each by its own statistics, "
                f"which are poor for fewer than {FEW}; set {fewer}batch_size to {FEW * count} (this changes the "
                "numbers), or use GroupNorm or LayerNorm"
            )


def trace(parts: Parts, state: TrainState, train: bool) -> tuple[jex.Jaxpr, list[str]]:
    """Return the program (mask, other entries of a microbatch, model state, carry, parameters) ->
    (new model state, outputs) of the transform and the model, and the names of the entries."""
    mask, batch = microbatch(parts)

    def apply(mask, batch, model_state, carry, params):
        model_state = model_state if carry is None else {**model_state, CARRY: carry}
        inputs = {**transformed(parts, batch, mask), "mask": mask}
        outputs, new = apply_model(parts.forward, params, model_state, inputs, train)
        return split_carry(new)[0], outputs

    return jax.make_jaxpr(apply)(
        mask, batch, state.model_state, carry_of_one(state), state.params
    ).jaxpr, sorted(batch)


def microbatch(parts: Parts) -> tuple[Any, dict[str, Any]]:
    """Return the shapes of a microbatch's mask, and of its other entries by name, before the
    transform.
    """
    example, size = parts.first
    batch = jax.eval_shape(lambda: first_microbatch(example, size, None))
    return jax.ShapeDtypeStruct(batch.pop("mask").shape, bool), batch


def transformed(parts: Parts, batch: dict[str, Any], mask: Any) -> dict[str, Any]:
    """Return a microbatch as the transform leaves it, which sees no padding: what depends on `mask`
    does so in the model."""
    transform = parts.forward.transform
    batch = {**batch, "mask": jnp.ones(mask.shape, bool)}
    return batch if transform is None else transform(batch, jax.random.key(0), True)


def pixels_of(parts: Parts) -> dict[str, np.ndarray]:
    """Return the inputs that look like pixels from 0 to 255, by name, of some examples."""
    if tokenizer_spec(parts.dataset) is not None:
        return {}
    index = probes(parts.dataset)
    examples = parts.dataset.read(index[:: -(-len(index) // EXAMPLES)])
    inputs = {name: np.asarray(x) for name, x in examples.items() if name not in NOT_INPUTS}
    return {name: values for name, values in inputs.items() if is_pixels(values)}


def warnings_of_scale(
    parts: Parts, state: TrainState, pixels: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """Warn about pixels from 0 to 255 that the model multiplies by weights as they are."""
    names = [*pixels]
    if parts.forward.transform is not None:  # most scale them, which is seen at once
        mask, batch = microbatch(parts)
        program = jax.make_jaxpr(lambda batch: transformed(parts, batch, mask))(batch).jaxpr
        names = [
            name
            for name in names
            if any(follow(program, [key == name for key in sorted(batch)])[0])
        ]
    for name in names:
        program, entries = trace(parts, state, True)
        marks = [False, *(key == name for key in entries)]
        if follow(program, marks + [False] * (len(program.invars) - len(marks)))[1]:
            values = pixels[name]
            fix = (
                "in the transform"
                if parts.forward.transform
                else "as with data.transform: {target: Scale}"
            )
            yield (
                f"data: the model multiplies {name!r} ({values.dtype} up to {values.max():g}) by its weights as it is, "
                f"which trains poorly; divide it by 255, {fix}"
            )


def is_pixels(values: np.ndarray) -> bool:
    """Return whether values [example, ...] look like pixels from 0 to 255."""
    if values.dtype in (np.uint8, np.int8):
        return bool(values.size) and values.max() > BRIGHT
    if (
        not jnp.issubdtype(values.dtype, jnp.number)
        or jnp.iscomplexobj(values)
        or values[0].size < PIXELS
    ):
        return False
    return bool(
        values.min() >= 0 and BRIGHT < values.max() <= WHITE and (values == np.floor(values)).all()
    )


def follow(jaxpr: jex.Jaxpr, marks: list[bool]) -> tuple[list[bool], bool]:
    """Follow the marked arguments through operations that do not change their values.

    Return which results are such values, and whether a matrix product or convolution has one as an
    operand."""
    marked = {v for v, mark in zip(jaxpr.invars, marks, strict=True) if mark}
    product = False

    def is_marked(v):
        return not isinstance(v, jex.Literal) and v in marked

    for eqn in jaxpr.eqns:
        operands = [is_marked(v) for v in eqn.invars]
        if not any(operands):
            continue
        name = eqn.primitive.name
        results = [False] * len(eqn.outvars)
        product |= name in PRODUCTS
        if name in JOINS or (name in MOVES and operands[0]):
            results = [True] * len(eqn.outvars)
        for inner in inside(eqn):
            inner = inner.jaxpr if isinstance(inner, jex.ClosedJaxpr) else inner
            if len(inner.invars) == len(operands):
                inner_results, inner_product = follow(inner, operands)
                product |= inner_product
                results = inner_results if len(inner_results) == len(results) else results
        marked |= {v for v, result in zip(eqn.outvars, results, strict=True) if result}
    return [is_marked(v) for v in jaxpr.outvars], product
