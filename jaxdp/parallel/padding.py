"""Leaves that are stored with padding, because no dim divides evenly over the devices, and exported
without.

Gradients are padded before they are scattered; parameters are cut after they are gathered. The
padding of gradients, parameters and optimizer state is zero and stays zero or unread: an
elementwise optimizer never mixes it with anything."""

import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxdp.errors import UsageError
from jaxdp.optim import check_elementwise
from jaxdp.parallel.layout import Sharding, opt_state_dims, param_dims
from jaxdp.process.caches import cached
from jaxdp.split import WHOLE, fit, padded_shape, spec
from jaxdp.train.state import TrainState

Tree = Any


def padded_shapes(shapes: Tree, dims: Tree, parts: int) -> Tree:
    """Return the shapes that the leaves are stored with, as ShapeDtypeStructs."""
    return jax.tree.map(
        lambda x, d: jax.ShapeDtypeStruct(padded_shape(x.shape, d, parts), x.dtype), shapes, dims
    )


def sharding_of(shape: tuple[int, ...], mesh: Mesh, dim: int, axis: str) -> NamedSharding:
    """Return the sharding of a global array along a dim.

    An array whose padding was removed is split over a divisor of the axis, so that it is full on
    few devices at most."""
    count = mesh.shape[axis]
    if dim == WHOLE or shape[dim] % count == 0:
        return NamedSharding(mesh, spec(dim, axis))
    parts, dim = max((math.gcd(size, count), d) for d, size in enumerate(shape))
    where = mesh.axis_names.index(axis)
    sizes, names = [*mesh.devices.shape], [*mesh.axis_names]
    sizes[where : where + 1], names[where : where + 1] = (
        [parts, count // parts],
        [axis, f"rest of {axis}"],
    )
    divided = Mesh(mesh.devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(divided, spec(dim if parts > 1 else WHOLE, axis))


def fit_trees(tree: Tree, like: Tree) -> Tree:
    """Pad or cut each leaf to the shape of its counterpart."""
    return jax.tree.map(lambda x, y: fit(x, y.shape), tree, like)


def resize(tree: Tree, like: Tree) -> Tree:
    """Return global arrays, those of another shape than in `like` padded or cut, in the shardings
    of `like`.
    """
    leaves, treedef = jax.tree.flatten(tree)
    # One at a time: the program of all would have all full leaves in memory at once.
    for i, target in enumerate(jax.tree.leaves(like)):
        if leaves[i].shape != target.shape:
            leaves[i] = converter(fit, target.sharding, target.shape)(leaves[i])
    return jax.tree.unflatten(treedef, leaves)


@cached
def converter(f: Callable, sharding: NamedSharding, *more: Any) -> Callable[[jax.Array], jax.Array]:
    """Return the program of x -> f(x, *more) on global arrays, with a result in this sharding."""
    return jax.jit(lambda x: f(x, *more), out_shardings=sharding)


def can_pad(
    tx: optax.GradientTransformation,
    trainable: Callable[[Tree], Tree],
    state: TrainState,
    sharding: Sharding,
    parts: int,
) -> bool:
    """Return whether the optimizer may get the padded leaves of a sharding, or none needs padding.

    It must be elementwise, its state must mirror the parameters, and no operation may depend on
    their shapes. state: shapes. parts: the number of devices that share a copy of it.
    """
    params, shapes = state.params, lambda tree: [x.shape for x in jax.tree.leaves(tree)]
    dims = param_dims(params, sharding, parts)
    if dims == param_dims(params, sharding._replace(pad=False), parts):
        return True
    try:
        check_elementwise(tx, trainable(params), 2, sharding.blocks, pad=True)
    except UsageError:
        return False
    made = jax.eval_shape(tx.init, trainable(padded_shapes(params, dims, parts)))
    others = jax.tree.map(lambda _: WHOLE, state.opt_state)
    return shapes(made) == shapes(
        padded_shapes(state.opt_state, opt_state_dims(state, dims, others), parts)
    )
