"""Collectives inside jit, between the devices along an axis that pmap or shard_map maps.

Each is one or two calls of `jax.lax` on an array or a pytree of arrays, and can be differentiated,
but for max and min. A rank is an index along the axis. `groups`, such as [[0, 1], [2, 3]], and
`root` are as in the eager collectives. All devices get results of one shape, so groups must have
one size and cover the axis, except in allreduce, reduce and broadcast. Call shard_map with
check_vma=False. Raises UsageError for invalid arguments while tracing."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdp.errors import UsageError, one_line
from jaxdp.interop.kernels import REDUCTIONS, axis_size, check_op, of_member, reduced, scattered
from jaxdp.process.signature import Groups, Partition, as_rank, has_dim, partition, roots_of

Tree = Any


def allreduce(x: Tree, axis_name: Any, op: str = "sum", groups: Groups = None) -> Tree:
    """Reduce x by op (sum, prod, min, max, avg), like the eager collective. `lax.psum`, `pmin`,
    `pmax`.
    """
    x, size = _arrays(x), axis_size(axis_name)
    within = None if groups is None else partition(groups, size)
    check_op(op, [a.dtype for a in jax.tree.leaves(x)])
    return jax.tree.map(
        lambda a: reduced(op, a, lambda kind, b: REDUCTIONS[kind](b, axis_name, within)), x
    )


def reduce(x: Tree, axis_name: Any, root: Any = 0, op: str = "sum", groups: Groups = None) -> Tree:
    """Reduce x by op; `root` gets the result, the others get zeros."""
    groups = partition(groups, axis_size(axis_name))
    return _at_root(allreduce(x, axis_name, op, groups), axis_name, root, groups)


def reduce_scatter(
    x: Tree, axis_name: Any, op: str = "sum", groups: Groups = None, per_rank: bool = False
) -> Tree:
    """Reduce x[n * k, ...]; rank i of n gets chunk i. per_rank: x is a list of n arrays.
    `lax.psum_scatter`.
    """
    within, n = _even(groups, axis_name)
    is_list = isinstance(x, list | tuple) and len(x) == n and jax.tree_util.all_leaves(x)
    x = _arrays(x)
    if per_rank and not (is_list and len({(a.shape, a.dtype) for a in x}) == 1):
        raise UsageError(
            f"per_rank takes a list of {n} arrays of one type and shape, one for each rank of the group"
        )
    x = jnp.stack(x) if per_rank else x
    check_op(op, [a.dtype for a in jax.tree.leaves(x)])

    def chunk(a):
        return reduced(op, _rows(a, n), lambda kind, b: scattered(kind, b, axis_name, within))

    return chunk(x)[0] if per_rank else jax.tree.map(chunk, x)


def allgather(x: Tree, axis_name: Any, axis: int = 0, groups: Groups = None) -> Tree:
    """Concatenate x along dim `axis`; scalars become [n]. `lax.all_gather(tiled=True)`."""
    within, _ = _even(groups, axis_name)
    x = jax.tree.map(jnp.atleast_1d, _arrays(x))

    def join(a):
        return lax.all_gather(
            a, axis_name, axis_index_groups=within, axis=_axis(a, axis), tiled=True
        )

    return jax.tree.map(join, x)


def gather(x: Tree, axis_name: Any, root: Any = 0, axis: int = 0, groups: Groups = None) -> Tree:
    """Concatenate x along dim `axis` on `root`; the others get zeros."""
    groups = partition(groups, axis_size(axis_name))
    return _at_root(allgather(x, axis_name, axis, groups), axis_name, root, groups)


def broadcast(x: Tree, axis_name: Any, root: Any = 0, groups: Groups = None) -> Tree:
    """Send the root's x to all by a tree of `lax.ppermute`, since a masked `psum` would turn -0.0
    into 0.0.
    """
    size, x, reached = axis_size(axis_name), _arrays(x), 1
    parts = partition(groups, size)
    orders = [
        [root, *(r for r in group if r != root)]
        for root, group in zip(roots_of(root, parts, size), parts)
    ]
    while reached < max(map(len, orders)):
        pairs = [
            pair for order in orders for pair in zip(order[:reached], order[reached : 2 * reached])
        ]
        moved = lax.ppermute(x, axis_name, pairs)
        x, reached = _where(axis_name, {dst for _, dst in pairs}, moved, x), 2 * reached
    return x


def scatter(x: Tree, axis_name: Any, root: Any = 0, groups: Groups = None) -> Tree:
    """Send chunk i of the root's x[n * k, ...] to rank i of n. `lax.all_to_all`, of which one row
    is used.
    """
    within, n = _even(groups, axis_name)
    parts = partition(within, size := axis_size(axis_name))
    position = {group: group.index(root) for root, group in zip(roots_of(root, parts, size), parts)}
    row = of_member(parts, axis_name, lambda group, _: position[group])

    def rows(a):
        return lax.all_to_all(_rows(a, n), axis_name, 0, 0, axis_index_groups=within)

    return jax.tree.map(
        lambda a: lax.dynamic_index_in_dim(rows(a), row, keepdims=False), _arrays(x)
    )


def all_to_all(
    x: Tree, axis_name: Any, split_axis: int = 0, concat_axis: int = 0, groups: Groups = None
) -> Tree:
    """Send chunk j of x along dim split_axis to rank j; join the chunks along dim concat_axis.
    `lax.all_to_all`.
    """
    within, n = _even(groups, axis_name)

    def move(a: Array) -> Array:
        split, join = _axis(a, split_axis), _axis(a, concat_axis)
        _check_chunks(a, split, n)
        return lax.all_to_all(a, axis_name, split, join, axis_index_groups=within, tiled=True)

    return jax.tree.map(move, _arrays(x))


def send_recv(x: Tree, axis_name: Any, src: int, dst: int) -> Tree:
    """Send x from src to dst; the others get zeros. All devices make the call. `lax.ppermute`."""
    size = axis_size(axis_name)
    try:
        pair = as_rank(src, size), as_rank(dst, size)
    except UsageError as error:
        raise UsageError(f"src={src!r}, dst={dst!r}: {error}") from None
    return lax.ppermute(_arrays(x), axis_name, [pair])


def _arrays(x: Tree) -> Tree:
    try:
        return jax.tree.map(jnp.asarray, x)
    except TypeError as error:
        raise UsageError(f"give an array, or a tree of arrays: {one_line(error)}") from None


def _even(groups: Groups, axis_name: Any) -> tuple[Partition | None, int]:
    size = axis_size(axis_name)
    parts = partition(groups, size)
    if len({len(group) for group in parts}) > 1:
        raise UsageError(
            f"groups={[[*g] for g in parts]}: inside jit groups must be of one size and cover all {size} ranks"
        )
    return (None if parts == partition(None, size) else parts), len(parts[0])


def _axis(a: Array, axis: int) -> int:
    if not has_dim(axis, a.ndim):
        raise UsageError(f"{jax.typeof(a).str_short()} has no dim {axis!r}")
    return axis % a.ndim


def _check_chunks(a: Array, dim: int, n: int) -> None:
    if not a.ndim or a.shape[dim] % n:
        raise UsageError(
            f"dim {dim} of {jax.typeof(a).str_short()} cannot be split into {n} equal chunks, one a rank"
        )


def _rows(a: Array, n: int) -> Array:
    _check_chunks(a, 0, n)
    return a.reshape(n, a.shape[0] // n, *a.shape[1:])


def _where(axis_name: Any, ranks: Any, x: Tree, otherwise: Tree) -> Tree:
    """Select x on these ranks."""
    selected = jnp.asarray([rank in ranks for rank in range(axis_size(axis_name))])[
        lax.axis_index(axis_name)
    ]
    return jax.tree.map(lambda a, b: jnp.where(selected, a, b), x, otherwise)


def _at_root(x: Tree, axis_name: Any, root: Any, parts: Partition) -> Tree:
    roots = roots_of(root, parts, axis_size(axis_name))
    return _where(axis_name, roots, x, jax.tree.map(jnp.zeros_like, x))
