"""Gathering of sharded parameters inside a shard_map, and scattering of their gradients: ZeRO
stages 2 and 3.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.axes import Axes
from jaxdp.exact.rounding import fusion_barrier
from jaxdp.models.scan import BlockGather, as_they_are
from jaxdp.parallel.padding import fit_trees
from jaxdp.parallel.reduction import Reduction
from jaxdp.precision import cast_floats
from jaxdp.split import path_string, take
from jaxdp.train.frozen import merge
from jaxdp.train.metric_sums import at_least_float32
from jaxdp.train.state import Gather, plain_gather

Tree = Any


class GatherRule(NamedTuple):
    """The rule by which parameters are gathered.

    shard_params: parameters are slices. shard_grads: the backward pass reduces gradients to slices;
    else they are full and not reduced. blocks: paths of stacked parameters [block, ...]; a model
    that scans blocks gathers one at a time. live: if not None, a fusion barrier
    (`jaxdp.exact.rounding`) follows gathered parameters and precedes the reduction of gradients;
    blocks get one in every layout, so that a block is the same program in all."""

    reduction: Reduction
    axes: Axes
    blocks: tuple[str, ...]
    trainable: Callable[[Tree], Tree]
    shard_params: bool = False
    shard_grads: bool = False
    reduce_dtype: Any = None
    live: jax.Array | None = None

    def full(self, trees: Sequence[Tree], dtype: Any, block: bool = False) -> Tree:
        """Gather a full tree in the compute dtype, with gradients for its handle; trees: see
        `make_gather`.
        """
        handle, source, dims, grad_dims, shapes = trees

        def barrier(tree: Tree, sharded: bool, live: jax.Array | None) -> Tree:
            return fusion_barrier(tree, live) if live is not None and (sharded or block) else tree

        def gather(handle: Tree, source: Tree, live: jax.Array | None) -> Tree:
            source = cast_floats(source, dtype)
            full = (
                self.reduction.gather(source, dims, self.axes.shard)
                if self.shard_params
                else source
            )
            return barrier(fit_trees(full, shapes), self.shard_params, live)

        def forward(
            handle: Tree, source: Tree, live: jax.Array | None
        ) -> tuple[Tree, jax.Array | None]:
            return gather(handle, source, live), live

        def backward(live: jax.Array | None, grads: Tree) -> tuple[Tree, None, None]:
            grads = barrier(grads, self.shard_grads, live)
            if self.shard_grads:
                sent = jax.tree.map(lambda g, d: None if d is None else g, grads, grad_dims)
                sent = (
                    _like(sent, handle)
                    if self.reduce_dtype is None
                    else cast_floats(sent, self.reduce_dtype)
                )
                grads = merge(
                    self.reduction.scatter(sent, grad_dims, self.axes),
                    jax.tree.map(jnp.zeros_like, handle),
                )
            return _like(grads, handle), None, None

        gathered = jax.custom_vjp(gather)
        gathered.defvjp(forward, backward)
        return gathered(handle, source, self.live)


def make_gather(params: Tree, dims: Tree, shapes: Tree, rule: GatherRule) -> tuple[Tree, Gather]:
    """Return (the handle, the `gather` hook of a step).

    The step differentiates with respect to the handle. It has the shapes of the gradients; its
    values are never read, so it costs nothing.

    Args:
        params: of this device, slices along `dims` if `rule.shard_params`.
        shapes: of the full parameters, without padding.
    """
    if not rule.shard_params and not rule.shard_grads and rule.live is None:
        return params, plain_gather
    grad_dims = rule.trainable(dims)

    def gather(handle: Tree, dtype: Any) -> tuple[Tree, BlockGather]:
        trees = [
            _partition(tree, rule.blocks) for tree in (handle, params, dims, grad_dims, shapes)
        ]
        stacks, gather_block = gather_stacks(rule, [blocks for blocks, _ in trees], dtype)
        return merge(rule.full([tree for _, tree in trees], dtype), stacks), gather_block

    return make_handle(params, dims, shapes, rule), gather


def make_handle(params: Tree, dims: Tree, shapes: Tree, rule: GatherRule) -> Tree:
    """Return a tree with the shapes of the gradients, in at least float32, in which they are summed
    over devices.
    """
    params = jax.tree.map(at_least_float32, params)
    if rule.shard_params == rule.shard_grads:
        return params
    if rule.shard_grads:
        index, parts = jax.lax.axis_index(rule.axes.shard), jax.lax.axis_size(rule.axes.shard)
        return jax.tree.map(lambda x, d: take(x, d, index, parts), params, dims)
    return jax.tree.map(lambda x, y: jnp.zeros(y.shape, x.dtype), params, shapes)


def gather_stacks(rule: GatherRule, trees: list[Tree], dtype: Any) -> tuple[Tree, BlockGather]:
    """Return (the full stacks of blocks, the function by which `scan_blocks` gathers one block at a
    time).

    A full stack costs nothing if only `scan_blocks` uses it: then no operation reads it.

    Args:
        trees: handle, params, dims, dims of gradients and full shapes, of the stacked leaves.
    """
    origin: dict[
        int, tuple
    ] = {}  # id of an array that the model receives -> (the array, what it was gathered from)

    def stack_of(*leaf: Any) -> jax.Array:
        (array,) = rule.full([[x] for x in leaf], dtype)
        origin[id(array)] = (array, *leaf)
        return array

    def gather_blocks(stacked: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
        leaves, treedef = jax.tree.flatten(stacked)
        if not all(id(x) in origin for x in leaves):  # computed from parameters: already full
            return as_they_are(stacked)
        _, handles, sources, dims, grad_dims, shapes = zip(*(origin[id(x)] for x in leaves))
        shapes_inside = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in shapes]

        def inner(dims):
            return [d if d is None or d < 0 else d - 1 for d in dims]  # without the block dim

        def gather_one(piece: Tree) -> Tree:
            full = rule.full([*piece, inner(dims), inner(grad_dims), shapes_inside], dtype, True)
            return jax.tree.unflatten(treedef, full)

        return (list(handles), list(sources)), gather_one

    return jax.tree.map(stack_of, *trees), gather_blocks


def _partition(tree: Tree, blocks: tuple[str, ...]) -> tuple[Tree, Tree]:
    """Split a tree into (the leaves of blocks, all others), each with None for the leaves of the
    other.
    """
    heads = tuple(f"{path}/" for path in blocks)

    def inside(path):
        return f"{path_string(path)}/".startswith(heads) if heads else False

    def pick(block):
        return jax.tree_util.tree_map_with_path(
            lambda p, x: x if inside(p) == block else None, tree
        )

    return pick(True), pick(False)


def _like(tree: Tree, other: Tree) -> Tree:
    """Cast the leaves of a tree to the dtypes of another, which may have more leaves."""
    return jax.tree.map(
        lambda x, y: None if x is None else x.astype(y.dtype),
        tree,
        other,
        is_leaf=lambda x: x is None,
    )
