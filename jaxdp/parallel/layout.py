"""The ZeRO stages: a table of the trees that are sharded over the devices.

Rajbhandari et al., arXiv 1910.02054. Each leaf is sharded along one dim, by the rule of `jaxdp.split`.
"""

import math
from typing import Any, NamedTuple

import jax

from jaxdp.core.state import TrainState
from jaxdp.split import WHOLE, path_string, split_dims

Tree = Any


class Layout(NamedTuple):
    """The sharded trees. grads: while they accumulate; the optimizer gets sharded gradients if opt_state is sharded."""

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

    zero: the stage. shard_size: the number of devices that share one copy of the sharded state; None means all.
    gradient_buffer: 'sharded' reduces gradients in stages 2 and 3 after each microbatch, 'replicated' once after all.
    blocks: paths of the parameters that are stacked [block, ...]. split_as: shard leaves as for this number of parts, a
    multiple of the real one; to plan for more devices.
    """

    zero: int = 0
    shard_size: int | None = None
    gradient_buffer: str = "sharded"
    blocks: tuple[str, ...] = ()
    split_as: int | None = None


UNSHARDED = Sharding()


def of_params(state: TrainState, dims: Any) -> Any:
    """Shard only optimizer leaves that mirror a parameter; replicate scalars and other leaves."""
    shapes = {f"/{path_string(p)}": x.shape for p, x in jax.tree_util.tree_leaves_with_path(state.params)}

    def dim_of(path: Any, x: Any, dim: int) -> int:
        name = f"/{path_string(path)}"
        return dim if any(name.endswith(p) and x.shape == shape for p, shape in shapes.items()) else WHOLE

    return jax.tree_util.tree_map_with_path(dim_of, state.opt_state, dims)


class Share(NamedTuple):
    """The sharded share of parameters and optimizer state. replicated: the number of leaves without a dim to shard."""

    split_bytes: int
    total_bytes: int
    replicated: int
    replicated_bytes: int


def state_dims(state: TrainState, layout: Layout, parts: int, blocks: tuple[str, ...]) -> Any:
    """Return a TrainState of the dim along which each leaf is sharded, or WHOLE. Strategies shard the carry."""
    split = lambda tree, sharded: split_dims(tree, parts if sharded else 1, blocks)
    replicated: TrainState = jax.tree.map(lambda _: WHOLE, state)
    return replicated.replace(
        params=split(state.params, layout.params),
        opt_state=split(state.opt_state, layout.opt_state),
        ema=split(state.ema, layout.opt_state),
    )


def share(state: TrainState, dims: Any, layout: Layout) -> Share:
    """Return the share of params, opt_state and ema that is sharded; scalars do not count as leaves."""
    trees = [
        (state.params, dims.params, layout.params),
        ((state.opt_state, state.ema), (dims.opt_state, dims.ema), layout.opt_state),
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


def unsharded_shape(x: Any, dim: int, parts: int) -> tuple[int, ...]:
    """Return the full shape of a slice along `dim`."""
    return tuple(size * parts if d == dim else size for d, size in enumerate(x.shape))
