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
from jaxdp.split import WHOLE, path_string, split_dims
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
    elementwise (`jaxdp.parallel.padding`). rules: (expression, (None or 'shard' for each dim)) of
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
    shapes = {path_string(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
    chosen: dict[str, tuple[str, int]] = {}
    for pattern, entries in rules:
        problem, matches = (
            f"parallel.rules: {pattern!r}",
            [path for path in shapes if re.search(pattern, path)],
        )
        if not matches:
            raise UsageError(
                f"{problem} matches no parameter; a path is such as {next(iter(shapes))!r}", rank=0
            )
        for path in matches:
            if path in chosen:
                both = f"parallel.rules: {chosen[path][0]!r} and {pattern!r} both match {path}"
                raise UsageError(f"{both}; narrow one of the expressions", rank=0)
            if len(entries) != len(shapes[path]):
                found = f"has {len(entries)} entries, but {path} has shape {list(shapes[path])}"
                raise UsageError(
                    f"{problem} {found}; give one entry for each dim, or narrow the expression",
                    rank=0,
                )
            if "shard" in entries[:1] and f"{path}/".startswith(
                tuple(f"{block}/" for block in blocks)
            ):
                found = f"shards dim 0 of {path}, which counts the blocks"
                raise UsageError(f"{problem} {found}; shard another dim", rank=0)
            chosen[path] = pattern, list(entries).index("shard") if "shard" in entries else WHOLE
    return {path: dim for path, (_, dim) in chosen.items()}


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
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    mirrored = {
        path_string(p): (x.shape, dim)
        for (p, x), dim in zip(leaves, jax.tree.leaves(dims), strict=True)
    }

    def dim_of(path: Any, x: Any, other: int) -> int:
        names = path_string(path).split("/")
        ends = (
            "/".join(names[i:]) for i in range(len(names) + 1)
        )  # "": of a parameter that is the only leaf
        return next(
            (mirrored[end][1] for end in ends if end in mirrored and mirrored[end][0] == x.shape),
            other,
        )

    return jax.tree_util.tree_map_with_path(dim_of, state.opt_state, others)


class Share(NamedTuple):
    """The sharded share of parameters and optimizer state. replicated: the number of leaves without
    a dim to shard.
    """

    split_bytes: int
    total_bytes: int
    replicated: int
    replicated_bytes: int


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
    structure: Any = jax.tree.structure(tree)
    if structure != jax.tree.structure(state.params):
        return False
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(state.params), strict=True)
    return all(x.shape == y.shape for x, y in pairs)


def share(state: TrainState, dims: Any, layout: Layout) -> Share:
    """Return the share of parameters, optimizer state and their averages that is sharded; scalars
    do not count as leaves."""
    averages = [name for name, tree in state.extra.items() if mirrors_params(state, tree)]
    trees = [
        (state.params, dims.params, layout.params),
        (state.opt_state, dims.opt_state, layout.opt_state),
        *((state.extra[name], dims.extra[name], layout.opt_state) for name in averages),
    ]
    leaves = [
        (math.prod(x.shape) * x.dtype.itemsize, dim, sharded)
        for tree, tree_dims, sharded in trees
        for x, dim in zip(jax.tree.leaves(tree), jax.tree.leaves(tree_dims), strict=True)
        if x.shape
    ]
    split_bytes = sum(size for size, dim, _ in leaves if dim != WHOLE)
    replicated = [size for size, dim, sharded in leaves if dim == WHOLE and sharded]
    return Share(split_bytes, sum(size for size, _, _ in leaves), len(replicated), sum(replicated))
