"""The ZeRO stages: a table of the trees that are sharded over the devices.

Rajbhandari et al., arXiv 1910.02054. Each leaf is sharded along one dim, by the rule of
`jaxdp.split`, or by the user's rules for its path.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxdp.errors import UsageError
from jaxdp.split import WHOLE, is_below, leaves_by_path, path_string, split_dims
from jaxdp.train.state import TrainState

Tree = Any


class Layout(NamedTuple):
    """The sharded trees. grads: while they accumulate; the optimizer gets sharded gradients if
    opt_state is sharded.
    """

    params: bool = False
    grads: bool = False
    opt_state: bool = False


ZERO = (
    Layout(),
    Layout(opt_state=True),
    Layout(opt_state=True, grads=True),
    Layout(opt_state=True, grads=True, params=True),
)


class Sharding(NamedTuple):
    """How a strategy shards the state.

    zero: the stage. shard_size: the number of devices that share one copy of the sharded state;
    None means all. gradient_buffer: 'sharded' reduces gradients in stages 2 and 3 after each
    microbatch, 'replicated' once after all. blocks: paths of the parameters that are stacked
    [block, ...]. pad: also shard leaves that no dim divides, with padding; the optimizer must be
    elementwise (`jaxdp.parallel.placement`). rules: (expression, (None or 'shard' for each dim)) of
    parameters that are sharded in another way."""

    zero: int = 0
    shard_size: int | None = None
    gradient_buffer: str = "sharded"
    blocks: tuple[str, ...] = ()
    pad: bool = False
    rules: tuple[tuple[str, Sequence[str | None]], ...] = ()


UNSHARDED = Sharding()


def rule_dims(
    params: Tree, rules: Sequence[tuple[str, Sequence[str | None]]], blocks: Sequence[str] = ()
) -> Any:
    """Return {path: dim} of the parameters that rules match, WHOLE to replicate one.

    Raises UsageError for a rule without a match or that does not fit a leaf, and for a leaf that
    two rules match."""

    def refused(text: str) -> UsageError:
        return UsageError(f"parallel.rules: {text}", rank=0)

    leaves = leaves_by_path(params)
    chosen: dict[str, int] = {}
    by: dict[str, str] = {}  # the expression that matched
    for pattern, entries in rules:
        matches = [path for path in leaves if re.search(pattern, path)]
        if not matches:
            example = next(iter(leaves))
            raise refused(f"{pattern!r} matches no parameter; a path is such as {example!r}")
        for path in matches:
            shape = list(leaves[path].shape)
            if path in by:
                both = f"{by[path]!r} and {pattern!r} both match {path}"
                raise refused(f"{both}; narrow one of the expressions")
            if len(entries) != len(shape):
                raise refused(
                    f"{pattern!r} has {len(entries)} entries, but {path} has shape {shape}; "
                    "give one entry for each dim, or narrow the expression"
                )
            dim = list(entries).index("shard") if "shard" in entries else WHOLE
            if dim == 0 and is_below(path, blocks):
                raise refused(
                    f"{pattern!r} shards dim 0 of {path}, which counts the blocks; "
                    "shard another dim"
                )
            by[path], chosen[path] = pattern, dim
    return chosen


def param_dims(params: Tree, sharding: Sharding, parts: int) -> Any:
    """Return the dim along which each parameter is split into `parts`, or WHOLE. Raises UsageError
    for wrong rules.

    A dim that a rule selects, but that needs padding, stays replicated without `pad`.
    """
    ruled = rule_dims(params, sharding.rules, sharding.blocks)

    def dim_of(path: Any, x: Any, dim: int) -> int:
        selected = ruled.get(path_string(path), dim)
        fits = selected == WHOLE or sharding.pad or x.shape[selected] % parts == 0
        return selected if fits and parts > 1 else WHOLE

    return jax.tree_util.tree_map_with_path(
        dim_of, params, split_dims(params, parts, sharding.blocks, sharding.pad)
    )


def opt_state_dims(state: TrainState, dims: Any, others: Any) -> Any:
    """Return the dims of the optimizer state.

    dims: of the parameters, and of leaves that mirror one. others: of all other leaves.
    """
    params = zip(leaves_by_path(state.params).items(), jax.tree.leaves(dims), strict=True)
    mirrored = {(path, x.shape): dim for (path, x), dim in params}

    def dim_of(path: Any, x: Any, other: int) -> int:
        names = path_string(path).split("/")
        # The last is "", the path of a parameter that is the only leaf.
        ends = [("/".join(names[i:]), x.shape) for i in range(len(names) + 1)]
        return next((mirrored[end] for end in ends if end in mirrored), other)

    return jax.tree_util.tree_map_with_path(dim_of, state.opt_state, others)


class Share(NamedTuple):
    """The sharded share of parameters and optimizer state. replicated: the number of leaves without
    a dim to shard.
    """

    split_bytes: int
    total_bytes: int
    replicated: int
    replicated_bytes: int

    @property
    def split(self) -> float:
        """Return the share of the bytes that is split, from 0 to 1."""
        return self.split_bytes / max(self.total_bytes, 1)


def state_dims(state: TrainState, layout: Layout, dims: Any, others: Any) -> Any:
    """Return a TrainState of the dim along which each leaf is sharded, or WHOLE. What is kept for
    examples is split by the strategies.

    dims: of the parameters, where they are sharded. others: of leaves of the optimizer state that
    mirror none of them.
    """
    replicated: TrainState = jax.tree.map(lambda _: WHOLE, state)
    if layout.params:
        replicated = replicated.replace(params=dims)
    if layout.opt_state:
        mirrors = {name: dims for name, tree in state.extra.items() if mirrors_params(state, tree)}
        extra = {**replicated.extra, **mirrors}
        opt_state = opt_state_dims(state, dims, others)
        replicated = replicated.replace(opt_state=opt_state, extra=extra)
    return replicated


def mirrors_params(state: TrainState, tree: Tree) -> bool:
    """Return whether a tree has the structure and the shapes of the parameters."""

    def form(tree: Tree) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [x.shape for x in leaves]

    return form(tree) == form(state.params)


def share(state: TrainState, dims: Any, layout: Layout) -> Share:
    """Return the share of parameters, optimizer state and their averages that is sharded; scalars
    do not count as leaves."""
    averages = [name for name, tree in state.extra.items() if mirrors_params(state, tree)]

    def trees(of: Any) -> tuple[Tree, Tree]:
        return of.params, (of.opt_state, [of.extra[name] for name in averages])

    are_sharded = (layout.params, layout.opt_state)
    leaves = [
        (math.prod(x.shape) * x.dtype.itemsize, dim, is_sharded)
        for tree, tree_dims, is_sharded in zip(trees(state), trees(dims), are_sharded)
        for x, dim in zip(jax.tree.leaves(tree), jax.tree.leaves(tree_dims), strict=True)
        if x.shape
    ]
    split_bytes = sum(size for size, dim, _ in leaves if dim != WHOLE)
    replicated = [size for size, dim, is_sharded in leaves if dim == WHOLE and is_sharded]
    return Share(split_bytes, sum(size for size, _, _ in leaves), len(replicated), sum(replicated))
