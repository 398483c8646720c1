"""Placement of devices in meshes, of microbatches on devices, and of the initial state."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.tree_util import Partial

from jaxdp.axes import DATA, FLAT, REPLICA, SHARD, Axes
from jaxdp.errors import TooManyDevices, UsageError
from jaxdp.precision import is_key
from jaxdp.process.context import SLOW, Context
from jaxdp.split import WHOLE, spec
from jaxdp.train.state import TrainState


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
    neighbours.
    """
    first = [hosts.index(host) for host in hosts]

    def key(d):
        return (first[d.process_index] if first else 0, d.process_index, d.id)

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
    if jnp.issubdtype(x.dtype, jnp.floating):  # as bits, since -0.0 + 0.0 is 0.0
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(of_device(bits, axes, index), x.dtype)
    # Not all backends sum integers of less than 32 bits.
    wide = x.astype(jnp.promote_types(x.dtype, jnp.int32)) if x.dtype.itemsize < 4 else x
    sent = jnp.where(jax.lax.axis_index(axes) == index, wide, jnp.zeros_like(wide))
    return jax.lax.psum(sent, axes).astype(x.dtype)
