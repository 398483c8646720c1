"""Scan over stacked blocks: compile one body for all blocks, and gather one block's parameters at a
time.

The parameters of the blocks are stacked along a first dim [block, ...]. The training step sets
hooks that gather a block's parameters and select what its backward pass saves; without hooks,
`scan_blocks` is `jax.lax.scan`."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax

Tree = Any
# stacked parameters -> (the tree to scan instead, a function from one slice of it to a block's full
# parameters)
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
"""What a backward pass recomputes: nothing; everything; all but matrix products; all but products
with weights.
"""


def remat(
    name: str, f: Callable, in_scan: bool = False, static_argnums: tuple[int, ...] = ()
) -> Callable:
    """Return `f` with a backward pass that recomputes what the named policy does not save."""
    if name == "none":
        return f
    return jax.checkpoint(
        f, policy=REMAT[name], prevent_cse=not in_scan, static_argnums=static_argnums
    )


_hooks: contextvars.ContextVar[tuple[BlockGather, str]]
_hooks = contextvars.ContextVar("hooks", default=(as_they_are, "none"))


@contextlib.contextmanager
def block_hooks(gather: BlockGather, remat: str) -> Iterator[None]:
    """Set the gather function of blocks' parameters and the name of the remat policy for models
    traced inside.
    """
    token = _hooks.set((gather, remat))
    try:
        yield
    finally:
        _hooks.reset(token)


def scan_blocks(
    block: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]], params: Tree, x: Tree, xs: Tree = None
) -> tuple[Tree, Tree]:
    """Apply x, y = block(params[i], x, xs[i]) for each block i; return (the last x, all y stacked).

    params, xs: leaves [block, ...]. One block at a time is gathered if a `Model` lists the path of
    params in `blocks` and passes them on unchanged; parameters that were modified first, or come
    out of a nested jit, are all gathered."""
    gather, policy = _hooks.get()
    stack, gather_block = gather(params)

    def body(x: Tree, piece: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        params, xs = piece
        return block(gather_block(params), x, xs)

    return jax.lax.scan(remat(policy, body, in_scan=True), x, (stack, xs))
