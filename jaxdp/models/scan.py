"""Scan over stacked blocks: compile one body for all blocks, and read one block's parameters at a
time.

The parameters of the blocks are stacked along a first dim [block, ...]. What a training step wants
done for each block is an argument of `Model.apply`, and of `scan_blocks`.
"""

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

    def sums_later(self, stored: Tree) -> bool:
        """Return whether a block's gradients are to be summed while those of the block below are
        computed: then `scan_blocks` reads by the three methods below instead of `read`."""
        return False

    def values(self, stored: Tree) -> Tree:
        """Return the part of the stored parameters that `close` needs, without gradients."""
        raise NotImplementedError

    def open(self, stored: Tree) -> Tree:
        """Return a token for a block. Its gradient is that of the block's parameters, on this
        device; it is summed over the devices where the token was opened."""
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
    """Apply x, y = block(params[i], x, xs[i]) for each block i.

    Args:
        params: leaves [block, ...], as `Model.apply` got them; with `per_block` they may be opaque,
            until a block reads its own.
        xs: leaves [block, ...], or None.
        per_block: the argument of `Model.apply` of this name.

    Returns:
        (the last x, all y stacked [block, ...])
    """
    reader = per_block.reader
    if reader.sums_later(params):
        return scan_and_sum_later(block, params, x, xs, per_block)

    def body(x: Tree, piece: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        stored, more = piece
        return block(reader.read(stored), x, more)

    return jax.lax.scan(remat(per_block.remat, body, in_scan=True), x, (params, xs))


def scan_and_sum_later(
    block: Callable, params: Tree, x: Tree, xs: Tree, per_block: PerBlock
) -> tuple[Tree, Tree]:
    """Do what `scan_blocks` does, so that a block's gradients travel while those of the block below
    are computed.

        forward,  iteration i    open the token of block i + 1    compute block i
        backward, iteration i    sum the gradients of i + 1       compute the gradients of i

    Each iteration opens the token of the block above. So in the backward pass, which goes down, it
    gets the gradients of the block above, from the iteration before, and starts to sum them over
    the devices. Nothing waits for that sum until the iteration ends, with its own gradients. A sum
    in the block's own iteration would have nothing left to hide behind: XLA joins the sums of a
    block's arrays, and the last of them is computed last. The topmost block has no block above, and
    is computed outside of the loop.
    """
    reader, last = per_block.reader, len(jax.tree.leaves(params)[0]) - 1
    values = reader.values(params)

    def one(x: Tree, token: Tree, number: Any, more: Tree) -> tuple[Tree, Tree]:
        # The values are indexed here, where slices of the stacks would be copies of them.
        return block(reader.close(at(values, number), token), x, more)

    one = remat(per_block.remat, one, in_scan=True)

    def body(carried: tuple[Tree, Tree], piece: tuple) -> tuple[tuple[Tree, Tree], Tree]:
        (x, token), (number, above, more) = carried, piece
        token_above = reader.open(above)
        x, y = one(x, token, number, more)
        return (x, token_above), y

    above, more = jax.tree.map(lambda a: a[1:], params), jax.tree.map(lambda a: a[:-1], xs)
    first = reader.open(at(params, 0))
    (x, token), ys = jax.lax.scan(body, (x, first), (jnp.arange(last), above, more))
    x, y = one(x, token, last, at(xs, last))
    return x, jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), ys, y)


def at(tree: Tree, index: Any) -> Tree:
    """Return entry `index` of leaves [block, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)
