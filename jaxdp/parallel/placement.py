"""Where things are placed: devices, meshes, microbatches, the initial state."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxdp.axes import DATA, FLAT, REPLICA, SHARD, Axes
from jaxdp.core.state import Batch, TrainState
from jaxdp.errors import UsageError
from jaxdp.parallel.rounding import BITS
from jaxdp.parallel.sums import order_of
from jaxdp.split import WHOLE, spec


def abstract_state(shapes: TrainState, mesh: Mesh, dims: TrainState, axis: str) -> TrainState:
    """The state's shapes and dtypes, placed: each leaf split along its dim over a mesh axis, or whole."""
    place = lambda x, d: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec(d, axis)))
    return jax.tree.map(place, shapes, dims)


def make_state(
    make: Callable[[], TrainState], abstract: TrainState, mesh: Mesh, dims: TrainState, axes: Axes
) -> TrainState:
    """The state, born in its place, and the same on every device that has the same part."""
    state = jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))()
    return from_first(state, mesh, dims, axes) if jax.process_count() > 1 else state


def like(tree: Any, other: Any) -> Any:
    """The leaves in the dtypes of another tree's."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, other)


def same(tree: Any) -> Any:
    """To be jitted with another placement."""
    return tree


def slot_table(microbatches: int, devices: int, group: int = 1) -> np.ndarray:
    """table[device, slot]: consecutive microbatches, shares that differ by at most one, -1 where a slot has none.

    group: so many microbatches, of those that it divides, stay together.
    Raises UsageError where there are more devices than microbatches, or groups of them.
    """
    number = microbatches // group
    if devices > number:
        grouped = f" in groups of {group}" if group > 1 else ""
        raise UsageError(
            f"microbatches: {microbatches}{grouped} cannot be dealt to {devices} devices; set microbatches to "
            f"{devices * group} or more (this changes the numbers), or use at most {number} of the devices",
            rank=0,
        )
    table = np.full((devices, -(-number // devices), group), -1, np.int32)
    for row, share in zip(table, np.array_split(np.arange(number * group).reshape(number, group), devices)):
        row[: len(share)] = share
    return table.reshape(devices, -1)


def of_this_process(devices: Sequence[jax.Device]) -> list[int]:
    """The indices of this process's devices."""
    return [i for i, d in enumerate(devices) if d.process_index == jax.process_index()]


def sent_by_call(devices: Sequence[jax.Device]) -> bool:
    """Whether a program takes NumPy's arrays as fast as those on its device: where that is the host, and the only one.

    Placing them costs 20 us an array there; elsewhere it is done ahead of the call, and overlaps with the one before.
    """
    return len(devices) == 1 and jax.process_count() == 1 and devices[0].platform == "cpu"


def ordered_devices(devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    """All devices (or those given), each process's together."""
    return sorted(devices or jax.devices(), key=lambda d: (d.process_index, d.id))


def data_mesh(devices: Sequence[jax.Device], group: int | None = None) -> Mesh:
    """One axis over all; or, in groups of `group` neighbours, the axes of `Axes(SHARD, REPLICA)`."""
    if group is None:
        return Mesh(np.array(devices), (DATA,), axis_types=(AxisType.Auto,))
    return Mesh(np.array(devices).reshape(-1, group), (REPLICA, SHARD), axis_types=(AxisType.Auto,) * 2)


def one_by_one(update: Callable[..., Any]) -> Callable[..., Any]:
    """(state, batches[step, ...]) -> (state, metrics[step]) of an update."""

    def updates(state: TrainState, batches: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        return jax.lax.scan(update, state, batches)

    return updates


def deal(table: np.ndarray, carry: Any, sharding: NamedSharding) -> Any:
    """carry[microbatch, ...] -> [device x slot, ...]; a slot without a microbatch repeats the first."""
    index = np.maximum(table.reshape(-1), 0)
    return jax.jit(lambda c: jax.tree.map(lambda x: x[index], c), out_shardings=sharding)(carry)


def collect(table: np.ndarray, carry: Any, sharding: NamedSharding) -> Any:
    """The inverse of `deal`."""
    index = order_of(table)
    return jax.jit(lambda c: jax.tree.map(lambda x: x[index], c), out_shardings=sharding)(carry)


def from_first(tree: Any, mesh: Mesh, dims: Any = None, axes: Axes = FLAT) -> Any:
    """Arrays, the same on every device that has the same part: the first one's. The initial-weight sync.

    Every process computes the initial state from the same seed, but processors of different kinds may round
    differently. dims: the dim that each leaf is split along; None where all are whole.
    """
    dims = jax.tree.map(lambda _: WHOLE, tree) if dims is None else dims
    specs = jax.tree.map(lambda d: spec(d, axes.shard), dims)

    def sync(x: jax.Array, d: int) -> jax.Array:
        over = axes.all if d == WHOLE else axes.replica
        if over is None:
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(sync(jax.random.key_data(x), d), impl=jax.random.key_impl(x))
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize in BITS:  # as they are: -0.0 + 0.0 is 0.0
            return jax.lax.bitcast_convert_type(
                sync(jax.lax.bitcast_convert_type(x, BITS[x.dtype.itemsize]), d), x.dtype
            )
        wide = x.astype(jnp.promote_types(x.dtype, jnp.int32)) if x.dtype.itemsize < 4 else x  # as all backends add up
        sent = jax.lax.psum(jnp.where(jax.lax.axis_index(over) == 0, wide, jnp.zeros_like(wide)), over)
        return sent.astype(x.dtype)

    f = lambda tree: jax.tree.map(sync, tree, dims)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False))(tree)
