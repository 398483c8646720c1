"""The plan of a sum: how a program's devices store parameters and sum gradients.

When gradients are summed over the devices, and what a pass over microbatches returns:

    NEVER   One device, buckets, models without scanned blocks. A pass returns local, full gradients;
            all are summed after the passes.
    LAST    Scanned blocks in stages 0 and 1, or with a replicated gradient buffer. The last pass sums
            all gradients, with those of earlier passes: those of a block where it is differentiated.
    EVERY   Stages 2 and 3. Each pass sums those that are sharded, to slices; the others are summed
            after the passes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.axes import Axes
from jaxdp.parallel.reduction import Reduction
from jaxdp.split import WHOLE

Tree = Any
NEVER, LAST, EVERY = "never", "last", "every"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a program's devices store parameters and sum gradients. The program defines the axes.

    Args:
        assignment: int32 [device, local], the numbers of the microbatches of each device, -1 for
            none.
        dims: of the parameters, the dim along which each is sharded where it is, or WHOLE.
        shapes: of the full parameters, without padding.
        trainable: see `Step`.
        sharded: parameters are stored as slices along `dims`.
        sliced: the update wants slices of gradients along `dims`.
        when: gradients are summed over the devices inside the backward pass of EVERY pass over
            microbatches, those that are sharded; inside the LAST pass; or NEVER.
        later: a block's gradients are summed while those of the block below are computed.
        in_blocks: a tree of booleans like the parameters: those that are read one block at a time.
        dtype: of gradients while they are sent; None: their own.
        is_update: False for an evaluation, which has no gradients.
    """

    reduction: Reduction
    axes: Axes
    assignment: np.ndarray
    dims: Tree
    shapes: Tree
    trainable: Callable[[Tree], Tree]
    sharded: bool = False
    sliced: bool = False
    when: str = NEVER
    later: bool = False
    in_blocks: Tree = None
    dtype: Any = None
    is_update: bool = False

    def numbers(self) -> jax.Array:
        """Return the numbers [local] of this device's microbatches; call it inside the program."""
        return jnp.asarray(self.assignment)[jax.lax.axis_index(self.axes.all)]

    def summed(self, last: bool) -> Tree:
        """Return a tree of booleans like the parameters: those whose gradients the backward pass of
        a pass over microbatches sums over the devices."""

        def in_this_pass(dim: int) -> bool:
            return dim != WHOLE if self.when == EVERY else self.when == LAST and last

        return jax.tree.map(in_this_pass, self.dims)

    def send(self, grads: list[jax.Array], dims: list[int]) -> list[jax.Array]:
        """Sum full gradients over the devices: to slices along dims, or to full ones (WHOLE)."""
        return self.send_with(grads, dims, None)[0]

    def send_with(
        self, grads: list[jax.Array], dims: list[int], rest: Tree
    ) -> tuple[list[jax.Array], Tree]:
        """Do what `send` does, and sum the rest in one operand with the full gradients, which a
        packed all-reduce needs."""
        sent = [x if self.dtype is None else x.astype(self.dtype) for x in grads]
        whole = [i for i, dim in enumerate(dims) if dim == WHOLE]
        if len(whole) < len(sent):
            sent = self.reduction.scatter(sent, dims, self.axes)
        if whole or rest is not None:
            operands = ([sent[i] for i in whole], rest)
            full, rest = self.reduction.reduce(operands, self.axes.all)
            for i, x in zip(whole, full):
                sent[i] = x
        return [total.astype(x.dtype) for total, x in zip(sent, grads, strict=True)], rest


def order_of(assignment: np.ndarray) -> np.ndarray:
    """Return the position of each microbatch in [device x local]."""
    flat = assignment.reshape(-1)
    order = np.argsort(np.where(flat < 0, flat.size, flat), kind="stable")
    return order[: flat.max() + 1]
