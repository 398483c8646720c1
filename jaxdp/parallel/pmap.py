"""`jax.pmap` over each process's devices, with `psum` over the axis of all: the classic data-parallel loop."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.axes import DATA, FLAT
from jaxdp.core.frozen import merge
from jaxdp.core.state import Batch, Sums, TrainState
from jaxdp.core.step import Step
from jaxdp.errors import UsageError
from jaxdp.optim import check_elementwise
from jaxdp.parallel.gather import GatherRule, make_gather
from jaxdp.parallel.layout import ZERO, Share, of_params, share, state_dims, whole_shape
from jaxdp.parallel.mapped import Mapped, of_buffers, over_all
from jaxdp.parallel.placement import (
    abstract_state,
    collect,
    data_mesh,
    deal,
    like,
    make_state,
    of_this_process,
    one_by_one,
    ordered_devices,
    same,
    sent_by_call,
    slot_table,
)
from jaxdp.parallel.reduction import Reduction
from jaxdp.parallel.strategy import Program
from jaxdp.parallel.sums import Place, arithmetic
from jaxdp.split import WHOLE, spec, take


class PMap:
    """State whole on every local device, held once per process; each device computes the whole update.

    Every replica divides the same psum by the same weight (`lax.pmean` with weights), so all stay equal. zero: 1 gives
    each device a slice of the optimizer state, and of the update; for elementwise optimizers. Other arguments as
    those of `PJit`.
    """

    def __init__(
        self,
        make: Callable[[], TrainState],
        microbatches: int,
        reduction: Reduction,
        reduce_dtype: Any = None,
        devices: Sequence[jax.Device] | None = None,
        *,
        zero: int = 0,
        shard_size: int | None = None,
        gradient_buffer: str = "sharded",
        blocks: tuple[str, ...] = (),
        split_as: int | None = None,
    ):
        if zero > 1 or shard_size is not None:
            key, value = ("zero", zero) if zero > 1 else ("shard_size", shard_size)
            raise UsageError(f"parallel.{key}: {value} does not work under pmap; set parallel.backend to pjit", rank=0)
        self.devices = ordered_devices(devices)
        self.arithmetic = arithmetic(reduction)
        self.table = slot_table(microbatches, len(self.devices), reduction.group)
        here = of_this_process(self.devices)
        local = [self.devices[i] for i in here]
        self.local_slots = self.table[here].reshape(-1)
        self.per_device = (len(local), self.table.shape[1])
        self.by_call = sent_by_call(self.devices)
        self.mesh = data_mesh(self.devices)
        self.everywhere = NamedSharding(self.mesh, P())
        self.here = NamedSharding(data_mesh(local), P())
        self.split_everywhere = NamedSharding(self.mesh, P(DATA))
        self.split_here = NamedSharding(data_mesh(local), P(DATA))
        self.reduction, self.reduce_dtype = reduction, reduce_dtype
        self.layout, self.blocks, self.parts = ZERO[zero], blocks, len(self.devices)
        self.make, self.shapes = make, jax.eval_shape(make)
        self.dims = state_dims(self.shapes, self.layout, split_as or len(self.devices), blocks)
        self.dims = self.dims.replace(opt_state=of_params(self.shapes, self.dims.opt_state))
        whole_split = state_dims(self.shapes, ZERO[3], split_as or len(self.devices), blocks)
        self.slices: Any = whole_split.params  # the dims of gradients and updates, where any state is split

    def check(self, tx: Any, params: Any) -> None:
        parts = 2 if self.arithmetic.elementwise else len(self.devices)
        if self.layout.opt_state and parts > 1:
            check_elementwise(tx, params, parts, self.blocks)

    def abstract(self) -> TrainState:
        return abstract_state(self.shapes, self.mesh, self.dims, DATA)

    def share(self) -> Share:
        return share(self.shapes, self.dims, self.layout)

    def init(self) -> TrainState:
        return self.adopt(make_state(self.make, self.abstract(), self.mesh, self.dims, FLAT))

    def shard_batch(self, batch: dict[str, np.ndarray], several: bool = False) -> Batch:
        def by_device(x: np.ndarray) -> np.ndarray:
            """[local device, slot, ...], or [local device, step, slot, ...]."""
            if several:
                return x.reshape(len(x), *self.per_device, *x.shape[2:]).swapaxes(0, 1)
            return x.reshape(*self.per_device, *x.shape[1:])

        dealt = {k: by_device(x) for k, x in batch.items()}
        if self.by_call:
            return dealt  # type: ignore[return-value]
        return self._placed(dealt, self.split_here, self.split_everywhere)

    def replicate(self, arrays: dict[str, np.ndarray]) -> Batch:
        return self._placed(arrays, self.here, self.everywhere)

    def _placed(self, arrays: dict[str, np.ndarray], here: NamedSharding, everywhere: NamedSharding) -> Batch:
        """On this process's devices; as parts of global arrays where there are other processes (see `Mapped`)."""
        placed: Batch = jax.device_put(arrays, here)
        return {k: over_all(x, everywhere) for k, x in placed.items()} if jax.process_count() > 1 else placed

    def compile(self, step: Step) -> Program:
        """Each device computes its slots, reduces and applies the whole update."""
        arithmetic = self.arithmetic
        grad_dims = step.trainable(self.slices) if self.layout.opt_state else None
        place = Place(self.reduction, self.table, FLAT)
        evaluate = self._summed(step, step.evaluate, place)
        grads = self._summed(step, step.grads, place._replace(dims=grad_dims, dtype=self.reduce_dtype, key=step.key))
        apply = arithmetic.finish(self._apply(step, grad_dims))

        def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
            return apply(state, grads(state, batch))

        varies = jax.tree.map(lambda d: d != WHOLE, self.dims).replace(carry=True)
        yes: Any = True
        no: Any = False
        evaluated = Sums(no, no, no, no, no, yes, no)
        mapped = lambda f: Mapped(f, (varies, True), (varies, False), self.devices, donate=True)
        evaluation = Mapped(evaluate, (varies, True), evaluated, self.devices)
        return Program(mapped(update), evaluation, mapped(one_by_one(update)))

    def _summed(self, step: Step, f: Callable[..., Sums], place: Place) -> Callable[[TrainState, Batch], Sums]:
        """Return the sums over all devices of one of the step's functions on each device's slots."""
        sums_of = self.arithmetic.over_slots(f, place)
        rule = GatherRule(self.reduction, FLAT, self.blocks, step.trainable)

        def of_device(state: TrainState, batch: Batch) -> Sums:
            live = self.arithmetic.live(state.step)
            params, gather = make_gather(state.params, self.slices, rule._replace(live=live))
            return sums_of(state.view._replace(params=params), batch, gather)

        return of_device

    def _apply(self, step: Step, grad_dims: Any) -> Callable[..., Any]:
        """Return `step.apply`; under ZeRO-1 on this device's slice, whose result all devices gather."""
        parts = len(self.devices)

        def apply(state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, jax.Array]]:
            total = self.arithmetic.total(grad_dims, DATA, state.step)
            if grad_dims is None:
                return step.apply(state, sums, total)
            index, before = jax.lax.axis_index(DATA), state.params
            shard = jax.tree.map(lambda x, d: take(x, d, index, parts), before, self.slices)
            state, metrics = step.apply(state.replace(params=shard), sums, total)
            joined = self.reduction.gather(step.trainable(state.params), grad_dims, DATA)
            return state.replace(params=merge(joined, before)), metrics

        return apply

    def averaged(self, state: TrainState) -> TrainState:
        ema = self.export(state).ema
        whole = jax.jit(same, out_shardings=self.everywhere)(like(ema, state.params))
        place = self.here if state.step.is_fully_addressable else self.everywhere  # as the other leaves
        return state.replace(params=jax.tree.map(lambda x: of_buffers(x.shape, place, x), whole))

    def argument_shapes(self, example: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        local, slots = self.per_device

        def own(x: Any, dim: int) -> Any:
            """[local device, ...slice] of what is split; what is whole as it is."""
            slice_ = (n // len(self.devices) if d == dim else n for d, n in enumerate(x.shape))
            return jax.ShapeDtypeStruct(x.shape if dim == WHOLE else (local, *slice_), x.dtype)

        state = jax.tree.map(own, self.shapes.replace(carry=None), self.dims.replace(carry=None))
        stack = lambda x, shape: jax.ShapeDtypeStruct((local, slots, *shape), x.dtype)
        carry = jax.tree.map(lambda x: stack(x, x.shape[1:]), self.shapes.carry)
        return state.replace(carry=carry), {k: stack(x, x.shape) for k, x in example.items()}

    def export(self, state: TrainState) -> TrainState:
        whole = jax.tree.map(self._everywhere, state.replace(carry=None), self.dims.replace(carry=None))
        if state.carry is None:
            return whole
        carry = jax.tree.map(self._join, state.carry)
        return whole.replace(carry=collect(self.table, carry, self.everywhere))

    def adopt(self, state: TrainState) -> TrainState:
        here = jax.tree.map(self._here, state.replace(carry=None), self.dims.replace(carry=None))
        if state.carry is None:
            return here
        carry = deal(self.table, state.carry, self.split_everywhere)
        return here.replace(carry=jax.tree.map(self._part, carry))

    def _carried(self, value: Any) -> Any:
        return jax.tree.map(lambda _: value, self.shapes.carry)

    def _everywhere(self, x: jax.Array, dim: int) -> jax.Array:
        """The same buffers as a global array: whole, or [local device, ...slice] along its dim; nothing moves."""
        if dim == WHOLE:
            return of_buffers(x.shape, self.everywhere, x)
        slices = [s.data.reshape(s.data.shape[1:]) for s in x.addressable_shards]
        place = NamedSharding(self.mesh, spec(dim, DATA))
        shape = whole_shape(slices[0], dim, len(self.devices))
        return jax.make_array_from_single_device_arrays(shape, place, slices)

    def _here(self, x: jax.Array, dim: int) -> jax.Array:
        """The inverse of `_everywhere`."""
        if dim == WHOLE:
            return of_buffers(x.shape, self.here, x)
        slices = [s.data[None] for s in x.addressable_shards]
        shape = (len(slices), *slices[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.split_here, slices)

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
