"""A data-parallel strategy is a placement of the state plus the one reduction between `grads` and `apply`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxdp.axes import DATA, FLAT, REPLICA, SHARD, Axes
from jaxdp.errors import UsageError
from jaxdp.parallel.exact import add_up
from jaxdp.parallel.exact import total as exact_total
from jaxdp.parallel.layout import Share
from jaxdp.parallel.reduction import Reduction
from jaxdp.parallel.rounding import BITS, as_written, running, settle
from jaxdp.precision import cast_floats
from jaxdp.split import WHOLE, spec
from jaxdp.step import Batch, Gather, Join, Step, Sums, Total, TrainState, View, merge, plain_total


class Program(NamedTuple):
    """The compiled parts of a step, by name; each has `.lower(state, batch)`.

    update(state, batch) -> (state, metrics), donating the state; evaluate(state, batch) -> Sums over all devices.
    updates: the same of several batches [step, ...], one after the other, with metrics[step]; None where there is none.
    """

    update: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[TrainState, Batch], Sums]
    updates: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]] | None = None

    def lowered(self, state: TrainState, batch: Batch, several: bool = False) -> dict[str, Any]:
        """The compiled parts of an update, lowered for such arguments: `update`, or `grads` and `apply`.

        several: those of `updates`.
        """
        if several:
            return {"updates": self.updates.lower(state, batch)}  # type: ignore[union-attr]
        if isinstance(self.update, TwoParts):
            return self.update.lowered(state, batch)
        return {"update": self.update.lower(state, batch)}  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class TwoParts:
    """An update as two programs: in one, XLA fuses the end of the reduction into the optimizer, and rounds otherwise.

    grads(state, batch) -> Sums over all devices; apply(state, sums) -> (state, metrics), donating the state.
    between(the first, lowered) -> the shapes of the sums as the second gets them.
    """

    grads: Any
    apply: Any
    between: Callable[[Any], Sums]

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        return self.apply(state, self.grads(state, batch))

    def lowered(self, state: TrainState, batch: Batch) -> dict[str, Any]:
        grads = self.grads.lower(state, batch)
        return {"grads": grads, "apply": self.apply.lower(state, self.between(grads))}


class Strategy(Protocol):
    """What the loop and the checkpoint know of a backend; made for the state that a function gives.

    shapes: that state's; dims: along which its leaves are split into `parts`; slices: those of gradients and updates,
    where any state is split. blocks: paths of parameters that are stacked [block, ...]. table: the microbatch, or -1,
    of [device, slot]. local_slots: the microbatch (or -1, none) of each slot of this process's devices, in the
    order `put` takes them.
    """

    devices: list[jax.Device]
    parts: int
    blocks: tuple[str, ...]
    shapes: TrainState
    dims: Any
    slices: Any
    table: np.ndarray
    local_slots: np.ndarray

    def check(self, tx: Any, params: Any) -> None:
        """UsageError where the optimizer cannot work on the slices that this strategy gives it."""

    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the exported state, as a checkpoint holds it."""

    def share(self) -> Share:
        """How much of the state is split."""

    def init(self) -> TrainState:
        """The state before the first update, made in its place: what is split is never whole on a device."""

    def put(self, batch: dict[str, np.ndarray], several: bool = False) -> Batch:
        """This process's slots [slot, example, ...] on their devices; several: those of more than one step,
        [step, slot, ...], as `Program.updates` takes them."""

    def hold(self, arrays: dict[str, np.ndarray]) -> Batch:
        """Arrays, whole on each device of this process, to be indexed by what `put` places."""

    def lower(self, step: Step) -> Program:
        """The step as programs over all devices."""

    def averaged(self, state: TrainState) -> TrainState:
        """The state with its `ema` for parameters, to evaluate."""

    def arguments(self, example: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        """The shapes of what a program takes, for microbatches like `example` {name: [example, ...]}; to compile it."""

    def export(self, state: TrainState) -> TrainState:
        """Global arrays in logical shapes, the same for every strategy."""

    def adopt(self, state: TrainState) -> TrainState:
        """The inverse of `export`."""


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


def slot_table(microbatches: int, devices: int, strided: bool = False) -> np.ndarray:
    """table[device, slot]: consecutive microbatches, shares that differ by at most one, -1 where a slot has none.

    strided: microbatch = slot x devices + device, where devices divide microbatches.
    Raises UsageError where there are more devices than microbatches.
    """
    if devices > microbatches:
        raise UsageError(
            f"microbatches: {microbatches} cannot be dealt to {devices} devices; set microbatches to {devices} or "
            f"more (this changes the numbers), or use at most {microbatches} of the devices",
            rank=0,
        )
    if strided:
        return np.arange(microbatches, dtype=np.int32).reshape(-1, devices).T
    table = np.full((devices, -(-microbatches // devices)), -1, np.int32)
    for row, share in zip(table, np.array_split(np.arange(microbatches), devices)):
        row[: len(share)] = share
    return table


def own_slots(table: np.ndarray, axes: Axes = FLAT) -> jax.Array:
    """Inside a strategy's program: the microbatch of each slot of the replica that runs it."""
    return jnp.asarray(table)[jax.lax.axis_index(axes.all)]


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


def reducer(
    reduction: Reduction, axes: Axes = FLAT, dtype: Any = None, dims: Any = None, scattered: bool = False
) -> Callable[[Sums], Sums]:
    """Sums of one replica -> sums of all; gradients travel as `dtype` where one is given.

    dims: gradients with a dim come as this device's slice along it; None leaves all whole. scattered: such slices are
    there already, summed.
    """

    def reduce(sums: Sums) -> Sums:
        grads = sums.grads
        sent = grads if dtype is None else cast_floats(grads, dtype)
        along = jax.tree.map(lambda _: WHOLE, grads) if dims is None else dims
        split = jax.tree.map(lambda x, d: None if d == WHOLE else x, sent, along)
        whole = jax.tree.map(lambda x, d: x if d == WHOLE else None, sent, along)
        if scattered:
            split = jax.tree.map(lambda x, d: None if d == WHOLE else x, grads, along)
        else:
            split = reduction.scatter(split, jax.tree.map(lambda d: None if d == WHOLE else d, along), axes)
        total = reduction.reduce(sums._replace(grads=whole, carry=None), axes.all)
        summed = merge(total.grads, split)
        back = jax.tree.map(lambda x, g: x.astype(g.dtype), summed, grads)
        return total._replace(grads=back, carry=sums.carry)

    return reduce


def joiner(table: np.ndarray, axes: Axes) -> Join:
    """Inside a strategy's program: the slots of all devices, [microbatch, ...], on each."""

    def gather(x: jax.Array) -> jax.Array:
        small = jnp.issubdtype(x.dtype, jnp.bool_) or (jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 4)
        sent = x.astype(jnp.int32) if small else x  # as all backends take them
        return jax.lax.all_gather(sent, axes.all, tiled=True)[_order(table)].astype(x.dtype)

    return lambda tree: jax.tree.map(gather, tree)


def over_slots(
    f: Callable[..., Sums],
    reduce: Callable[[Sums], Sums],
    table: np.ndarray,
    axes: Axes,
    exact: bool = False,
    per_slot: bool = False,
) -> Callable[[View, Batch, Gather], Sums]:
    """Inside a strategy's program: one of the step's functions on this device's slots, and the sums of all devices.

    exact: by the tree of `jaxdp.parallel.exact`. per_slot: then reduced slot by slot.
    """

    def at_once(view: View, batch: Batch, gather: Gather) -> Sums:
        return reduce(f(view, batch, own_slots(table, axes), gather, joiner(table, axes)))

    def by_tree(view: View, batch: Batch, gather: Gather) -> Sums:
        live = running(view.step)

        def one(carry: Any, batch: Batch, slot: jax.Array) -> Sums:
            sums = f(view._replace(carry=carry), batch, slot, gather)
            return reduce(settle(sums, live)) if per_slot else sums

        apart = lambda sums: (sums._replace(carry=None), sums.carry)
        sums, carry = add_up(one, (view.carry, batch, own_slots(table, axes)), live, apart)
        return (sums if per_slot else reduce(sums))._replace(carry=carry)

    return by_tree if exact else at_once


def applier(apply: Callable[..., Any], exact: bool) -> Callable[..., Any]:
    """f(state, ...) of a strategy's program; exact: with every operation rounded as it is written."""
    if not exact:
        return apply

    @functools.wraps(apply)
    def run(state: TrainState, *more: Any) -> Any:
        return as_written(apply, running(state.step))(state, *more)

    return run


def totaller(dims: Any, axis: str, pieces: Any = None, update: jax.Array | None = None) -> Total:
    """`total` inside a strategy's program: a tree's measure, where leaves with a dim are slices along it.

    dims: None where all leaves are whole. pieces: see `exact.total`, in update number `update`.
    """
    if dims is None and pieces is None:
        return plain_total

    def total(measure: Callable[[Any], jax.Array], tree: Any) -> jax.Array:
        if pieces is not None and update is not None:
            along = jax.tree.map(lambda _: WHOLE, tree) if dims is None else dims
            return exact_total(measure, tree, along, pieces, axis, running(update))
        once = jax.lax.axis_index(axis) == 0
        own = jax.tree.map(lambda x, d: jnp.where(once, x, jnp.zeros_like(x)) if d == WHOLE else x, tree, dims)
        return jax.lax.psum(measure(own), axis)

    return total


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
    index = _order(table)
    return jax.jit(lambda c: jax.tree.map(lambda x: x[index], c), out_shardings=sharding)(carry)


def _order(table: np.ndarray) -> np.ndarray:
    """Where each microbatch is among [device x slot]."""
    return np.argsort(np.where(table.reshape(-1) < 0, table.size, table.reshape(-1)), kind="stable")[: table.max() + 1]


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
