"""A data-parallel strategy is a placement of the state plus the one reduction between `grads` and `apply`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.axes import DATA
from jaxdp.errors import UsageError
from jaxdp.parallel.reduction import Reduction
from jaxdp.precision import cast_floats
from jaxdp.step import Batch, Step, Sums, TrainState


class Program(NamedTuple):
    """The compiled parts of a step, by name; each has `.lower(state, batch)`.

    update(state, batch) -> (state, metrics), donating the state; evaluate(state, batch) -> Sums over all devices.
    """

    update: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[TrainState, Batch], Sums]

    @property
    def parts(self) -> dict[str, Any]:
        return self._asdict()


class Strategy(Protocol):
    """What the loop and the checkpoint know of a backend.

    local_slots: the microbatch (or -1, none) of each slot of this process's devices, in the order `put` takes them.
    """

    devices: list[jax.Device]
    local_slots: np.ndarray

    def abstract(self, make: Callable[[], TrainState]) -> TrainState:
        """Shapes, dtypes and shardings of the exported state, as a checkpoint holds it."""

    def init(self, make: Callable[[], TrainState]) -> TrainState:
        """The state, made in its place."""

    def put(self, batch: dict[str, np.ndarray]) -> Batch:
        """This process's slots [slot, example, ...] on their devices."""

    def lower(self, step: Step) -> Program:
        """The step as programs over all devices."""

    def export(self, state: TrainState) -> TrainState:
        """Global arrays in logical shapes, the same for every strategy."""

    def adopt(self, state: TrainState) -> TrainState:
        """The inverse of `export`."""


def abstract_whole(make: Callable[[], TrainState], mesh: Mesh) -> TrainState:
    """The state's shapes and dtypes, replicated over the mesh."""
    whole = NamedSharding(mesh, P())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), jax.eval_shape(make))


def make_whole(make: Callable[[], TrainState], mesh: Mesh) -> TrainState:
    """The state, replicated over the mesh and the same on every device."""
    state = jax.jit(make, out_shardings=NamedSharding(mesh, P()))()
    return from_first(state, mesh) if jax.process_count() > 1 else state


def slot_table(microbatches: int, devices: int) -> np.ndarray:
    """table[device, slot]: consecutive microbatches, shares that differ by at most one, -1 where a slot has none.

    Raises UsageError where there are more devices than microbatches.
    """
    if devices > microbatches:
        raise UsageError(
            f"microbatches: {microbatches} cannot be dealt to {devices} devices; set microbatches to {devices} or "
            f"more (this changes the numbers), or use at most {microbatches} of the devices",
            rank=0,
        )
    table = np.full((devices, -(-microbatches // devices)), -1, np.int32)
    for row, share in zip(table, np.array_split(np.arange(microbatches), devices)):
        row[: len(share)] = share
    return table


def own_slots(table: np.ndarray) -> jax.Array:
    """Inside a strategy's program: the microbatch of each slot of the replica that runs it."""
    return jnp.asarray(table)[jax.lax.axis_index(DATA)]


def of_this_process(devices: Sequence[jax.Device]) -> list[int]:
    """The indices of this process's devices."""
    return [i for i, d in enumerate(devices) if d.process_index == jax.process_index()]


def ordered_devices(devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    """All devices (or those given), each process's together."""
    return sorted(devices or jax.devices(), key=lambda d: (d.process_index, d.id))


def data_mesh(devices: Sequence[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), (DATA,), axis_types=(AxisType.Auto,))


def reducer(reduction: Reduction, dtype: Any = None) -> Callable[[Sums], Sums]:
    """Sums of one replica -> sums of all; gradients travel as `dtype` where one is given."""

    def reduce(sums: Sums) -> Sums:
        grads = sums.grads
        sent = grads if dtype is None else cast_floats(grads, dtype)
        total = reduction.reduce(sums._replace(grads=sent, carry=None), DATA)
        back = jax.tree.map(lambda x, g: x.astype(g.dtype), total.grads, grads)
        return total._replace(grads=back, carry=sums.carry)

    return reduce


def deal(table: np.ndarray, carry: Any, sharding: NamedSharding) -> Any:
    """carry[microbatch, ...] -> [device x slot, ...]; a slot without a microbatch repeats the first."""
    index = np.maximum(table.reshape(-1), 0)
    return jax.jit(lambda c: jax.tree.map(lambda x: x[index], c), out_shardings=sharding)(carry)


def collect(table: np.ndarray, carry: Any, sharding: NamedSharding) -> Any:
    """The inverse of `deal`."""
    index = np.argsort(np.where(table.reshape(-1) < 0, table.size, table.reshape(-1)), kind="stable")[: table.max() + 1]
    return jax.jit(lambda c: jax.tree.map(lambda x: x[index], c), out_shardings=sharding)(carry)


def from_first(tree: Any, mesh: Mesh) -> Any:
    """Replicated arrays, each device's made equal to the first device's: the initial-weight sync.

    Every process computes the initial state from the same seed, but processors of different kinds may round
    differently.
    """

    def first(tree: Any) -> Any:
        here = jax.lax.axis_index(DATA) == 0
        sent = jax.lax.psum(jax.tree.map(lambda x: jnp.where(here, x, jnp.zeros_like(x)), tree), DATA)
        return jax.tree.map(lambda x, y: y.astype(x.dtype), tree, sent)  # a sum of booleans is an integer

    return jax.jit(jax.shard_map(first, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))(tree)
