"""One `jax.jit` over a mesh of all devices, with the reduction written out in a `shard_map`."""

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
from jaxdp.step import Batch, Step, Sums, TrainState, View


class PJit:
    """State whole on every device of a mesh (NamedSharding), batches split along its one axis."""

    def __init__(
        self,
        microbatches: int,
        reduction: Reduction,
        reduce_dtype: Any = None,
        devices: Sequence[jax.Device] | None = None,
    ):
        self.devices = ordered_devices(devices)
        self.table = slot_table(microbatches, len(self.devices))
        self.mesh = data_mesh(self.devices)
        self.local_slots = self.table[of_this_process(self.devices)].reshape(-1)
        self.whole = NamedSharding(self.mesh, P())
        self.split = NamedSharding(self.mesh, P(DATA))
        self.reduce = reducer(reduction, reduce_dtype)

    def abstract(self, make: Callable[[], TrainState]) -> TrainState:
        return abstract_whole(make, self.mesh)

    def init(self, make: Callable[[], TrainState]) -> TrainState:
        return self.adopt(make_whole(make, self.mesh))

    def put(self, batch: dict[str, np.ndarray]) -> Batch:
        return {k: jax.make_array_from_process_local_data(self.split, x) for k, x in batch.items()}

    def lower(self, step: Step) -> Program:
        def over_devices(f: Callable[[View, Batch], Sums]) -> Callable[[TrainState, Batch], Sums]:
            whole: Any = P()
            view = View(whole, whole, whole, P(DATA))
            out = Sums(whole, whole, whole, whole, whole, P(DATA))
            mapped = jax.shard_map(f, mesh=self.mesh, in_specs=(view, P(DATA)), out_specs=out, check_vma=False)
            return lambda state, batch: mapped(state.view, batch)

        grads = over_devices(lambda view, batch: self.reduce(step.grads(view, batch, own_slots(self.table))))
        evaluate = over_devices(lambda view, batch: self.reduce(step.evaluate(view, batch, own_slots(self.table))))

        def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
            return step.apply(state, grads(state, batch))

        whole: Any = self.whole
        state = TrainState(whole, whole, whole, whole, self.split)
        return Program(
            jax.jit(update, donate_argnums=0, out_shardings=(state, whole)),
            jax.jit(evaluate, out_shardings=self.whole),
        )

    def export(self, state: TrainState) -> TrainState:
        return state if state.carry is None else state.replace(carry=collect(self.table, state.carry, self.whole))

    def adopt(self, state: TrainState) -> TrainState:
        return state if state.carry is None else state.replace(carry=deal(self.table, state.carry, self.split))
