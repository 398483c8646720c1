"""An independent trainer in plain loops: real rows, sums of weighted losses, one division, the
optimizer as it is.

It shares no code with the step, has no sharding and no padding, so that a fault of the step cannot
hide in both."""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.data.example_order import RESET
from jaxdp.losses import SUMS, apply_loss
from jaxdp.models.base import CARRY
from jaxdp.precision import cast_floats
from jaxdp.split import path_string
from jaxdp.train.average import EMA, EMA_STATE
from jaxdp.train.state import TrainState, check_result
from jaxdp.train.step import UpdateRule
from jaxdp.verify.problem import Problem, Tree, Trial

Batch = dict[str, Any]
Curve = dict[str, np.ndarray]  # {metric: [update]}


class Start(NamedTuple):
    """The first parameters and model state; state that belongs to examples is under the model
    state's "carry".
    """

    params: Tree
    model_state: Tree


class Trained(NamedTuple):
    """start: the first parameters. state: after the last update. grads: of each update, the mean
    gradients, unclipped."""

    start: Tree
    state: TrainState
    curve: Curve
    grads: list[Tree]


class Oracle:
    """The model, the loss and the first arrays of a problem, as functions of single microbatches.

    Args:
        start: None draws it.

    Attributes:
        forward: (params, state, batch, key, train) -> (outputs, what the loss gets, new state), of
            one microbatch.
        value: (trainable, frozen, states, batches, keys) -> ((loss, (weight, metrics, new states)),
            gradients): one loss over all microbatches of the lists.
        loss: (outputs, batch) -> (loss, weight, metrics).
    """

    def __init__(self, problem: Problem, trial: Trial, start: Start | None = None):
        self.problem, self.trial = problem, trial
        self.forward_pass = problem.parts.forward
        self.forward = jax.jit(self._forward, static_argnums=4)
        self.value = jax.jit(self._value)
        self.loss = jax.jit(functools.partial(apply_loss, self.forward_pass.loss))
        if start is None:
            example = cast_floats(trial.example, jnp.float64)
            key = jax.random.key(self.forward_pass.seed)
            arrays = jax.jit(self.forward_pass.model.init)(key, example)
            start = Start(*cast_floats(arrays, jnp.float64))
        self.start = start

    def key(self, update: int = 0, microbatch: int = 0) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(self.forward_pass.seed), update)
        return jax.random.fold_in(key, microbatch)

    def arguments(self, batch: Batch, state: Tree) -> tuple[Any, ...]:
        """Return arguments of `value`: one microbatch, all parameters trainable."""
        frozen = jax.tree.map(lambda x: None, self.start.params)
        return self.start.params, frozen, [state], [batch], [self.key()]

    def _forward(self, params, state, batch, key, train):
        key, augment_key = jax.random.split(key)
        mask = batch["mask"]
        transform = self.forward_pass.transform if train else self.forward_pass.eval_transform
        if transform is not None:
            batch = transform(batch, augment_key, train)
        inputs = {**cast_floats(batch, jnp.float64), "mask": mask != 0}
        outputs, state = self.forward_pass.model.apply(params, state, inputs, key, train)
        return cast_floats(outputs, jnp.float64), {**batch, "mask": mask.astype(jnp.float64)}, state

    def _value(self, trainable, frozen, states, batches, keys):
        def loss(trainable):
            params = merge(trainable, frozen)
            results = [
                self._forward(params, *microbatch, True)
                for microbatch in zip(states, batches, keys, strict=True)
            ]
            outputs, targets, new_states = map(list, zip(*results, strict=True))
            result = apply_loss(self.forward_pass.loss, join(outputs), join(targets))
            check_result(result)
            total, weight, metrics = result
            return total, (weight, metrics, new_states)

        return jax.value_and_grad(loss, has_aux=True)(trainable)


def join(trees: list[Tree]) -> Tree:
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *trees)


@functools.partial(jax.jit, static_argnums=(0, 1))
def update(
    tx: optax.GradientTransformation,
    clip_norm: float | None,
    trainable: Tree,
    opt_state: Tree,
    grads: Tree,
) -> tuple[Tree, Tree]:
    """Return the parameters and the optimizer's state after an update with the mean gradients."""
    if clip_norm is not None:
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip_norm / norm), grads)
    updates, opt_state = tx.update(grads, opt_state, trainable)
    return optax.apply_updates(trainable, updates), opt_state


def first_state(oracle: Oracle, params: Tree, rule: UpdateRule) -> TrainState:
    """Return the state before the first update."""
    model_state, carry = split_carry(oracle.start.model_state)
    number = oracle.trial.microbatches
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        model_state=model_state,
        opt_state=rule.tx.init(partition(params, rule.frozen)[0]),
        extra=averaged(rule, params, model_state),
        kept=jax.tree.map(lambda x: np.stack([x] * number), carry),
    )


@np.errstate(over="ignore", invalid="ignore")  # the report names what is not finite
def train(oracle: Oracle, params: Tree, rule: UpdateRule) -> Trained:
    """Train one update for each batch of the trial, from these parameters."""
    state, curve, history = first_state(oracle, params, rule), [], []
    for number in range(len(oracle.trial.batches)):
        state, metrics, gradients = train_batch(oracle, rule, number, state)
        curve.append(metrics)
        history.append(gradients)
    return Trained(params, state, stack(curve), history)


def train_batch(
    oracle: Oracle, rule: UpdateRule, number: int, state: TrainState
) -> tuple[TrainState, dict[str, float], Tree]:
    """Return the state after an update, its metrics, and the mean gradients. number: of the
    update."""
    trainable, frozen = partition(state.params, rule.frozen)
    count = oracle.trial.microbatches
    batches = [oracle.trial.microbatch(number, m) for m in range(count)]
    carries = [jax.tree.map(lambda x, m=m: x[m], state.kept) for m in range(count)]
    sums, weights, grads, states, shares = [], [], [], [], []
    # a data set may mask every token
    real = [m for m, batch in enumerate(batches) if (batch["mask"] != 0).any()]
    for group in [real] if oracle.problem.couples else [[m] for m in real]:
        inputs = [join_carry(state.model_state, reset(carries[m], batches[m])) for m in group]
        keys = [oracle.key(number, m) for m in group]
        (loss, (weight, metrics, new_states)), gradient = jax.device_get(
            oracle.value(trainable, frozen, inputs, [batches[m] for m in group], keys)
        )
        sums.append({"loss": loss, **metrics})
        weights.append(weight)
        grads.append(gradient)
        rows = np.array([np.sum(batches[m]["mask"]) for m in group], np.float64)
        shares += list(weight * rows / rows.sum())
        for m, new_state in zip(group, new_states, strict=True):
            new_state, carries[m] = split_carry(new_state)
            states.append(new_state)
    total = sum(weights)
    mean = weighted(grads, [1 / total] * len(grads))
    means = {
        name: mean_of([metrics[name] for metrics in sums], 1 if SUMS in name else total)
        for name in sums[0]
    }
    means["grad_norm"] = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(mean)))
    means["weight"] = total
    trainable, opt_state = update(rule.tx, rule.clip_norm, trainable, state.opt_state, mean)
    params = merge(trainable, frozen)
    model_state = weighted(states, [share / total for share in shares])

    decay = rule.ema_decay or 0.0

    def average_with(e, p):
        return e + (1 - decay) * (np.asarray(p) - np.asarray(e))

    new = state.replace(
        params=params,
        model_state=model_state,
        opt_state=opt_state,
        extra=jax.tree.map(average_with, state.extra, averaged(rule, params, model_state)),
        kept=jax.tree.map(lambda *x: np.stack(x), *carries),
    )
    return new, means, mean


def stack(curve: list[dict[str, Any]]) -> Curve:
    """Return the metrics of all updates, from those of each."""
    return jax.tree.map(lambda *x: np.stack(x), *curve) if curve else {}


def mean_of(values: list[Any], weight: float) -> float:
    """Return the mean of a loss or a metric: sums over the loss's weight, or pairs (sum, its own
    weight).
    """
    if isinstance(values[0], tuple | list):
        sums, weights = zip(*values)
        values, weight = [*sums], sum(weights)
    return sum(values) / weight if weight else math.nan


def weighted(trees: list[Tree], factors: list[float]) -> Tree:
    """Return the sum of the trees, each times its factor; integers as the first tree has them."""

    def total(*x):
        if not is_float(x[0]):
            return x[0]
        terms = (np.asarray(a) * factor for a, factor in zip(x, factors, strict=True))
        return np.asarray(sum(terms))

    return jax.tree.map(total, *trees)


def is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact)


def averaged(rule: UpdateRule, params: Tree, model_state: Tree) -> dict[str, Tree]:
    """Return what is averaged over the updates, by name: parameters, and floats of the model
    state."""
    if rule.ema_decay is None:
        return {}
    statistics = jax.tree.map(lambda x: x if is_float(x) else None, model_state)
    return {EMA: params} | ({EMA_STATE: statistics} if jax.tree.leaves(statistics) else {})


def partition(params: Tree, patterns: Any) -> tuple[Tree, Tree]:
    """Return (trainable, frozen) parameters, each with None for the leaves of the other."""

    def pick(frozen):
        def keep(path, x):
            found = any(re.search(pattern, path_string(path)) for pattern in patterns)
            return x if found == frozen else None

        return jax.tree_util.tree_map_with_path(keep, params)

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


def split_carry(state: Tree) -> tuple[Tree, dict[str, Tree]]:
    """Return (the model state without its carry, {"carry": it} or {})."""
    if isinstance(state, dict) and CARRY in state:
        return {k: v for k, v in state.items() if k != CARRY}, {CARRY: state[CARRY]}
    return state, {}


def join_carry(state: Tree, carry: dict[str, Tree]) -> Tree:
    return {**state, **carry} if carry else state
