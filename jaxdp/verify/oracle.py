"""An independent trainer in plain loops: real rows, sums of weighted losses, one division, the
optimizer as it is.

It shares no code with the step, has no sharding and no padding, so that a fault of the step cannot
hide in both."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.data.example_order import RESET
from jaxdp.losses import apply_loss
from jaxdp.models.base import CARRY
from jaxdp.precision import cast_floats
from jaxdp.split import path_string
from jaxdp.train.metric_sums import check_result
from jaxdp.train.step import UpdateRule
from jaxdp.verify.problem import Problem, Tree, Trial

Batch = dict[str, Any]


class Start(NamedTuple):
    """The first parameters and model state; state that belongs to examples is under the model
    state's "carry".
    """

    params: Tree
    model_state: Tree


class Trained(NamedTuple):
    """start: the first parameters. carry: [microbatch, example, ...]. curve: {metric: [update]}.
    grads: of each update, the mean gradients, unclipped."""

    start: Tree
    params: Tree
    model_state: Tree
    opt_state: Tree
    ema: Tree
    carry: Tree
    curve: dict[str, np.ndarray]
    grads: list[Tree]
    ema_state: Tree = None


class Oracle(NamedTuple):
    """forward(params, state, batch, key, train) -> (outputs, what the loss gets, new state), of one
    microbatch.

    value(trainable, frozen, states, batches, keys) -> ((loss, (weight, metrics, new states)), gradients): one loss over
    all microbatches of the lists. loss(outputs, batch) -> (loss, weight, metrics).
    """

    forward: Callable[..., tuple[Any, Batch, Tree]]
    value: Callable[..., Any]
    loss: Callable[..., tuple[Any, Any, dict[str, Any]]]


class Setup(NamedTuple):
    """What is trained, from what, on what, and by which oracle."""

    problem: Problem
    trial: Trial
    start: Start
    oracle: Oracle


def make_setup(problem: Problem, trial: Trial) -> Setup:
    """Initialize the parameters and the model state, in float64."""
    key, init = jax.random.key(problem.forward.seed), jax.jit(problem.forward.model.init)
    arrays = init(key, cast_floats(trial.example, jnp.float64))
    return Setup(problem, trial, Start(*cast_floats(arrays, jnp.float64)), make_oracle(problem))


def make_oracle(problem: Problem) -> Oracle:
    apply = functools.partial(apply_loss, problem.forward.loss)

    def forward(params, state, batch, key, train):
        key, augment_key = jax.random.split(key)
        mask = batch["mask"]
        transform = problem.forward.transform if train else problem.forward.eval_transform
        if transform is not None:
            batch = transform(batch, augment_key, train)
        inputs = {**cast_floats(batch, jnp.float64), "mask": mask != 0}
        outputs, state = problem.forward.model.apply(params, state, inputs, key, train)
        return cast_floats(outputs, jnp.float64), {**batch, "mask": mask.astype(jnp.float64)}, state

    def value(trainable, frozen, states, batches, keys):
        def loss(trainable):
            params = merge(trainable, frozen)
            results = [
                forward(params, *microbatch, True)
                for microbatch in zip(states, batches, keys, strict=True)
            ]
            outputs, targets, new = zip(*results, strict=True)

            def join(trees):
                if len(trees) == 1:
                    return trees[0]
                return jax.tree.map(lambda *x: jnp.concatenate(x), *trees)

            check_result(result := apply(join(outputs), join(targets)))
            total, weight, metrics = result
            return total, (weight, metrics, list(new))

        return jax.value_and_grad(loss, has_aux=True)(trainable)

    return Oracle(jax.jit(forward, static_argnums=4), jax.jit(value), jax.jit(apply))


@functools.lru_cache(maxsize=4)
def make_update(
    tx: optax.GradientTransformation, clip_norm: float | None
) -> Callable[..., tuple[Tree, Tree]]:
    """Return update(trainable, opt_state, mean gradients) -> (trainable, opt_state)."""

    def update(trainable, opt_state, grads):
        if clip_norm is not None:
            norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip_norm / norm), grads)
        updates, opt_state = tx.update(grads, opt_state, trainable)
        return optax.apply_updates(trainable, updates), opt_state

    return jax.jit(update)


def key_of(problem: Problem, update: int, microbatch: int) -> jax.Array:
    return jax.random.fold_in(
        jax.random.fold_in(jax.random.key(problem.forward.seed), update), microbatch
    )


@np.errstate(over="ignore", invalid="ignore")  # the report names what is not finite
def train(setup: Setup, rule: UpdateRule) -> Trained:
    """Train one update for each batch of the trial."""
    problem, trial, start, oracle = setup
    update = make_update(rule.tx, rule.clip_norm)
    params, (state, first_carry) = start.params, without_carry(start.model_state)
    carry = [first_carry] * trial.microbatches
    trainable, frozen = partition(params, rule.frozen)
    opt_state = rule.tx.init(trainable)
    ema, ema_state = params, state
    curve, history = [], []
    for i in range(len(trial.batches)):
        sums, grads, states, shares = [], [], [], []
        batches = [trial.microbatch(i, m) for m in range(trial.microbatches)]
        real = [
            m for m, batch in enumerate(batches) if (batch["mask"] != 0).any()
        ]  # a data set may mask every token
        for group in [real] if problem.couples else [[m] for m in real]:
            inputs = [
                state if carry[m] is None else {**state, CARRY: reset(carry[m], batches[m])}
                for m in group
            ]
            keys = [key_of(problem, i, m) for m in group]
            (loss, (weight, metrics, new_states)), gradient = jax.device_get(
                oracle.value(trainable, frozen, inputs, [batches[m] for m in group], keys)
            )
            sums.append(({"loss": loss, **metrics}, weight))
            grads.append(gradient)
            rows = np.array([np.sum(batches[m]["mask"]) for m in group], np.float64)
            shares += list(weight * rows / rows.sum())
            for m, new_state in zip(group, new_states, strict=True):
                new_state, carry[m] = without_carry(new_state)
                states.append(new_state)
        total = sum(weight for _, weight in sums)
        mean = weighted(grads, [1 / total] * len(grads))
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(mean)))
        means = {
            name: mean_of([metrics[name] for metrics, _ in sums], total) for name in sums[0][0]
        }
        curve.append({**means, "grad_norm": norm, "weight": total})
        history.append(mean)
        state = average(states, [share / total for share in shares])
        trainable, opt_state = update(trainable, opt_state, mean)
        params = merge(trainable, frozen)
        if (decay := rule.ema_decay) is not None:

            def average_with(e, p, decay=decay):
                return e + (1 - decay) * (np.asarray(p) - np.asarray(e))

            ema = jax.tree.map(average_with, ema, params)
            ema_state = jax.tree.map(average_with, ema_state, state)
    ema, ema_state = (None, None) if rule.ema_decay is None else (ema, statistics(ema_state))
    carries = None if first_carry is None else jax.tree.map(lambda *x: np.stack(x), *carry)
    curves = {name: np.array([metrics[name] for metrics in curve]) for name in curve[0]}
    return Trained(start.params, params, state, opt_state, ema, carries, curves, history, ema_state)


def mean_of(values: list[Any], weight: float) -> float:
    """Return the mean of a loss or a metric: sums over the loss's weight, or pairs (sum, its own
    weight).
    """
    if isinstance(values[0], tuple | list):
        values, weight = [value for value, _ in values], sum(own_weight for _, own_weight in values)
    return sum(values) / weight if weight else math.nan


def weighted(trees: list[Tree], factors: list[float]) -> Tree:
    """Return the sum of the trees, each times its factor."""
    return jax.tree.map(
        lambda *x: sum(np.asarray(a) * factor for a, factor in zip(x, factors, strict=True)), *trees
    )


def average(states: list[Tree], shares: list[float]) -> Tree:
    """Return the model state after an update: floats averaged by share, integers as all
    microbatches have them.
    """

    def mean(*x):
        return np.asarray(sum(y * share for y, share in zip(x, shares, strict=True)))

    return jax.tree.map(lambda *x: mean(*x) if is_float(x[0]) else x[0], *states)


def is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact)


def statistics(state: Tree) -> Tree:
    """Return the model state with None for integers; None if it has nothing else."""
    only = jax.tree.map(lambda x: x if is_float(x) else None, state)
    return only if jax.tree.leaves(only) else None


def partition(params: Tree, patterns: Any) -> tuple[Tree, Tree]:
    """Return (trainable, frozen) parameters, each with None for the leaves of the other."""

    def is_frozen(path):
        return any(re.search(pattern, path_string(path)) for pattern in patterns)

    def pick(wanted):
        return jax.tree_util.tree_map_with_path(
            lambda p, x: x if is_frozen(p) == wanted else None, params
        )

    return pick(False), pick(True)


def merge(trainable: Tree, frozen: Tree) -> Tree:
    return jax.tree.map(
        lambda a, b: b if a is None else a, trainable, frozen, is_leaf=lambda x: x is None
    )


def reset(carry: Tree, batch: Batch) -> Tree:
    """Return the carry of a microbatch, with zeros for examples that start from scratch."""
    if RESET not in batch:
        return carry
    return jax.tree.map(
        lambda x: np.stack([y * (not new) for y, new in zip(np.asarray(x), batch[RESET])]), carry
    )


def without_carry(state: Tree) -> tuple[Tree, Tree]:
    """Return (the model state without its carry, the carry or None)."""
    if isinstance(state, dict) and CARRY in state:
        return {k: v for k, v in state.items() if k != CARRY}, state[CARRY]
    return state, None
