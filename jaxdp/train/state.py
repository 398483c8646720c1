"""The two records of a step: what an update changes, and what adds up."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxdp.precision import LossScale
from jaxdp.train.skip import Guard, start_guard

Tree = Any
Batch = dict[str, jax.Array]


class TrainState(struct.PyTreeNode):
    """Everything that an update changes, in logical shapes.

    Args:
        step: int32 [], the number of updates so far, applied or skipped.
        params: the parameters, in the dtype that they are stored in.
        model_state: what the model keeps besides parameters, such as BatchNorm's averages.
        opt_state: of the optimizer, for the parameters that are trained.
        loss_scale: None if the loss is not scaled.
        guard: counters of skipped updates.
        extra: what wrappers of the step and an arithmetic remember, by name, such as "ema". A tree
            with the structure of the parameters is stored like them.
        kept: what belongs to the examples of a microbatch, by name, such as "carry": leaves
            [microbatch, example, ...].
        seed: uint32 [], the root of all random keys. It is the config's: an exported state, as in a
            checkpoint, has None.
    """

    step: jax.Array
    params: Tree
    model_state: Tree
    opt_state: Tree
    loss_scale: LossScale | None = None
    guard: Guard = struct.field(default_factory=start_guard)
    extra: dict[str, Tree] = struct.field(default_factory=dict)
    kept: dict[str, Tree] = struct.field(default_factory=dict)
    seed: Any = None


class Sums(NamedTuple):
    """Sums over microbatches and devices: all of it adds up, and `apply` divides once.

    Args:
        grads: of the sum of the losses; None for frozen parameters.
        loss: [], the sum of the losses.
        weight: [], what all sums are divided by, such as the number of examples.
        metrics: [] each.
        model_state: floats as `Average`, integers as `Change` (`jaxdp.train.model_state`).
        extra: what an arithmetic hands over from the sums to the update.
        kept: the new `TrainState.kept`, the only field that is not summed: leaves [microbatch,
            example, ...].
    """

    grads: Tree = None
    loss: Tree = None
    weight: Tree = None
    metrics: Tree = None
    model_state: Tree = None
    extra: Tree = None
    kept: Tree = None


def microbatch_key(seed: jax.Array, step: jax.Array, number: jax.Array) -> jax.Array:
    """Return the key of everything random in one microbatch: fold_in(fold_in(key(seed), step),
    number).

    It depends on the microbatch and not on the device that computes it. That is half of why the
    number of devices does not change a loss curve; the other half is that `Sums` adds up.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), number)


def expand_to(marks: jax.Array, x: jax.Array) -> jax.Array:
    """Return marks [example, ...] with more dims of size 1, so that they apply to x [example, ...]."""
    return marks.reshape(marks.shape + (1,) * (x.ndim - marks.ndim))


def add(sums: Tree, more: Tree) -> Tree:
    """Add two trees of sums, in the dtypes of the first."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, more)


def select(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    """Select one of two trees; a leaf that is one array in both is returned without a selection."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), yes, no)


def merge(tree: Tree, full: Tree) -> Tree:
    """Fill the None leaves of `tree` with those of `full`."""
    return jax.tree.map(lambda a, b: b if a is None else a, tree, full, is_leaf=lambda x: x is None)
