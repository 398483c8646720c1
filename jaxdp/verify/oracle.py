"""An independent trainer in plain loops: real rows, sums of weighted losses, one division, the
optimizer as it is. And how closely what it trains can be compared: by the relative error of each
leaf, in the L2 norm.

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

from jaxdp.checkpoint.leaves import all_fields_of, host
from jaxdp.data.example_order import RESET
from jaxdp.losses import SUMS, apply_loss
from jaxdp.models.base import CARRY
from jaxdp.precision import cast_floats
from jaxdp.process.hosts import listed
from jaxdp.run.components import make_tx
from jaxdp.split import leaves_by_path
from jaxdp.targets import attribute
from jaxdp.train.average import EMA, EMA_STATE, first_statistics
from jaxdp.train.carry import split_carry
from jaxdp.train.state import (
    WEIGHT,
    TrainState,
    check_result,
    expand_to,
    flat,
    merge,
    microbatch_key,
)
from jaxdp.train.step import UpdateRule, first_microbatch
from jaxdp.verify.problem import Arrays, Problem, Tree, Trial

OK, FAILED, NOTE, SKIPPED, REFUSED = "ok", "FAILED", "note", "skipped", "refused"
COMPARED = ("params", "model_state", "opt_state", EMA, EMA_STATE, CARRY)
ZERO = 1e3  # last digits of the whole gradient's norm: a gradient below is zero but for rounding
# A leaf may differ by MARGIN x what rounding moves it, at most by MOST. It is not compared if
# rounding moves it by more than COARSEST and 5 times the tolerance.
MARGIN, MOST, COARSEST = 10, 0.5, 1e-2
Curve = list[dict[str, Any]]  # the metrics of each update
Result = tuple[str, str]  # verdict, text


class Trained(NamedTuple):
    """start, state: before the first update and after the last. curve: the metrics of each update.
    grads: the same of the mean gradients, unclipped."""

    start: TrainState
    state: TrainState
    curve: Curve
    grads: list[Tree]


class Oracle:
    """The model, the loss and the first arrays of a problem, as functions of microbatches.

    Args:
        compute: the dtype of the model's parameters and inputs.

    Attributes:
        rule: how it updates, at a constant learning rate, the peak one.
        couples: the loss couples the examples of a batch.
        first: the first state, without an optimizer.
        forward: (state, batch, number, train) -> (outputs, what the loss gets, model state, kept),
            of one microbatch; `state.kept`: that of its examples.
        sums: (trainable, state, batch, numbers) -> (sums, kept), of one loss over microbatches:
            leaves [microbatch, ...] of batch, numbers and what the state keeps. The sums are those
            of the model state times the weight, the gradient, the metrics and the weight.
        program: that of `sums` of a microbatch in the first state.
    """

    def __init__(self, problem: Problem, trial: Trial, compute: str):
        config, parts = problem
        self.problem, self.trial, self.compute = problem, trial, compute
        self.forward_pass = forward = parts.forward
        self.couples = attribute(forward.loss, "scope", "example") == "global"
        self.forward = jax.jit(self._forward, static_argnums=3)
        self.sums = jax.jit(self._sums)
        rate = optax.constant_schedule(config.optimizer.lr)
        tx = make_tx(config, rate, forward.model.blocks, roles=parts.roles)
        self.rule = parts.rule._replace(tx=tx, spike=None, schedule=None)
        size = trial.order.examples_per_microbatch
        inputs = first_microbatch(parts.first[0], size, forward.transform)
        arguments = jax.random.key(forward.seed), cast_floats(inputs, compute)
        params, state = cast_floats(jax.jit(forward.model.init)(*arguments), float)
        state, kept = split(state)
        kept = at(np.zeros(trial.order.microbatches, int), kept)
        self.first = TrainState(jnp.zeros((), jnp.int32), params, state, None, kept=kept)
        kept, one = at(slice(1), (kept, trial.batches[0]))
        first = self.first.replace(kept=kept)
        self.program = jax.make_jaxpr(self.sums)(params, first, one, np.zeros(1, int))

    def _forward(self, state, batch, number, train):
        forward, mask = self.forward_pass, batch["mask"]
        key, augment_key = jax.random.split(microbatch_key(forward.seed, state.step, number))
        transform = forward.transform if train else forward.eval_transform
        if transform is not None:
            batch = transform(batch, augment_key, train)
        before = {**state.model_state, **state.kept} if state.kept else state.model_state
        params, inputs = cast_floats((state.params, {**batch, "mask": mask != 0}), self.compute)
        results = forward.model.apply(params, before, inputs, key, train)
        outputs, after = cast_floats(results, float)
        return outputs, {**batch, "mask": mask.astype(float)}, *split(after)

    def _sums(self, trainable, state, batch, numbers):
        def loss(trainable):
            full, results = state.replace(params=merge(trainable, state.params)), []
            for m, number in enumerate(numbers):
                kept, one = at(m, (state.kept, batch))
                results.append(self._forward(full.replace(kept=kept), one, number, True))
            outputs, targets, states, kept = zip(*results)
            result = apply_loss(self.forward_pass.loss, join(outputs), join(targets))
            total, weight, metrics = check_result(result)
            rows = [x["mask"].sum() for x in targets]
            weighed = [tree.scale(weight * n / sum(rows), x) for n, x in zip(rows, states)]
            sums = {
                "model_state": functools.reduce(tree.add, weighed),
                "metrics": {"loss": total, **metrics},
                "weight": weight,
            }
            return total, (sums, join(kept))

        (_, (sums, kept)), gradient = jax.value_and_grad(loss, has_aux=True)(trainable)
        return {**sums, "gradient": gradient}, kept

    def outputs(self, batch: Arrays, train: bool) -> tuple[Tree, Tree, Tree]:
        """Return (outputs, what the loss gets, model state) of a microbatch in the first state."""
        first = self.first.replace(kept=at(0, self.first.kept))
        return self.forward(first, batch, 0, train)[:3]

    def loss(self, outputs: Tree, batch: Tree) -> dict[str, jax.Array]:
        """Return the sums that the loss returns, by name."""
        total, weight, metrics = apply_loss(self.forward_pass.loss, outputs, batch)
        named = {f"metric {name!r}": x for name, x in flat(metrics).items()}
        return {"sum": total, "weight": weight, **named}


def make_oracle(problem: Problem, trial: Trial) -> Oracle:
    """Return the oracle of a problem, in float32 if the model cannot be traced in float64: some
    models fix the dtype of a loop's state, such as an LSTM's carry."""
    try:
        return Oracle(problem, trial, "float64")
    except TypeError:
        return Oracle(problem, trial, "float32")


def split(model_state: Tree) -> tuple[Tree, Tree]:
    """Return the model's own state, and what it keeps for the examples [1, example, ...]."""
    state, carry = split_carry(model_state)
    return state, {} if carry is None else {CARRY: at(None, carry)}


def at(index: Any, tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x[index], tree)


def join(trees: tuple[Tree, ...]) -> Tree:
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *trees)


def add_up(oracle: Oracle, trainable: Tree, state: TrainState, batch: Tree) -> tuple[Tree, Tree]:
    """Return the sums over all microbatches that have examples, and what is kept after them."""
    kept = state.kept
    if RESET in batch:
        kept = jax.tree.map(lambda x: jnp.where(expand_to(batch[RESET], x), 0, x), kept)
    # a data set may mask every token
    real = np.flatnonzero([mask.any() for mask in batch["mask"]])
    results = [
        oracle.sums(trainable, state.replace(kept=at(group, kept)), at(group, batch), group)
        for group in ([real] if oracle.couples else real[:, None])
    ]
    sums, after = zip(*results)
    kept = jax.tree.map(lambda x, new: x.at[real].set(new), kept, join(after))
    return functools.reduce(tree.add, sums), kept


def update(rule: UpdateRule, trainable: Tree, opt_state: Tree, grads: Tree) -> tuple[Tree, Tree]:
    """Return the parameters and the optimizer's state after an update with the mean gradients."""
    clip = optax.clip_by_global_norm(rule.clip_norm or np.inf)
    clipped, _ = clip.update(grads, optax.EmptyState())
    updates, opt_state = jax.jit(rule.tx.update)(clipped, opt_state, trainable)
    return optax.apply_updates(trainable, updates), opt_state


def averaged(rule: UpdateRule, params: Tree, model_state: Tree) -> Tree:
    """Return what is averaged over the updates, by name: parameters, and floats of the model
    state."""
    if rule.ema_decay is None:
        return {}
    statistics = first_statistics(model_state)
    return {EMA: params} | ({} if statistics is None else {EMA_STATE: statistics})


@np.errstate(all="ignore")  # the report names what is not finite
def train(oracle: Oracle, params: Tree) -> Trained:
    """Train one update for each batch of the trial, from these parameters."""
    rule = oracle.rule
    start = state = oracle.first.replace(
        params=params,
        opt_state=rule.tx.init(rule.trainable(params)),
        extra=averaged(rule, params, oracle.first.model_state),
    )
    curve, grads = [], []

    def like(old, mean):  # an integer is the same in all microbatches
        return (mean if jnp.issubdtype(old.dtype, jnp.inexact) else mean.round()).astype(old.dtype)

    for batch in oracle.trial.batches:
        trainable = rule.trainable(state.params)
        sums, kept = add_up(oracle, trainable, state, batch)
        weight = sums["weight"]
        gradient, model_state = tree.scale(1 / weight, (sums["gradient"], sums["model_state"]))
        trainable, opt_state = update(rule, trainable, state.opt_state, gradient)
        params = merge(trainable, state.params)
        model_state = jax.tree.map(like, state.model_state, model_state)
        # not a weighted mean of both, which rounds where nothing moves
        change = tree.sub(averaged(rule, params, model_state), state.extra)
        state = state.replace(
            step=state.step + 1,
            params=params,
            model_state=model_state,
            opt_state=opt_state,
            extra=tree.add_scale(state.extra, 1 - (rule.ema_decay or 0), change),
            kept=kept,
        )
        metrics = means(sums["metrics"], weight)
        curve.append({**metrics, "grad_norm": tree.norm(gradient), "weight": weight})
        grads.append(gradient)
    return Trained(start, state, curve, grads)


def means(metrics: dict[str, Any], weight: Any) -> dict[str, Any]:
    """Return sums divided by the weight, or by their own; not those that are no means."""
    return {
        name: x
        if name.startswith(WEIGHT) or SUMS in name
        else x / metrics.get(WEIGHT + name, weight)
        for name, x in metrics.items()
    }


def leaves(trees: dict[str, Tree]) -> Arrays:
    """Return {name/path: array}, in the order of the names."""
    return {
        path: host(x)
        for name, tree in trees.items()
        for path, x in leaves_by_path({name: tree}).items()
    }


def flatten(state: TrainState, curve: Curve, start: Tree = None) -> Arrays:
    """Return what is compared of a state and its curve, by path.

    start: the first parameters; of parameters and their average, what changed since is compared: an
    update may be small beside them.
    """
    fields = {name: tree for name, tree in all_fields_of(state).items() if name in COMPARED}
    arrays = leaves({**fields, "curve": curve})
    before = leaves({"params": start, EMA: start})
    return {path: x - before[path] if path in before else x for path, x in arrays.items()}


def difference(got: Any, want: Any) -> float:
    """Return |got - want| / |want| of two arrays, or None for none; infinity where only one is
    finite, or shapes or anything but floats differ.
    """
    inexact = all(jnp.issubdtype(np.asarray(x).dtype, jnp.inexact) for x in (got, want))
    if not inexact or not np.array_equal(np.isfinite(got), np.isfinite(want)):
        return 0.0 if np.array_equal(got, want) else np.inf
    both = np.array([got, want], np.complex128)[:, np.isfinite(want)]
    # divided by the largest element, or their squares may overflow
    got, want = both / (np.abs(both).max(initial=0.0) or 1.0)
    size, apart = np.linalg.norm(want), np.linalg.norm(got - want)
    return float(apart / size) if size else np.inf if apart else 0.0


def find_difference(got: Arrays, want: Arrays, tolerance: float) -> str:
    """Return the first leaf that differs by more than the tolerance, and how, or ""."""
    for path in {**want, **got}:
        x: Any = got.get(path)
        y: Any = want.get(path)
        if (error := difference(x, y)) > tolerance:
            if np.size(x) == np.size(y) == 1:
                return f"{path} is {x}, not {y}"
            return f"{path} differs by {error:.1e}"
    return ""


class Reference:
    """What the oracle trained, and how closely it can be compared.

    It is trained three times, twice from parameters that are changed in their last digit: what
    differs is rounding.

    Args:
        train: params -> what the oracle trains from them.
        epsilon: the last digit, relative.
        tolerance: the relative error that a leaf may have.

    Attributes:
        want: all leaves by path; see `flatten`.
        allowed: the tolerance of each leaf that is compared, with a margin for rounding.
        uncompared: the leaves that rounding moves too far.
        compared: the number of trained leaves that are compared, and of all. A leaf that stands still
            does so in every configuration, so it does not count as compared.
        largest: the largest error of a configuration so far, and the same in words.
        notes: what is worth knowing, or wrong, about this: (verdict, text).
    """

    def __init__(
        self,
        train: Callable[[Tree], Trained],
        params: Tree,
        epsilon: float,
        tolerance: float,
    ):
        rng = np.random.default_rng(0)

        def perturb(x):
            return x * (1 + epsilon * rng.choice([-1.0, 1.0], x.shape))

        runs = [train(params), *(train(jax.tree.map(perturb, params)) for _ in range(2))]
        self.trained, self.tolerance, limit = runs[0], tolerance, max(COARSEST, 5 * tolerance)
        self.largest = 0.0, ""
        self.want, *others = (flatten(run.state, run.curve, run.start.params) for run in runs)
        grads = [leaves({"params": gradient}) for gradient in self.trained.grads]
        moved = {
            path: max(difference(other.get(path), x) for other in others)
            for path, x in self.want.items()
        }
        self.uncompared = far = {path for path, error in moved.items() if error > limit}
        bounds = [ZERO * epsilon * tree.norm(gradient) for gradient in grads]
        # leaves with an element whose gradient is zero, but for rounding, in every update
        zero = {
            path
            for path in far & grads[0].keys()
            if np.all([np.abs(x[path]) <= bound for x, bound in zip(grads, bounds)], axis=0).any()
        }
        # Other leaves, such as the optimizer's, move with parameters whose gradient is zero.
        unexplained = {path for path in far - zero if path.startswith("params/") or not zero}
        self.allowed = {
            path: max(tolerance, min(MARGIN * error, MOST))
            for path, error in moved.items()
            if error <= limit
        }
        moving = {x for x in grads[0] if self.want[x].any() and any(g[x].any() for g in grads)}
        self.compared = len(moving - far), len(grads[0])
        texts = {
            "not compared, because rounding alone moves them too far": unexplained or far,
            f"compared with a margin of {MARGIN} times what rounding moves them, at most {MOST}": {
                path for path, most in self.allowed.items() if most > tolerance
            },
        }
        self.notes = [
            (FAILED if paths is unexplained else NOTE, f"{text}: {listed(sorted(paths), 5)}")
            for text, paths in texts.items()
            if paths
        ]
        if not moving - far:
            self.notes.append((FAILED, "no parameter was compared that training moves"))
        losses = [float(metrics["loss"]) for metrics in self.trained.curve]
        if not np.isfinite(losses).all():
            text = f"the loss is not finite: {losses} in the first updates; lower optimizer.lr"
            self.notes.insert(0, (FAILED, f"{text}, or mend its sum or its weight"))

    def compare(self, state: TrainState, curve: Curve) -> Result:
        """Return the verdict on what a configuration trained, and its largest error in words."""
        errors = self.errors(state, curve)
        leaf = max(errors, key=errors.__getitem__)
        text = f"{leaf} differs by {errors[leaf]:.1e}"
        self.largest = max(self.largest, (errors[leaf], text))
        return OK if errors[leaf] <= self.tolerance else FAILED, text

    def errors(self, state: TrainState, curve: Curve) -> dict[str, float]:
        """Return the error of each leaf that is compared, scaled so that the tolerance is what is
        allowed.
        """
        got = flatten(state, curve, self.trained.start.params)
        return {
            path: difference(got.get(path), self.want[path]) * self.tolerance / allowed
            for path, allowed in self.allowed.items()
        }
