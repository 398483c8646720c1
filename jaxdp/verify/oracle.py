"""An independent trainer in plain loops: real rows, sums of weighted losses, one division, the
optimizer as it is. And how closely what it trains can be compared.

It shares no code with the step but small helpers for trees, has no sharding and no padding, so that a
fault of the step cannot hide in both."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import tree

from jaxdp.data.example_order import RESET
from jaxdp.losses import SUMS, apply_loss
from jaxdp.models.base import CARRY
from jaxdp.precision import cast_floats
from jaxdp.train.average import EMA, EMA_STATE
from jaxdp.train.carry import split_carry
from jaxdp.train.state import (
    WEIGHT,
    TrainState,
    check_result,
    expand_to,
    floats,
    merge,
    microbatch_key,
)
from jaxdp.train.step import UpdateRule
from jaxdp.verify.compare import (
    FAILED,
    NOTE,
    Check,
    Curve,
    Errors,
    difference,
    flatten,
    leaves,
    list_leaves,
)
from jaxdp.verify.problem import Arrays, Problem, Tree, Trial

RATES = (1.0, 0.1, 0.01, 0.001)  # of the peak learning rate
ZERO = 1e3  # last digits of the whole gradient's norm: a gradient below is zero but for rounding
# A leaf may differ by MARGIN x what rounding moves it, at most by MOST. It is not compared if
# rounding moves it by more than COARSEST and 5 times the tolerance.
MARGIN, MOST, COARSEST = 10, 0.5, 1e-2


class Trained(NamedTuple):
    """start: the first parameters. state: after the last update. curve: the metrics of each update.
    grads: the same of the mean gradients, unclipped."""

    start: Tree
    state: TrainState
    curve: Curve
    grads: list[Tree]


class Oracle:
    """The model, the loss and the first arrays of a problem, as functions of microbatches.

    Attributes:
        first: the first state, without an optimizer, of one microbatch.
        forward: (params, state, batch, key, train) -> (outputs, what the loss gets, new state), of
            one microbatch.
        sums: (trainable, state, batch, keys) -> (sums, the new kept), of one loss over microbatches:
            leaves [microbatch, ...] of batch, keys and what the state keeps. The sums are those of
            the model state times the weight, the gradient, the metrics and the weight.
    """

    def __init__(self, problem: Problem, trial: Trial):
        self.problem, self.trial, self.forward_pass = problem, trial, problem.parts.forward
        self.forward = jax.jit(self._forward, static_argnums=4)
        self.sums = jax.jit(self._sums)
        key, example = jax.random.key(self.forward_pass.seed), trial.example
        init = jax.jit(self.forward_pass.model.init)
        params, state = cast_floats(init(key, cast_floats(example, jnp.float64)), jnp.float64)
        state, carry = split_carry(state)
        kept = {} if carry is None else {CARRY: at(None, carry)}
        self.first = TrainState(jnp.zeros((), jnp.int32), params, state, None, kept=kept)

    def start(self, params: Tree, rule: UpdateRule) -> TrainState:
        """Return the state before the first update, with these parameters."""
        number, first = self.trial.order.microbatches, self.first
        return first.replace(
            params=params,
            opt_state=rule.tx.init(rule.trainable(params)),
            extra=averaged(rule, params, first.model_state),
            kept=jax.tree.map(lambda x: jnp.repeat(x, number, 0), first.kept),
        )

    def keys(self, update: Any) -> jax.Array:
        """Return the keys [microbatch] of an update."""
        key = functools.partial(microbatch_key, self.forward_pass.seed, update)
        return jax.vmap(key)(jnp.arange(self.trial.order.microbatches))

    def _forward(self, params, state, batch, key, train):
        key, augment_key = jax.random.split(key)
        mask = batch["mask"]
        transform = self.forward_pass.transform if train else self.forward_pass.eval_transform
        if transform is not None:
            batch = transform(batch, augment_key, train)
        inputs = {**cast_floats(batch, jnp.float64), "mask": mask != 0}
        outputs, state = self.forward_pass.model.apply(params, state, inputs, key, train)
        return cast_floats(outputs, jnp.float64), {**batch, "mask": mask.astype(jnp.float64)}, state

    def loss(self, outputs: Tree, batch: Tree) -> tuple[Any, Any, dict[str, Any]]:
        """Return (loss, weight, metrics)."""
        return apply_loss(self.forward_pass.loss, outputs, batch)

    def _sums(self, trainable, state, batch, keys):
        def loss(trainable):
            params, results = merge(trainable, state.params), []
            for m in range(len(keys)):
                carry, one, key = at(m, (state.kept, batch, keys))
                before = with_carry(state.model_state, carry)
                results.append(self._forward(params, before, one, key, True))
            outputs, targets, states = zip(*results, strict=True)
            result = check_result(self.loss(join(outputs), join(targets)))
            return result[0], (result, [x["mask"].sum() for x in targets], states)

        (_, (result, rows, states)), gradient = jax.value_and_grad(loss, has_aux=True)(trainable)
        total, weight, metrics = result
        states, carries = zip(*map(split_carry, states), strict=True)
        shares = [weight * n / sum(rows) for n in rows]
        sums = {
            "model_state": functools.reduce(tree.add, map(tree.scale, shares, states)),
            "gradient": gradient,
            "metrics": {"loss": total, **metrics},
            "weight": weight,
        }
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *carries)
        return sums, {CARRY: stacked} if state.kept else {}

    def outputs(self, batch: Arrays, train: bool) -> tuple[Tree, Tree]:
        """Return (outputs, what the loss gets) of a microbatch, in the first state."""
        first = self.first
        before = with_carry(first.model_state, at(0, first.kept))
        return self.forward(first.params, before, batch, self.keys(0)[0], train)[:2]

    def sums_of_one(self, batch: Arrays) -> Tree:
        """Return the sums of a microbatch, which may have fewer examples, in the first state."""
        rows = slice(len(batch["mask"]))
        first = self.first.replace(kept=at((slice(None), rows), self.first.kept))
        return self.sums(first.params, first, at(None, batch), self.keys(0)[:1])[0]


def with_carry(model_state: Tree, carry: dict[str, Tree]) -> Tree:
    return {**model_state, **carry} if carry else model_state


def at(index: Any, tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x[index], tree)


def join(trees: tuple[Tree, ...]) -> Tree:
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *trees)


def update(rule: UpdateRule, trainable: Tree, opt_state: Tree, grads: Tree) -> tuple[Tree, Tree]:
    """Return the parameters and the optimizer's state after an update with the mean gradients."""
    if rule.clip_norm is not None:
        grads, _ = optax.clip_by_global_norm(rule.clip_norm).update(grads, optax.EmptyState())
    updates, opt_state = jax.jit(rule.tx.update)(grads, opt_state, trainable)
    return optax.apply_updates(trainable, updates), opt_state


def averaged(rule: UpdateRule, params: Tree, model_state: Tree) -> dict[str, Tree]:
    """Return what is averaged over the updates, by name: parameters, and floats of the model
    state."""
    if rule.ema_decay is None:
        return {}
    statistics = floats(model_state)
    return {EMA: params} | ({EMA_STATE: statistics} if jax.tree.leaves(statistics) else {})


def train(oracle: Oracle, params: Tree, rule: UpdateRule) -> Trained:
    """Train one update for each batch of the trial, from these parameters."""
    state, curve, grads = oracle.start(params, rule), [], []
    for number in range(len(oracle.trial.batches)):
        state, metrics, gradient = train_batch(oracle, rule, number, state)
        curve.append(metrics)
        grads.append(gradient)
    return Trained(params, state, curve, grads)


@np.errstate(all="ignore")  # the report names what is not finite
def train_batch(
    oracle: Oracle, rule: UpdateRule, number: int, state: TrainState
) -> tuple[TrainState, dict[str, Any], Tree]:
    """Return the state after an update, its metrics, and the mean gradients. number: of the
    update."""
    batch: Any = oracle.trial.batches[number]
    keys, kept = oracle.keys(number), state.kept
    if RESET in batch:
        kept = jax.tree.map(lambda x: jnp.where(expand_to(batch[RESET], x), 0, x), kept)
    trainable = rule.trainable(state.params)
    # a data set may mask every token
    real = np.array([m for m, mask in enumerate(batch["mask"]) if mask.any()])
    sums = []
    for group in [real] if oracle.problem.couples else real[:, None]:
        before, *arrays = at(group, (kept, batch, keys))
        of_group, after = oracle.sums(trainable, state.replace(kept=before), *arrays)
        sums.append(of_group)
        kept = jax.tree.map(lambda x, new, group=group: x.at[group].set(new), kept, after)
    total = functools.reduce(tree.add, sums)
    weight = total["weight"]
    gradient, model_state = tree.scale(1 / weight, (total["gradient"], total["model_state"]))

    def like(old, mean):  # an integer is the same in all microbatches
        return (mean if jnp.issubdtype(old.dtype, jnp.inexact) else mean.round()).astype(old.dtype)

    trainable, opt_state = update(rule, trainable, state.opt_state, gradient)
    params = merge(trainable, state.params)
    model_state = jax.tree.map(like, state.model_state, model_state)
    change = tree.sub(averaged(rule, params, model_state), state.extra)
    new = state.replace(
        params=params,
        model_state=model_state,
        opt_state=opt_state,
        extra=tree.add_scale(state.extra, 1 - (rule.ema_decay or 0), change),
        kept=kept,
    )
    metrics = means(total["metrics"], weight)
    return new, {**metrics, "grad_norm": tree.norm(gradient), "weight": weight}, gradient


def means(metrics: dict[str, Any], weight: Any) -> dict[str, Any]:
    """Return sums divided by the weight, or by their own; not those that are no means."""
    return {
        name: x
        if name.startswith(WEIGHT) or SUMS in name
        else x / metrics.get(WEIGHT + name, weight)
        for name, x in metrics.items()
    }


class Reference(NamedTuple):
    """What the oracle trained, with `rule` at `rate` of the peak learning rate, and how closely it
    can be compared.

    Args:
        tolerance: the relative error that a leaf may have.
        allowed: the same of each leaf, with a margin for rounding.
        uncompared: the leaves that rounding moves too far.
        zero: {trained leaf: elements whose gradient is zero but for rounding}, of leaves that are
            compared without these elements.
        compared: the number of trained leaves that are compared, and of all. A leaf that stands still
            does so in every configuration, so it does not count as compared.
        checks: what is worth knowing, or wrong, about this.
    """

    trained: Trained
    rule: UpdateRule
    rate: float
    tolerance: float
    allowed: Errors
    uncompared: set[str]
    zero: Arrays
    compared: tuple[int, int]
    checks: list[Check]

    def errors(self, state: TrainState, curve: Curve) -> Errors:
        """Return the error of each leaf that is compared, scaled so that the tolerance is what is
        allowed.
        """
        start, trained, own_curve, _ = self.trained
        want = flatten(trained, own_curve, start)
        got = without(self.zero, flatten(state, curve, start), want)
        return {
            path: difference(got.get(path), want[path]) * self.tolerance / self.allowed[path]
            for path in want
            if path not in self.uncompared
        }


def find_reference(
    train: Callable[[Tree, UpdateRule], Trained],
    make_rule: Callable[[float], UpdateRule],
    params: Tree,
    epsilon: float,
    tolerance: float,
) -> Reference:
    """Train three times, twice with parameters changed in their last digit: what differs is
    rounding.

    Lower the learning rate where training amplifies rounding, update by update, beyond what is
    compared.

    Args:
        train: (params, rule) -> what the oracle trains.
        epsilon: the last digit, relative.
    """
    rng = np.random.default_rng(0)

    def perturb(x):
        return x * (1 + epsilon * rng.choice([-1.0, 1.0], x.shape))

    starts = [params, *(jax.tree.map(perturb, params) for _ in range(2))]
    for rate in RATES:
        rule = make_rule(rate)
        runs = [train(start, rule) for start in starts]
        moved = moves(*(flatten(run.state, run.curve) for run in runs))
        if np.median([*moved.values()]) <= max(tolerance / 100, 8 * epsilon):
            break
    trained, limit = runs[0], max(COARSEST, 5 * tolerance)
    want, *others = (flatten(run.state, run.curve, run.start) for run in runs)
    grads = [leaves({"params": gradient}) for gradient in trained.grads]
    noise = zero_gradients(grads, epsilon)
    moved, rest = moves(want, *others), moves(want, *(without(noise, x, want) for x in others))
    too_far = {path for path, error in moved.items() if error > limit}
    explained = {path for path in too_far if rest[path] <= limit}
    zero = {path: noise[path] for path in explained if not noise[path].all()}
    uncompared = too_far - zero.keys()
    # Other leaves, such as the optimizer's, move with parameters whose gradient is zero.
    unexplained = {p for p in too_far - explained if p.startswith("params/") or not explained}
    allowed = {path: max(tolerance, min(MARGIN * error, MOST)) for path, error in moved.items()}
    allowed |= dict.fromkeys(zero, tolerance)
    moving = {path for path in grads[0] if want[path].any() and any(x[path].any() for x in grads)}
    compared = len(moving - uncompared)
    texts = {
        "not compared, because rounding alone moves them too far": unexplained or uncompared,
        "compared without the elements whose gradient is zero but for rounding": zero,
        f"compared with a margin of {MARGIN} times what rounding moves them, at most {MOST}": {
            path for path in moved if allowed[path] > tolerance
        }
        - uncompared,
    }
    checks = [
        Check("rounding", NOTE, f"{text}: {list_leaves(moved, paths)}")
        for text, paths in texts.items()
        if paths
    ]
    if unexplained:
        checks[0] = checks[0]._replace(verdict=FAILED)
    if not compared:
        checks.append(Check("rounding", FAILED, "no parameter was compared that training moves"))
    losses = [float(metrics["loss"]) for metrics in trained.curve]
    if not np.isfinite(losses).all():
        text = f"the loss is not finite: {losses} in the first updates; try a smaller optimizer.lr"
        checks.insert(0, Check("rounding", FAILED, text))
    return Reference(
        trained, rule, rate, tolerance, allowed, uncompared, zero, (compared, len(grads[0])), checks
    )


def moves(want: Arrays, *others: Arrays) -> Errors:
    """Return how far others are from each leaf, at most."""
    return {path: max(difference(x.get(path), want[path]) for x in others) for path in want}


def without(elements: Arrays, got: Arrays, want: Arrays) -> Arrays:
    """Return the leaves of `got`, with these elements as in `want`."""
    same = {path: np.where(mask, want[path], got[path]) for path, mask in elements.items()}
    return {**got, **same}


@np.errstate(over="ignore")
def zero_gradients(grads: list[Arrays], epsilon: float) -> Arrays:
    """Return {path: the elements whose gradient is zero, but for rounding, in every update}."""
    zero: Arrays = {}
    for gradient in grads:
        norm = np.linalg.norm([np.linalg.norm(x) for x in gradient.values()])
        # nothing is small beside a gradient that overflows
        bound = ZERO * epsilon * norm if np.isfinite(norm) else 0.0
        for path, x in gradient.items():
            zero[path] = (np.abs(x) <= bound) & zero.get(path, True)
    return zero
