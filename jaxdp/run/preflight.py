"""Checks before training: trace one update of one microbatch from shapes, to report misfits early."""

import collections
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from jaxdp.config import Config
from jaxdp.data.dataset import Dataset, probes, read_examples
from jaxdp.data.prefetch import read_batch
from jaxdp.errors import UsageError, one_line, user_code, user_lines
from jaxdp.losses import check
from jaxdp.metrics.writer import RESERVED
from jaxdp.models.base import CARRY
from jaxdp.parallel.strategy import Strategy
from jaxdp.precision import is_key
from jaxdp.run.components import Parts, apply_model, check_paths, make_the_step
from jaxdp.run.datasets import eval_key, make_order, shapes_of
from jaxdp.run.flops import model_flops
from jaxdp.split import path_string
from jaxdp.targets import attribute, targets_in
from jaxdp.train.metric_sums import WEIGHT
from jaxdp.train.state import Batch, TrainState
from jaxdp.train.step import Replica, Step, first_microbatch

T = TypeVar("T")
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

    def shapes(tree):
        return jax.tree.map(lambda x: x.shape, tree)

    updated = shapes(jax.eval_shape(parts.rule.tx.update, trained, state.opt_state, trained))
    if updated != (shapes(trained), shapes(state.opt_state)):
        raise UsageError(
            f"optimizer.target: {config.optimizer.target!r} cannot be used: its update must return updates like the "
            "parameters, and a state like the one that it got"
        )
    batch = read_batch(parts.dataset, parts.order, 0, np.zeros(1, np.int32))
    with user_code(lambda key: called_with(key, parts, state)):
        grads, sums = jax.make_jaxpr(sums_of_one(step.grads), return_shape=True)(
            state_of_one(state), batch
        )
    update, (_, metrics) = jax.make_jaxpr(step.apply, return_shape=True)(state, sums)
    check_paths(config, state.params)
    check_names(config, parts, set(metrics))
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
    return counted / parts.order.examples_per_microbatch, programs


def check_leaves(state: TrainState) -> None:
    """Raise UsageError if an array of the state (shapes) cannot be saved, or not be found by its
    name.
    """
    leaves = [
        (path_string(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]
    paths = collections.Counter(path for path, _ in leaves)
    for path, leaf in leaves:
        field, _, name = path.partition("/")
        owner = {"params": "model: parameter", "opt_state": "optimizer: its state"}.get(
            field, "model: its state"
        )
        if not leaf.size and field != "exponents":
            raise UsageError(
                f"{owner} {name!r} has shape {leaf.shape}; it is empty and cannot be saved; leave it out"
            )
        if paths[path] > 1:
            several = "parameters" if field == "params" else f"arrays of {field}"
            raise UsageError(
                f"model: {paths[path]} {several} have the path {name!r}; rename all but one"
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

    def one(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)

    seed = jax.ShapeDtypeStruct((), np.dtype(np.uint32))
    return state.replace(kept=jax.tree.map(one, state.kept), seed=seed)


def sums_of_one(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return (state, batch) -> sums of a function of a step on the first microbatch."""

    def sums(state: TrainState, batch: Batch) -> Any:
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

    def outputs(params: Any, model_state: Any) -> Any:
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
        return f"; a loss is called as (outputs, batch), here with {outputs} and {in_words(batch)}"
    return ""


def in_words(tree: Any) -> str:
    """Format shapes and dtypes, such as {inputs: float32[13, 2]}."""
    return str(jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)).replace("'", "")


def rehearse_evaluation(
    config: Config, parts: Parts, state: TrainState, dataset: Dataset, key: str
) -> None:
    """Trace the evaluation of a microbatch whose examples have other shapes than those for
    training.
    """
    ours = shapes_of(parts.dataset)
    others = shapes_of(dataset)
    step = make_the_step(config, parts)
    order = make_order(config, dataset, parts.sequential, shuffle=False)
    try:
        number = np.zeros(1, np.int32)
        jax.eval_shape(
            sums_of_one(step.evaluate), state_of_one(state), read_batch(dataset, order, 0, number)
        )
    except Exception as error:
        is_explained = isinstance(error, UsageError) or user_lines(error)
        reason = f": {one_line(error)}" if is_explained else "; make them alike"
        shapes = [
            ", ".join(f"{k} {v.name}{list(s[1:])}" for k, (s, v) in x.items())
            for x in (others, ours)
        ]
        raise UsageError(
            f"{key}: its examples ({shapes[0]}) do not match the training examples ({shapes[1]}){reason}"
        ) from None


def check_names(config: Config, parts: Parts, metrics: set[str]) -> None:
    """Raise UsageError if `checkpoint.best` or the metric of EarlyStopping is not a metric of the
    evaluation.
    """
    entries = targets_in("callbacks", config.callbacks, "callback", "EarlyStopping")
    named = [
        ("callbacks.args.metric", x.get("metric", "loss"))
        for name, x in entries
        if name == "EarlyStopping"
    ]
    if config.checkpoint.best is not None:
        named.append(("checkpoint.best", config.checkpoint.best))
    if not named:
        return
    derived = set(
        attribute(parts.forward.loss, "derive", lambda means: {})(collections.defaultdict(float))
    )
    names = [n for n in (metrics | derived) - RESERVED | {"loss"} if not n.startswith(WEIGHT)]
    known = sorted(f"{name}/{n}" if name else n for name in parts.eval_sets for n in names)
    for key, metric in named:
        if not known:
            raise UsageError(
                f"{key}: {metric!r}, but the data has no test split; set eval.data, or leave it out"
            )
        if metric not in known:
            raise UsageError(
                f"{key}: {metric!r} is not among the numbers of an evaluation: {', '.join(known)}"
            )


def check_optimizer(config: Config, strategy: Strategy, tx: Any, step: Step) -> None:
    """Raise UsageError, with the optimizer's name, if it does not work with the strategy."""
    try:
        strategy.check(tx, step.trainable(strategy.shapes.params))
    except UsageError as error:
        named = f"optimizer.target: {config.optimizer.target}: "
        raise UsageError(str(error).replace("optimizer: ", named, 1), rank=error.rank) from None
