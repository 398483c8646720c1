"""ZeRO stage 1 as a wrapper: each device stores and updates the optimizer state of its slice of
every leaf.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
1910.02054. The reduce-scatter of gradients and all-gather of updates move as many bytes as the
all-reduce they replace."""

from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax import lax

from jaxdp.errors import UsageError
from jaxdp.optim.elementwise import check_elementwise
from jaxdp.split import WHOLE, split_dims, take

Tree = Any


def zero1(
    tx: optax.GradientTransformation,
    axis_name: Any,
    *,
    mean: bool = True,
    blocks: Sequence[str] = (),
) -> optax.GradientTransformationExtraArgs:
    """Shard the state of `tx` over a mapped axis; replaces `lax.pmean(grads, axis_name)` followed
    by `tx`.

    Call init and update where the axis is mapped: by `pmap`, or by `shard_map` with check_vma=False
    (check_vma=True would sum the gradients of replicated parameters before they get here):

        init(params) -> the state of this device's slices          params: replicated
        update(grads, state, params) -> (replicated updates, state)   grads: this device's, not reduced

    `jaxdp.split` selects the dim to split; a leaf with no dim that the axis size divides is reduced
    and updated in full. mean: average gradients over the axis, else sum them. blocks: paths (a/b)
    below which leaves are stacked [block, ...]. Passes extra arguments to `tx` unchanged. Raises
    UsageError outside of the axis, and if `tx` is not elementwise (see `check_elementwise`); clip
    by norm before it."""
    inner = optax.with_extra_args_support(tx)

    def layout_of(tree: Tree) -> tuple[Tree, Any, int]:
        """Return (the split dim of each leaf, this device's index, the number of parts)."""
        try:
            parts = lax.axis_size(axis_name)
        except NameError:
            raise UsageError(
                f"zero1: no axis {axis_name!r} is mapped here; call init and update inside the function that pmap or "
                "shard_map maps over it"
            ) from None
        return split_dims(tree, parts, blocks), lax.axis_index(axis_name), parts

    def init(params):
        dims, index, parts = layout_of(params)
        check_elementwise(tx, params, parts, blocks)
        return inner.init(jax.tree.map(lambda x, dim: take(x, dim, index, parts), params, dims))

    def update(grads, state, params=None, **extra):
        dims, index, parts = layout_of(grads)
        # Gloo's reduce-scatter fails after 30 s and has returned wrong results (jax#40831,
        # jax#40830).
        gloo = jax.process_count() > 1 and jax.default_backend() == "cpu"

        def reduce(g: jax.Array, dim: int) -> jax.Array:
            if dim == WHOLE or gloo:
                g = take(lax.psum(g, axis_name), dim, index, parts)
            else:
                g = lax.psum_scatter(g, axis_name, scatter_dimension=dim, tiled=True)
            return g / parts if mean else g

        def gather(u: jax.Array, dim: int) -> jax.Array:
            return u if dim == WHOLE else lax.all_gather(u, axis_name, axis=dim, tiled=True)

        if params is not None:
            params = jax.tree.map(lambda x, dim: take(x, dim, index, parts), params, dims)
        updates, state = inner.update(jax.tree.map(reduce, grads, dims), state, params, **extra)
        return jax.tree.map(gather, updates, dims), state

    return optax.GradientTransformationExtraArgs(init, update)
