"""The sums between `grads` and `apply`: of what the backward pass has not summed over the devices
already (`jaxdp.parallel.reading`)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.parallel.reading import DeviceReplica, ShardedReplica
from jaxdp.parallel.reduction import NEVER, Plan, Reduction
from jaxdp.split import WHOLE
from jaxdp.train.state import Batch, Sums, TrainState
from jaxdp.train.step import Replica, plain_total

Tree = Any
GradFunction = Callable[[TrainState, Batch, Replica], Sums]  # `Step.grads` or `Step.evaluate`


class FloatSums:
    """How sums over microbatches and devices are formed. A subclass rounds in its own way.

    All methods but `rounded`, `make_state` and, under pjit, `update` are called inside a program that
    maps the axes.

    Attributes:
        in_backward: the backward pass may sum gradients over the devices.
        advice: what to do if the optimizer's state is sharded but the optimizer is not elementwise;
            "": any optimizer will do.
    """

    in_backward = True
    advice = ""

    def replica(self, plan: Plan, numbers: jax.Array, step: jax.Array) -> Replica:
        """Return this device's part in a step.

        Args:
            numbers: int32 [local], of its microbatches.
            step: `TrainState.step`.
        """
        is_plain = not plan.params_sharded and plan.when == NEVER
        return (DeviceReplica if is_plain else ShardedReplica)(plan, numbers)

    def over_microbatches(
        self, f: GradFunction, plan: Plan, state: TrainState, batch: Batch, replica: Replica
    ) -> Sums:
        """Return the sums over a device's microbatches."""
        return f(state, batch, replica)

    def over_devices(self, plan: Plan, sums: Sums) -> Sums:
        """Return the sums over all devices."""
        leaves, treedef = jax.tree.flatten(sums.grads)  # none of an evaluation
        dims = jax.tree.leaves(plan.trainable(plan.param_dims))
        # The backward pass has summed these already.
        done = jax.tree.leaves(plan.trainable(plan.summed(True)))
        remaining = [i for i in range(len(leaves)) if not done[i]]
        grads, total = plan.send_with(
            [leaves[i] for i in remaining],
            [dims[i] if plan.update_in_slices else WHOLE for i in remaining],
            sums._replace(grads=None, kept=None),
        )
        for i, x in zip(remaining, grads):
            leaves[i] = x
        return total._replace(grads=jax.tree.unflatten(treedef, leaves), kept=sums.kept)

    def width(self, itemsize: int) -> int:
        """Return the bytes that an element of gradients of `itemsize` bytes takes on the way."""
        return itemsize

    def update(self, apply: Callable[..., Any], state: TrainState, sums: Sums) -> Any:
        """Return apply(state, sums) for sums over all devices."""
        return apply(state, sums)

    def total(self, grads: Tree, dims: Tree, axis: str, step: jax.Array) -> jax.Array:
        """Return what `plain_total` does, for gradients that are slices along dims and an axis, or
        full (None)."""
        if dims is None:
            return plain_total(grads)
        first = jax.lax.axis_index(axis) == 0

        def once(x: jax.Array, dim: int) -> jax.Array:
            return jnp.where(first, x, jnp.zeros_like(x)) if dim == WHOLE else x

        return jax.lax.psum(plain_total(jax.tree.map(once, grads, dims)), axis)

    def sum_rows(
        self, reduction: Reduction, tree: Tree, axis: str, rows: int, keys: jax.Array | None
    ) -> Tree:
        """Return the sums of leaves [row, ...] over the rows of all devices of an axis.

        Args:
            rows: their number in all.
            keys: [row], to round differences to few bits; None for values, which are sent in full.
        """
        return reduction.reduce(jax.tree.map(lambda x: x.sum(0), tree), axis)

    def rounded(self, f: Callable[..., Any], step: jax.Array) -> Callable[..., Any]:
        """Return f, rounded alike in every program, if rounding must not depend on the program."""
        return f

    def make_state(self, make: Callable[[], TrainState], mesh: Any) -> TrainState:
        """Return the initial state; called inside a program over the mesh."""
        return make()


FLOATS = FloatSums()


def arithmetic(reduction: Reduction) -> FloatSums:
    """Return the reduction's arithmetic, by default that of floats."""
    return reduction.arithmetic or FLOATS
