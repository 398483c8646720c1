"""Scan over stacked blocks: compile one body for all blocks, and read one block's parameters at a
time.

The parameters of the blocks are stacked along a first dim [block, ...]. What a training step wants
done for each block is an argument of `Model.apply`, and of `scan_blocks`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any
policies = jax.checkpoint_policies
REMAT: dict[str, Any] = {
    "none": policies.everything_saveable,
    "full": policies.nothing_saveable,
    "dots": policies.dots_saveable,
    "dots_no_batch": policies.dots_with_no_batch_dims_saveable,
}
"""What a backward pass recomputes: nothing; everything; all but matrix products; all but products
with weights."""


class BlockReader:
    """How a training step reads the parameters of blocks. With this one, they are arrays."""

    def read(self, stored: Tree) -> Tree:
        """Return the parameters that a block computes with, of one block or of a stack of them.

        A strategy gathers them here. On the way back it may sum their gradients over the devices.
        """
        return stored

    def once(self, stored: Tree) -> Tree:
        """Return the same parameters, for a scan that reads each block exactly once in this call of
        the model, under no condition; call it once at most.

        Their gradients are then sent together with those of earlier passes over microbatches;
        without it, more is sent.
        """
        return stored

    def first(self, stored: Tree) -> tuple[Tree | None, Tree]:
        """Return the token of the bottommost block, and the stored parameters without it.

        If there is one, a block's gradients are summed while those of the block below are computed:
        then `scan_blocks` reads by the three methods below instead of `read`.
        """
        return None, stored

    def values(self, stored: Tree) -> Tree:
        """Return the part of the stored parameters that `close` needs, without gradients."""
        raise NotImplementedError

    def open(self, stored: Tree, x: Tree) -> tuple[Tree, Tree]:
        """Return a token for a block, and x, the input of the block below.

        The gradient of the token is that of the block's parameters, on this device; it is summed
        over the devices where the token was opened.
        """
        raise NotImplementedError

    def close(self, values: Tree, token: Tree) -> Tree:
        """Return a block's parameters, whose gradient becomes that of the token."""
        raise NotImplementedError


class PerBlock(NamedTuple):
    """What a training step asks of each block: how it is read, and what its backward pass
    recomputes (`REMAT`)."""

    reader: BlockReader = BlockReader()
    remat: str = "none"


PLAIN = PerBlock()


def remat(name: str, f: Callable, in_scan: bool = False) -> Callable:
    """Return `f` with a backward pass that recomputes what the named policy does not save."""
    if name == "none":
        return f
    return jax.checkpoint(f, policy=REMAT[name], prevent_cse=not in_scan)


def scan_blocks(
    block: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]],
    params: Tree,
    x: Tree,
    xs: Tree = None,
    per_block: PerBlock = PLAIN,
) -> tuple[Tree, Tree]:
    """Apply x, y = block(params[i], x, xs[i]) for each block i. Don't call it under a condition that
    may differ between devices, which talk to each other here.

    Args:
        params: leaves [block, ...], as `Model.apply` got them; with `per_block` they may be opaque,
            until a block reads its own.
        xs: leaves [block, ...], or None.
        per_block: the argument of `Model.apply` of this name.

    Returns:
        (the last x, all y stacked [block, ...])
    """
    reader = per_block.reader
    token, params = reader.first(params)
    if token is not None:
        return scan_and_sum_later(block, params, token, x, xs, per_block)

    def body(x, piece):
        stored, more = piece
        return block(reader.read(stored), x, more)

    return jax.lax.scan(remat(per_block.remat, body, in_scan=True), x, (params, xs))


def scan_and_sum_later(
    block: Callable, params: Tree, token: Tree, x: Tree, xs: Tree, per_block: PerBlock
) -> tuple[Tree, Tree]:
    """Do what `scan_blocks` does, so that a block's gradients travel while those of the block below
    are computed.

        forward,  iteration i    open the token of block i + 1    compute block i
        backward, iteration i    sum the gradients of i + 1       compute the gradients of i

    Each iteration opens the token of the block above. So in the backward pass, which goes down, it
    gets the gradients of the block above, from the iteration before, and starts to sum them over
    the devices. Nothing waits for that sum until the iteration ends, with its own gradients. A sum
    in the block's own iteration would have nothing left to hide behind: XLA joins the sums of a
    block's arrays, and the last of them is computed last.

    The topmost block has no block above, and is computed outside of the loop. So is the bottommost:
    what lies below it, such as an embedding, gets its gradient from the block's input, and so its
    sum can start before the gradients of the block's own parameters are computed. A loop would end
    with all of them.
    """
    reader, last = per_block.reader, len(jax.tree.leaves(params)[0]) - 1
    values = reader.values(params)

    def one(x: Tree, token: Tree, number: Any, more: Tree) -> tuple[Tree, Tree]:
        # The values are indexed here, where slices of the stacks would be copies of them.
        return block(reader.close(at(values, number), token), x, more)

    # Outside of the loop, XLA would keep what it finds computed twice.
    alone, repeated = (remat(per_block.remat, one, in_scan=in_scan) for in_scan in (False, True))

    def and_open_above(one: Callable, carried: Any, piece: tuple) -> tuple[Any, Tree]:
        (x, token), (number, above, more) = carried, piece
        token_above, x = reader.open(above, x)
        x, y = one(x, token, number, more)
        return (x, token_above), y

    (x, token), y = and_open_above(alone, (x, token), (0, at(params, 1), at(xs, 0)))
    ys = jax.tree.map(lambda a: a[None], y)
    if last > 1:
        middle = (jnp.arange(1, last), part(params, 2, last + 1), part(xs, 1, last))
        (x, token), more = jax.lax.scan(
            functools.partial(and_open_above, repeated), (x, token), middle
        )
        ys = joined(ys, more)
    x, y = alone(x, token, last, at(xs, last))
    return x, joined(ys, jax.tree.map(lambda a: a[None], y))


def joined(a: Tree, b: Tree) -> Tree:
    """Return leaves [block, ...] of consecutive blocks as one."""
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), a, b)


def part(tree: Tree, start: int, stop: int) -> Tree:
    """Return entries start to stop - 1 of leaves [block, ...]."""
    return jax.tree.map(lambda x: x[start:stop], tree)


def at(tree: Tree, index: Any) -> Tree:
    """Return entry `index` of leaves [block, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)
