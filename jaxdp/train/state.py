"""The inputs and outputs of a step: the train state, a replica's view of it, and the sums of its
microbatches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxdp.errors import UsageError
from jaxdp.models.scan import BlockGather, as_they_are
from jaxdp.precision import LossScale, cast_floats
from jaxdp.split import path_string
from jaxdp.train.average import first_statistics
from jaxdp.train.carry import split_carry
from jaxdp.train.options import Batch, Forward, Transform, UpdateRule
from jaxdp.train.skip import Guard, start_guard

__all__ = [
    "Batch",
    "Gather",
    "Join",
    "Sums",
    "Total",
    "TrainState",
    "Transform",
    "View",
    "init_state",
]
Tree = Any
# (parameters, compute dtype) -> (full parameters of that dtype, the function that gathers a block
# in `scan_blocks`)
Gather = Callable[[Tree, Any], tuple[Tree, BlockGather]]
# leaves [local, ...] of a replica -> leaves [microbatch, ...] of all replicas
Join = Callable[[Tree], Tree]
# gradients -> [2]: the sum of their squares, and the number of non-finite elements
Total = Callable[[Tree], jax.Array]


class TrainState(struct.PyTreeNode):
    """Everything that an update changes, in logical shapes: step [], trees, and carry[microbatch,
    example, ...].

    ema: the running average of the parameters; ema_state: that of the floats of the model state.
    `ema`, `ema_state`, `loss_scale`, `carry` and `exponents` (`jaxdp.exact.fixed_point`) are
    None when not in use. step: counts all updates; guard: the skipped ones of them.
    """

    step: jax.Array
    params: Tree
    model_state: Tree
    opt_state: Tree
    ema: Tree = None
    loss_scale: LossScale | None = None
    carry: Tree = None
    guard: Guard = struct.field(default_factory=start_guard)
    exponents: jax.Array | None = None
    ema_state: Tree = None

    def view(self, seed: Any) -> "View":
        scale = None if self.loss_scale is None else self.loss_scale.value
        return View(
            seed, self.step, self.params, self.model_state, scale, self.carry, self.exponents
        )


class View(NamedTuple):
    """The part of the state that a replica needs to compute its sums; loss_scale [] or None,
    carry[local, ...].
    """

    seed: Any
    step: jax.Array
    params: Tree
    model_state: Tree
    loss_scale: Any = None
    carry: Tree = None
    exponents: Any = None


class Sums(NamedTuple):
    """Sums over microbatches and replicas. Only `carry` is not summed: it stays with its
    microbatches.

    model_state: floats as `Average`, integers as `Change`. carry: a `Carried` from `Step.grads`,
    the tree itself from `Step.evaluate`. exponents: the reduction's own state.
    """

    grads: Tree
    loss: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array]
    model_state: Tree
    carry: Tree = None
    exponents: Tree = None


def plain_gather(params: Tree, dtype: Any) -> tuple[Tree, BlockGather]:
    """Return replicated parameters in the compute dtype; there is nothing to gather."""
    return cast_floats(params, dtype), as_they_are


def plain_join(tree: Tree) -> Tree:
    """Return the microbatches of the only replica unchanged."""
    return tree


def microbatch_key(seed: jax.Array, step: jax.Array, microbatch: jax.Array) -> jax.Array:
    """Return fold_in(fold_in(key(seed), step), microbatch): the key of everything random in one
    microbatch.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), microbatch)


def init_state(forward: Forward, rule: UpdateRule, microbatches: int, example: Batch) -> TrainState:
    """Return the state before the first update. Raises UsageError if a parameter cannot be trained.

    Args:
        microbatches: of an update.
        example: one microbatch [example, ...]; only its shapes and dtypes matter.
    """
    policy = forward.policy
    params, model_state = forward.model.init(jax.random.key(forward.seed), policy.inputs(example))
    params = cast_floats(jax.tree.map(jnp.asarray, params), policy.params)
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            parts, state = (
                "store its real and imaginary parts as two arrays",
                "make it part of the model's state",
            )
            fix = (
                parts if jnp.issubdtype(x.dtype, jnp.complexfloating) else f"{state}, or a constant"
            )
            raise UsageError(
                f"model: parameter {path_string(path)!r} is {x.dtype}, and only floats are trained; {fix}"
            )
    model_state, carry = split_carry(cast_floats(model_state, policy.state))
    if carry is not None:
        carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (microbatches, *x.shape)), carry)
    return TrainState(
        jnp.zeros((), jnp.int32),
        params,
        model_state,
        rule.tx.init(rule.trainable(params)),
        # small steps need precision
        ema=None
        if rule.ema_decay is None
        else jax.tree.map(jnp.copy, cast_floats(params, policy.state)),
        loss_scale=forward.loss_scaling.init() if forward.loss_scaling else None,
        carry=carry,
        guard=start_guard(rule.spike),
        ema_state=None if rule.ema_decay is None else first_statistics(model_state),
    )
