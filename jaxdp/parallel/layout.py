"""A layout says which trees are split over the devices: the ZeRO stages are a table of four.

Rajbhandari et al., arXiv 1910.02054. Splitting goes leaf by leaf, by the rule of `jaxdp.split`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.axes import Axes
from jaxdp.models.scan import BlockGather, as_they_are
from jaxdp.parallel.reduction import Reduction
from jaxdp.parallel.rounding import settle
from jaxdp.precision import cast_floats
from jaxdp.split import WHOLE, path_string, split_dims, take
from jaxdp.step import Gather, TrainState, merge, plain_gather

Tree = Any


class Layout(NamedTuple):
    """grads: split while they are accumulated. They always are when the optimizer sees them, if its state is."""

    params: bool = False
    grads: bool = False
    opt_state: bool = False


ZERO = (
    Layout(),
    Layout(opt_state=True),
    Layout(opt_state=True, grads=True),
    Layout(opt_state=True, grads=True, params=True),
)


def of_params(state: TrainState, dims: Any) -> Any:
    """The dims of the optimizer state, but whole what is not of a parameter: a coefficient is none of its slices."""
    shapes = {f"/{path_string(p)}": x.shape for p, x in jax.tree_util.tree_leaves_with_path(state.params)}

    def own(path: Any, x: Any, dim: int) -> int:
        here = f"/{path_string(path)}"
        return dim if any(here.endswith(p) and x.shape == shape for p, shape in shapes.items()) else WHOLE

    return jax.tree_util.tree_map_with_path(own, state.opt_state, dims)


class Share(NamedTuple):
    """How much of parameters and optimizer state is split; whole: leaves that the layout splits and no dim does."""

    split_bytes: int
    total_bytes: int
    whole: int
    whole_bytes: int


def state_dims(state: TrainState, layout: Layout, parts: int, blocks: tuple[str, ...], most: int = 1) -> Any:
    """A TrainState of the dim that each leaf is split along, or WHOLE; the carry is the strategy's own.

    most: see `split_dim`.
    """
    split = lambda tree, wanted: split_dims(tree, parts if wanted else 1, blocks, most)
    return TrainState(
        step=split(state.step, False),
        params=split(state.params, layout.params),
        model_state=split(state.model_state, False),
        opt_state=split(state.opt_state, layout.opt_state),
        ema=split(state.ema, layout.opt_state),
        loss_scale=split(state.loss_scale, False),
        carry=split(state.carry, False),
        guard=split(state.guard, False),
    )


def share(state: TrainState, dims: Any, layout: Layout) -> Share:
    """The share of params, opt_state and ema that is split; a count of an optimizer is no leaf to split."""
    arrays = lambda tree, like: [x for x, s in zip(jax.tree.leaves(tree), jax.tree.leaves(like)) if s.shape]
    bytes_of = lambda tree: [math.prod(x.shape) * x.dtype.itemsize for x in arrays(tree, tree)]
    trees = lambda s: [(s.params, layout.params), ((s.opt_state, s.ema), layout.opt_state)]
    split = whole = left = 0
    for (tree, wanted), (along, _) in zip(trees(state), trees(dims)):
        sizes = list(zip(bytes_of(tree), arrays(along, tree)))
        split += sum(size for size, d in sizes if d != WHOLE)
        stayed = [size for size, d in sizes if d == WHOLE and wanted]
        left, whole = left + sum(stayed), whole + len(stayed)
    return Share(split, sum(bytes_of((state.params, state.opt_state, state.ema))), whole, left)


def make_gather(
    params: Tree,
    dims: Tree,
    *,
    split_params: bool,
    split_grads: bool,
    reduction: Reduction,
    axes: Axes,
    blocks: tuple[str, ...],
    trainable: Callable[[Tree], Tree],
    reduce_dtype: Any = None,
    live: jax.Array | None = None,
) -> tuple[Tree, Gather]:
    """(what to differentiate with respect to, the `gather` that makes whole parameters of it), inside a shard_map.

    params: this device's, slices along `dims` where `split_params`. Gradients come as slices summed over all devices
    where `split_grads`, else whole and not summed. The first tree has the shapes of these gradients; its values are
    not read, so that it costs nothing: the parameters are `params`, one block at a time where the model scans blocks.
    live: with it, what was gathered settles, and gradients before they are reduced (`jaxdp.parallel.rounding`); and so
    do a block's in any layout, so that the block is the same program in all.
    """
    if not split_params and not split_grads and live is None:
        return params, plain_gather
    parts = jax.lax.axis_size(axes.shard)
    sent_dims = trainable(dims)
    if split_params == split_grads:
        handle = params
    elif split_grads:
        index = jax.lax.axis_index(axes.shard)
        handle = jax.tree.map(lambda x, d: take(x, d, index, parts), params, dims)
    else:
        handle = jax.tree.map(lambda x, d: jnp.zeros(whole_shape(x, d, parts), x.dtype), params, dims)

    def lend(handle: Tree, source: Tree, dims: Tree, sent_dims: Tree, dtype: Any, block: bool = False) -> Tree:
        """The whole of `source`, in the compute dtype, with gradients for `handle`."""
        stand = lambda tree, wanted, live: settle(tree, live) if live is not None and (wanted or block) else tree

        def whole(handle: Tree, source: Tree, live: jax.Array | None) -> Tree:
            source = cast_floats(source, dtype)
            gathered = reduction.gather(source, dims, axes.shard) if split_params else source
            return stand(gathered, split_params, live)

        def forward(handle: Tree, source: Tree, live: jax.Array | None) -> tuple[Tree, jax.Array | None]:
            return whole(handle, source, live), live

        def backward(live: jax.Array | None, grads: Tree) -> tuple[Tree, None, None]:
            grads = stand(grads, split_grads, live)
            if split_grads:
                sent = jax.tree.map(lambda g, d: None if d is None else g, grads, sent_dims)
                sent = _like(sent, handle) if reduce_dtype is None else cast_floats(sent, reduce_dtype)
                grads = merge(reduction.scatter(sent, sent_dims, axes), jax.tree.map(jnp.zeros_like, handle))
            return _like(grads, handle), None, None

        lent = jax.custom_vjp(whole)
        lent.defvjp(forward, backward)
        return lent(handle, source, live)

    def gather(handle: Tree, dtype: Any) -> tuple[Tree, BlockGather]:
        (inside, outside), *others = (_cut(tree, blocks) for tree in (handle, params, dims, sent_dims))
        whole = lend(outside, others[0][1], others[1][1], others[2][1], dtype)
        lent = {}  # id of an array that the model gets -> (the array, what it is made of)

        def stack_of(handle: Any, source: Any, dim: int, sent: int | None) -> jax.Array:
            """A stack as a whole, which costs nothing where nobody reads it: where it goes to `scan_blocks` alone."""
            (array,) = lend([handle], [source], [dim], [sent], dtype)
            lent[id(array)] = (array, handle, source, dim, sent)
            return array

        stacks = jax.tree.map(stack_of, inside, *(tree for tree, _ in others))

        def of_blocks(stacked: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
            leaves, treedef = jax.tree.flatten(stacked)
            if not all(id(x) in lent for x in leaves):  # not what the model was given: whole, and to be taken as it is
                return as_they_are(stacked)
            _, handles, sources, along, sent = zip(*(lent[id(x)] for x in leaves))
            inner = lambda dims: [d if d is None or d < 0 else d - 1 for d in dims]
            one = lambda piece: jax.tree.unflatten(
                treedef, lend(piece[0], piece[1], inner(along), inner(sent), dtype, True)
            )
            return (list(handles), list(sources)), one

        return merge(whole, stacks), of_blocks

    return handle, gather


def whole_shape(x: Any, dim: int, parts: int) -> tuple[int, ...]:
    return tuple(size * parts if d == dim else size for d, size in enumerate(x.shape))


def _cut(tree: Tree, blocks: tuple[str, ...]) -> tuple[Tree, Tree]:
    """(the leaves of blocks, all others), each with None in place of the other."""
    heads = tuple(f"{path}/" for path in blocks)
    inside = lambda path: f"{path_string(path)}/".startswith(heads) if heads else False
    pick = lambda wanted: jax.tree_util.tree_map_with_path(lambda p, x: x if inside(p) == wanted else None, tree)
    return pick(True), pick(False)


def _like(tree: Tree, other: Tree) -> Tree:
    """The leaves of a tree in the dtypes of another that may have more."""
    return jax.tree.map(lambda x, y: None if x is None else x.astype(y.dtype), tree, other, is_leaf=lambda x: x is None)
