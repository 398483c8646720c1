"""Placement of devices in meshes, of microbatches on devices, and of the initial state."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.tree_util import Partial

from jaxdp.axes import DATA, FLAT, REPLICA, SHARD, Axes
from jaxdp.errors import TooManyDevices
from jaxdp.parallel.padding import fit_trees, sharding_of
from jaxdp.parallel.sum_plan import order_of
from jaxdp.precision import is_key
from jaxdp.process.context import SLOW, Context
from jaxdp.split import WHOLE, spec
from jaxdp.train.state import Batch, TrainState

BITS: dict[int, Any] = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def abstract_state(shapes: TrainState, mesh: Mesh, dims: TrainState, axis: str) -> TrainState:
    """Return the shapes and dtypes of a state with shardings: each leaf is split along its dim, or
    replicated.
    """

    def shard(x, d):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x.shape, mesh, d, axis))

    return jax.tree.map(shard, shapes, dims)


@functools.lru_cache(maxsize=1)
def state_shapes(make: Partial) -> TrainState:
    """Return the shapes of the initial state. An elastic job, whose traces end with each
    generation, keeps them.
    """
    return jax.eval_shape(make)


def make_state(
    make: Partial, abstract: TrainState, mesh: Mesh, dims: TrainState, axes: Axes, arithmetic: Any
) -> TrainState:
    """Compute the initial state directly in its shardings, equal on all devices that store the same
    part.

    Args:
        make: a `Partial`; its arguments are those of the program, so that another seed uses the
            same program.
        abstract: the shapes to pad leaves to, with shardings.
        arithmetic: `jaxdp.parallel.sums.FloatSums`.
    """

    def full(make: Partial) -> TrainState:
        def exported() -> TrainState:
            return make().replace(seed=None)

        return fit_trees(arithmetic.make_state(exported, mesh), abstract)

    state = jax.jit(full, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))(make)
    return from_first(state, mesh, dims, axes) if jax.process_count() > 1 else state


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
    jax.block_until_ready(total(np.zeros(jax.local_device_count(), np.float32)))


def like(tree: Any, other: Any) -> Any:
    """Cast the leaves to the dtypes of another tree."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, other)


def same(tree: Any) -> Any:
    """Return the tree; jitted with other shardings, it is a transfer."""
    return tree


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


def sent_by_call(devices: Sequence[jax.Device]) -> bool:
    """Return True if programs should get NumPy arrays: there is one device, the CPU.

    `device_put` costs 20 us per array there. Elsewhere it runs before the call and overlaps with
    the previous one."""
    return len(devices) == 1 and jax.process_count() == 1 and devices[0].platform == "cpu"


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
    if group is None:
        return Mesh(np.array(devices), (DATA,), axis_types=(AxisType.Auto,))
    return Mesh(
        np.array(devices).reshape(-1, group), (REPLICA, SHARD), axis_types=(AxisType.Auto,) * 2
    )


def one_by_one(update: Callable[..., Any]) -> Callable[..., Any]:
    """Scan an update: return a function (state, batches[step, ...]) -> (state, metrics[step])."""

    def updates(state: TrainState, batches: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        return jax.lax.scan(update, state, batches)

    return updates


def scatter_kept(assignment: np.ndarray, kept: Any, sharding: NamedSharding) -> Any:
    """Convert leaves [microbatch, ...] to [device x local, ...]; a place without a microbatch
    repeats the first."""
    return reordered(kept, np.maximum(assignment.reshape(-1), 0), sharding)


def gather_kept(assignment: np.ndarray, kept: Any, sharding: NamedSharding) -> Any:
    """Invert `scatter_kept`."""
    return reordered(kept, order_of(assignment), sharding)


def reordered(tree: Any, index: np.ndarray, sharding: NamedSharding) -> Any:
    """Return leaves [row, ...] with their rows in another order; a tree without leaves as it is."""

    def reorder(tree: Any) -> Any:
        return jax.tree.map(lambda x: x[index], tree)

    return jax.jit(reorder, out_shardings=sharding)(tree) if jax.tree.leaves(tree) else tree


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
    if (
        jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize in BITS
    ):  # as bits: -0.0 + 0.0 is 0.0
        bits = jax.lax.bitcast_convert_type(x, BITS[x.dtype.itemsize])
        return jax.lax.bitcast_convert_type(of_device(bits, axes, index), x.dtype)
    wide = (
        x.astype(jnp.promote_types(x.dtype, jnp.int32)) if x.dtype.itemsize < 4 else x
    )  # summed by all backends
    sent = jnp.where(jax.lax.axis_index(axes) == index, wide, jnp.zeros_like(wide))
    return jax.lax.psum(sent, axes).astype(x.dtype)
