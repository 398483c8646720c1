"""Blocks of one shape, stacked and scanned: one compiled body for all, and one block's parameters whole at a time.

The parameters of the blocks are stacked along a first dim [block, ...]. What runs the model (the step) decides how a
block's parameters become whole and what its backward pass keeps; alone, `scan_blocks` is `jax.lax.scan`.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

Tree = Any


# stacked parameters -> (what to scan in their place, what makes the parameters of one block of a piece of it)
BlockGather = Callable[[Tree], tuple[Tree, Callable[[Tree], Tree]]]


def as_they_are(params: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
    return params, lambda piece: piece


policies = jax.checkpoint_policies
REMAT: dict[str, Any] = {
    "none": policies.everything_saveable,
    "full": policies.nothing_saveable,
    "dots": policies.dots_saveable,
    "dots_no_batch": policies.dots_with_no_batch_dims_saveable,
}
"""What a backward pass computes again: nothing; everything; all but matrix products; all but those with weights."""


def remat(name: str, f: Callable, in_scan: bool = False) -> Callable:
    """`f`, whose backward pass computes again what the policy does not keep."""
    if name == "none":
        return f
    return jax.checkpoint(f, policy=REMAT[name], prevent_cse=not in_scan)


class _Hooks(NamedTuple):
    gather: BlockGather = as_they_are
    remat: str = "none"


PLAIN = _Hooks()
_hooks = contextvars.ContextVar("hooks", default=PLAIN)


@contextlib.contextmanager
def block_hooks(gather: BlockGather, remat: str) -> Iterator[None]:
    """While a model is traced inside: how a block's parameters are made whole, and the name of the remat policy."""
    token = _hooks.set(_Hooks(gather, remat))
    try:
        yield
    finally:
        _hooks.reset(token)


def scan_blocks(
    block: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]], params: Tree, x: Tree, xs: Tree = None
) -> tuple[Tree, Tree]:
    """(x, y) -> block(params[i], x, xs[i]) for one block after the other: (the last x, every y stacked).

    params, xs: leaves [block, ...]. Where a `Model` names their place among its `blocks`, and they come as they were
    given to it, one block's at a time is made whole; of what was changed before, or taken from a jit of one's own, all.
    """
    hooks = _hooks.get()
    stack, whole = hooks.gather(params)

    def body(x: Tree, piece: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        params, xs = piece
        return block(whole(params), x, xs)

    return jax.lax.scan(remat(hooks.remat, body, in_scan=True), x, (stack, xs))
