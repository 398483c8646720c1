"""`jax.pmap` over each process's devices, with `psum` over the axis of all: the classic data-parallel loop."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.axes import DATA
from jaxdp.parallel.base import (
    Program,
    abstract_whole,
    collect,
    data_mesh,
    deal,
    make_whole,
    of_this_process,
    ordered_devices,
    own_slots,
    reducer,
    slot_table,
)
from jaxdp.parallel.reduction import Reduction
from jaxdp.step import Batch, Step, TrainState

AXES = TrainState(None, None, None, None, 0)  # type: ignore[arg-type]  # only the carry differs between devices


class PMap:
    """State whole on every local device, held once per process; each device computes the whole update.

    Every replica divides the same psum by the same weight (`lax.pmean` with weights), so all stay equal.
    """

    def __init__(
        self,
        microbatches: int,
        reduction: Reduction,
        reduce_dtype: Any = None,
        devices: Sequence[jax.Device] | None = None,
    ):
        self.devices = ordered_devices(devices)
        self.table = slot_table(microbatches, len(self.devices))
        here = of_this_process(self.devices)
        local = [self.devices[i] for i in here]
        self.local_slots = self.table[here].reshape(-1)
        self.per_device = (len(local), self.table.shape[1])
        self.mesh = data_mesh(self.devices)
        self.everywhere = NamedSharding(self.mesh, P())
        self.here = NamedSharding(data_mesh(local), P())
        self.split_everywhere = NamedSharding(self.mesh, P(DATA))
        self.split_here = NamedSharding(data_mesh(local), P(DATA))
        self.reduce = reducer(reduction, reduce_dtype)

    def abstract(self, make: Callable[[], TrainState]) -> TrainState:
        return abstract_whole(make, self.mesh)

    def init(self, make: Callable[[], TrainState]) -> TrainState:
        return self.adopt(make_whole(make, self.mesh))

    def put(self, batch: dict[str, np.ndarray]) -> Batch:
        return {k: jax.device_put(x.reshape(*self.per_device, *x.shape[1:]), self.split_here) for k, x in batch.items()}

    def lower(self, step: Step) -> Program:
        def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
            return step.apply(state, self.reduce(step.grads(state.view, batch, own_slots(self.table))))

        def evaluate(state: TrainState, batch: Batch) -> Any:
            return self.reduce(step.evaluate(state.view, batch, own_slots(self.table)))

        # Over several processes pmap takes all devices in their own order, which must be ours.
        devices = None if jax.process_count() > 1 else self.devices
        assert devices is not None or self.devices == jax.devices(), (self.devices, jax.devices())
        options: dict[str, Any] = {"axis_name": DATA, "in_axes": (AXES, 0), "devices": devices}
        return Program(
            jax.pmap(update, out_axes=(AXES, None), donate_argnums=0, **options),
            jax.pmap(evaluate, out_axes=None, **options),
        )

    def export(self, state: TrainState) -> TrainState:
        whole = _rewrap(state.replace(carry=None), self.everywhere)
        if state.carry is None:
            return whole
        carry = jax.tree.map(self._join, state.carry)
        return whole.replace(carry=collect(self.table, carry, self.everywhere))

    def adopt(self, state: TrainState) -> TrainState:
        here = _rewrap(state.replace(carry=None), self.here)
        if state.carry is None:
            return here
        carry = deal(self.table, state.carry, self.split_everywhere)
        return here.replace(carry=jax.tree.map(self._part, carry))

    def _join(self, x: jax.Array) -> jax.Array:
        """[local device, slot, ...] on this process's devices -> [device x slot, ...] over all."""
        shards = [s.data.reshape(s.data.shape[1:]) for s in x.addressable_shards]
        shape = (self.table.size, *x.shape[2:])
        return jax.make_array_from_single_device_arrays(shape, self.split_everywhere, shards)

    def _part(self, x: jax.Array) -> jax.Array:
        """The inverse of `_join`."""
        shards = [s.data[None] for s in x.addressable_shards]
        shape = (*self.per_device, *x.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.split_here, shards)


def _rewrap(tree: Any, sharding: NamedSharding) -> Any:
    """The same replicated buffers as arrays of another sharding: nothing moves."""
    return jax.tree.map(
        lambda x: jax.make_array_from_single_device_arrays(x.shape, sharding, [s.data for s in x.addressable_shards]),
        tree,
    )
