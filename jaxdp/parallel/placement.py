"""Placement of devices in meshes, of microbatches on devices, of the initial state, and of leaves
that are stored with padding, because no dim divides evenly over the devices, and exported without.

Gradients are padded before they are scattered; parameters are cut after they are gathered. The
padding of gradients, parameters and optimizer state is zero and stays zero or unread: an
elementwise optimizer never mixes it with anything."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.tree_util import Partial

from jaxdp.errors import TooManyDevices, UsageError
from jaxdp.optim import check_elementwise
from jaxdp.parallel.layout import Sharding, opt_state_dims, param_dims
from jaxdp.precision import is_float, is_key
from jaxdp.process.context import SLOW, Context
from jaxdp.process.enter import cached
from jaxdp.split import DATA, FLAT, REPLICA, SHARD, WHOLE, Axes, fit, padded_shape, spec
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


@functools.lru_cache(maxsize=1)
def state_shapes(make: Partial) -> TrainState:
    """Return the shapes of the initial state. They are kept when the devices are closed, which
    ends all traces.
    """
    return jax.eval_shape(make)


def seed_of(make: Partial) -> jax.Array:
    """Return the seed of the initial state."""
    return make().seed


def open_collectives(context: Context) -> None:
    """Connect the devices of all processes by a first all-reduce, before any of them compiles.

    Over Gloo the first collective waits 30 s at most for the other processes.
    """
    if context.size == 1:
        return
    context.barrier("collectives", SLOW)
    total = jax.pmap(lambda x: jax.lax.psum(x, "all"), axis_name="all")
    context.compute(lambda: total(np.zeros(jax.local_device_count(), np.float32)))


def assign_microbatches(microbatches: int, devices: int, group: int = 1) -> np.ndarray:
    """Assign microbatches: assignment[device, local], consecutive, in shares that differ by at most
    one; -1: none.

    group: the number of microbatches, a divisor of `microbatches`, that stay together on a device.
    Raises UsageError if there are more devices than microbatches, or than groups of them.
    """
    number = microbatches // group
    if devices > number:
        grouped = f" in groups of {group}" if group > 1 else ""
        raise TooManyDevices(
            f"microbatches: {microbatches}{grouped} cannot be split over {devices} devices; set microbatches to "
            f"{devices * group} or more (this changes the numbers), or use at most {number} of the devices",
            rank=0,
        )
    assignment = np.full((devices, -(-number // devices), group), -1, np.int32)
    for row, share in zip(
        assignment, np.array_split(np.arange(number * group).reshape(number, group), devices)
    ):
        row[: len(share)] = share
    return assignment.reshape(devices, -1)


def of_this_process(devices: Sequence[jax.Device]) -> list[int]:
    """Return the indices of this process's devices."""
    return [i for i, d in enumerate(devices) if d.process_index == jax.process_index()]


def ordered_devices(
    devices: Sequence[jax.Device] | None, hosts: Sequence[str] = ()
) -> list[jax.Device]:
    """Return all devices (or `devices`), ordered by process. hosts[process]: those of a host become
    neighbours; the hosts of some processes may be unknown, if a script has connected them.
    """
    first = dict(enumerate(map(hosts.index, hosts)))

    def key(d):
        return first.get(d.process_index, 0), d.process_index, d.id

    return sorted(devices or jax.devices(), key=key)


def data_mesh(devices: Sequence[jax.Device], group: int | None = None) -> Mesh:
    """Return a mesh of one axis over all; or, in groups of `group` neighbours, of the axes
    `Axes(SHARD, REPLICA)`.
    """
    names = (DATA,) if group is None else (REPLICA, SHARD)
    grid = np.array(devices).reshape((-1,) if group is None else (-1, group))
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def group_size(shard_size: int | None, devices: int) -> int:
    """Return the number of devices in a sharding group. Raises UsageError if it does not divide all
    devices.
    """
    if shard_size is None:
        return devices
    if not 1 < shard_size <= devices or devices % shard_size:
        divisors = [k for k in range(2, devices + 1) if devices % k == 0]
        raise UsageError(
            f"parallel.shard_size: {shard_size} does not split {devices} devices into equal groups; "
            f"{f'use one of {divisors}' if divisors else 'leave it null'}",
            rank=0,
        )
    return shard_size


def from_first(tree: Any, mesh: Mesh, dims: Any = None, axes: Axes = FLAT) -> Any:
    """Broadcast each part from the first device that stores it: the initial-weight sync.

    Every process computes the initial state from the same seed, but different processors may round
    differently. dims: the dim along which each leaf is split; None: all are replicated.
    """
    dims = jax.tree.map(lambda _: WHOLE, tree) if dims is None else dims
    specs = jax.tree.map(lambda d: spec(d, axes.shard), dims)

    def sync(x: jax.Array, d: int) -> jax.Array:
        over = axes.all if d == WHOLE else axes.replica
        return x if over is None else of_device(x, over, 0)

    def f(tree):
        return jax.tree.map(sync, tree, dims)

    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    )(tree)


def of_device(x: jax.Array, axes: Any, index: Any) -> jax.Array:
    """Return one device's x on all devices along the axes, bit for bit; call it inside a program
    that maps these.
    """
    if is_key(x):
        data = of_device(jax.random.key_data(x), axes, index)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if is_float(x):  # as bits, since -0.0 + 0.0 is 0.0
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(of_device(bits, axes, index), x.dtype)
    # Not all backends sum integers of less than 32 bits.
    wide = x.astype(jnp.promote_types(x.dtype, jnp.int32)) if x.dtype.itemsize < 4 else x
    sent = jnp.where(jax.lax.axis_index(axes) == index, wide, jnp.zeros_like(wide))
    return jax.lax.psum(sent, axes).astype(x.dtype)
