"""What training means, in plain loops: real rows, sums of weighted losses, one division, the optimizer as it is.

None of the step's code, no sharding, no padding; a fault that the step and its judge had in common could not be seen.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxdp.axes import DATA
from jaxdp.data.cursor import RESET
from jaxdp.losses import apply_loss
from jaxdp.models.base import CARRY
from jaxdp.precision import cast_floats
from jaxdp.split import path_string
from jaxdp.verify.subject import Subject, Tree, Trial

Batch = dict[str, Any]


class Start(NamedTuple):
    """What belongs to examples (an LSTM's state) is under the model state's "carry"."""

    params: Tree
    model_state: Tree


class Trained(NamedTuple):
    """carry[microbatch, example, ...]; curve: {metric: [update]}; grads: the mean gradient of each update, unclipped.

    disagreeing: paths of integers of the model state that the microbatches changed in different ways.
    """

    params: Tree
    model_state: Tree
    opt_state: Tree
    ema: Tree
    carry: Tree
    curve: dict[str, np.ndarray]
    grads: list[Tree]
    disagreeing: frozenset[str]


class Oracle(NamedTuple):
    """forward(params, state, batch, key) -> (outputs, what the loss gets, new state), of one microbatch.

    value(trainable, frozen, state, batch, key) -> ((loss, (weight, metrics, new state)), gradients of the first).
    together: the same of lists of states, batches and keys, with one loss over them all. judge(outputs, batch) ->
    (loss, weight, metrics).
    """

    forward: Callable[..., tuple[Any, Batch, Tree]]
    value: Callable[..., Any]
    together: Callable[..., Any]
    judge: Callable[..., tuple[Any, Any, dict[str, Any]]]


def plain(f: Callable) -> Callable:
    return f


def bind(device: jax.Device) -> Callable[[Callable], Callable]:
    """f -> the same where the axis of all devices is named, and has one: what asks for it runs nowhere else."""
    mesh = Mesh(np.array([device]), (DATA,), axis_types=(AxisType.Auto,))
    return lambda f: jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def make_oracle(subject: Subject, one: Callable[[Callable], Callable] = plain) -> Oracle:
    """one: what makes a function of one device, `plain` or by `bind`."""

    def forward(params: Tree, state: Tree, batch: Batch, key: jax.Array) -> tuple[Any, Batch, Tree]:
        key, augment_key = jax.random.split(key)
        mask = batch["mask"]
        if subject.transform is not None:
            batch = subject.transform(batch, augment_key, True)
        inputs = {**cast_floats(batch, jnp.float64), "mask": mask != 0}
        outputs, state = subject.model.apply(params, state, inputs, key, True)
        return cast_floats(outputs, jnp.float64), {**batch, "mask": mask.astype(jnp.float64)}, state

    def value(trainable: Tree, frozen: Tree, state: Tree, batch: Batch, key: jax.Array) -> Any:
        def loss(trainable: Tree) -> Any:
            outputs, judged, new = forward(join(trainable, frozen), state, batch, key)
            total, weight, metrics = judge(outputs, judged)
            return total, (weight, metrics, new)

        return jax.value_and_grad(loss, has_aux=True)(trainable)

    def together(trainable: Tree, frozen: Tree, *pieces: list[Any]) -> Any:
        def loss(trainable: Tree) -> Any:
            found = [forward(join(trainable, frozen), *piece) for piece in zip(*pieces, strict=True)]
            outputs, judged, new = zip(*found, strict=True)
            every = lambda trees: jax.tree.map(lambda *x: jnp.concatenate(x), *trees)
            total, weight, metrics = judge(every(outputs), every(judged))
            return total, (weight, metrics, list(new))

        return jax.value_and_grad(loss, has_aux=True)(trainable)

    judge = functools.partial(apply_loss, subject.loss)
    return Oracle(jax.jit(one(forward)), jax.jit(one(value)), jax.jit(one(together)), jax.jit(one(judge)))


@functools.lru_cache(maxsize=4)
def make_update(tx: optax.GradientTransformation, clip_norm: float | None) -> Callable[..., tuple[Tree, Tree]]:
    """update(trainable, opt_state, mean gradients) -> (trainable, opt_state)"""

    def update(trainable: Tree, opt_state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        if clip_norm is not None:
            norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip_norm / norm), grads)
        updates, opt_state = tx.update(grads, opt_state, trainable)
        return optax.apply_updates(trainable, updates), opt_state

    return jax.jit(update)


def start(subject: Subject, trial: Trial) -> Start:
    """The parameters and model state before the first update, in float64."""
    made = jax.jit(subject.model.init)(jax.random.key(subject.seed), cast_floats(trial.example, jnp.float64))
    return Start(*cast_floats(made, jnp.float64))


def key_of(subject: Subject, update: int, microbatch: int) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(subject.seed), update), microbatch)


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is told of in the verdict
def train(
    subject: Subject, oracle: Oracle, trial: Trial, start: Start, tx: optax.GradientTransformation, frozen: list[str]
) -> Trained:
    """One update for each batch of the trial; tx and frozen expressions: those of the subject, or made of them."""
    update = make_update(tx, subject.clip_norm)
    params, (state, first) = start.params, without_carry(start.model_state)
    carry = [first] * trial.microbatches
    thawed, rest = divide(params, frozen)
    opt_state = tx.init(thawed)
    ema, curve, history, disagreeing = params, list[dict[str, float]](), list[Tree](), set[str]()
    for i, batch in enumerate(trial.batches):
        sums: list[tuple[dict[str, float], float]] = []
        grads: list[Tree] = []
        states: list[Tree] = []
        every = [{k: v[m] for k, v in batch.items()} for m in range(trial.microbatches)]
        real = [m for m, piece in enumerate(every) if (piece["mask"] != 0).any()]  # a data set may mask every token
        whole = [state if carry[m] is None else {**state, CARRY: anew(carry[m], every[m])} for m in real]
        pieces, keys = [every[m] for m in real], [key_of(subject, i, m) for m in real]
        if subject.couples:
            (loss, (weight, metrics, news)), gradient = jax.device_get(
                oracle.together(thawed, rest, whole, pieces, keys)
            )
            sums, grads = [({"loss": loss, **metrics}, weight)], [gradient]
            rows = [float(np.sum(piece["mask"])) for piece in pieces]
            shares = [weight * own / sum(rows) for own in rows]
        else:
            each = [jax.device_get(oracle.value(thawed, rest, *piece)) for piece in zip(whole, pieces, keys)]
            sums = [({"loss": loss, **metrics}, weight) for (loss, (weight, metrics, _)), _ in each]
            grads, news = [gradient for _, gradient in each], [new for (_, (_, _, new)), _ in each]
            shares = [weight for _, weight in sums]
        for m, new in zip(real, news, strict=True):
            new, carry[m] = without_carry(new)
            states.append(new)
        total = sum(weight for _, weight in sums)
        mean = weighted(grads, [1 / total] * len(grads))
        means = {name: sum(one[name] for one, _ in sums) / total for name in sums[0][0]}
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(mean)))
        curve.append({**means, "grad_norm": norm, "weight": total})
        history.append(mean)
        state, differ = average(states, [share / total for share in shares])
        disagreeing |= differ
        thawed, opt_state = update(thawed, opt_state, mean)
        params = join(thawed, rest)
        if subject.ema_decay is not None:
            ema = weighted([ema, params], [subject.ema_decay, 1 - subject.ema_decay])
    return Trained(
        params,
        state,
        opt_state,
        None if subject.ema_decay is None else ema,
        None if first is None else jax.tree.map(lambda *x: np.stack(x), *carry),
        {name: np.array([metrics[name] for metrics in curve]) for name in curve[0]},
        history,
        frozenset(disagreeing),
    )


def weighted(trees: list[Tree], factors: list[float]) -> Tree:
    """The sum of trees, each times its factor."""
    return jax.tree.map(lambda *x: sum(np.asarray(a) * factor for a, factor in zip(x, factors)), *trees)


def average(states: list[Tree], shares: list[float]) -> tuple[Tree, set[str]]:
    """(the model state after an update, the paths of what disagrees): floats by share, integers as all have them."""
    disagreeing = set[str]()

    def one(path: Any, *leaves: np.ndarray) -> np.ndarray:
        if jnp.issubdtype(leaves[0].dtype, jnp.floating):
            return np.asarray(sum(x * share for x, share in zip(leaves, shares)))
        if any((x != leaves[0]).any() for x in leaves):
            disagreeing.add(path_string(path))
        return leaves[0]

    return jax.tree_util.tree_map_with_path(one, *states), disagreeing


def divide(params: Tree, frozen: list[str]) -> tuple[Tree, Tree]:
    """(what is trained, what is frozen), each with None in place of the other."""
    fixed = lambda path: any(re.search(pattern, path_string(path)) for pattern in frozen)
    pick = lambda wanted: jax.tree_util.tree_map_with_path(lambda p, x: x if fixed(p) == wanted else None, params)
    return pick(False), pick(True)


def join(one: Tree, other: Tree) -> Tree:
    return jax.tree.map(lambda a, b: b if a is None else a, one, other, is_leaf=lambda x: x is None)


def anew(carry: Tree, piece: Batch) -> Tree:
    """What the examples of a microbatch carry into it: zeros where they begin anew."""
    if RESET not in piece:
        return carry
    return jax.tree.map(lambda x: np.stack([y * (not new) for y, new in zip(np.asarray(x), piece[RESET])]), carry)


def without_carry(state: Tree) -> tuple[Tree, Tree]:
    if isinstance(state, dict) and CARRY in state:
        return {k: v for k, v in state.items() if k != CARRY}, state[CARRY]
    return state, None
