"""`jax.pmap` over each process's devices, with `psum` over the axis of all: the classic data-parallel loop."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.axes import DATA, FLAT
from jaxdp.errors import UsageError
from jaxdp.optim import check_elementwise
from jaxdp.parallel.base import (
    Program,
    abstract_state,
    collect,
    data_mesh,
    deal,
    like,
    make_state,
    of_this_process,
    ordered_devices,
    own_slots,
    reducer,
    same,
    slot_table,
    totaller,
)
from jaxdp.parallel.layout import ZERO, Share, of_params, share, state_dims, whole_shape
from jaxdp.parallel.reduction import Reduction
from jaxdp.split import WHOLE, spec, take
from jaxdp.step import Batch, Step, TrainState, merge, plain_total


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
        accumulator: str = "split",
        blocks: tuple[str, ...] = (),
        split_as: int | None = None,
    ):
        if zero > 1 or shard_size is not None:
            key, value = ("zero", zero) if zero > 1 else ("shard_size", shard_size)
            raise UsageError(f"parallel.{key}: {value} does not work under pmap; set parallel.backend to pjit", rank=0)
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
        self.reduction, self.reduce_dtype = reduction, reduce_dtype
        self.layout, self.blocks, self.parts = ZERO[zero], blocks, len(self.devices)
        self.make, self.shapes = make, jax.eval_shape(make)
        self.dims = state_dims(self.shapes, self.layout, split_as or len(self.devices), blocks)
        self.dims = self.dims.replace(opt_state=of_params(self.shapes, self.dims.opt_state))
        whole_split = state_dims(self.shapes, ZERO[3], split_as or len(self.devices), blocks)
        self.slices: Any = whole_split.params  # the dims of gradients and updates, where any state is split

    def check(self, tx: Any, params: Any) -> None:
        if self.layout.opt_state and len(self.devices) > 1:
            check_elementwise(tx, params, len(self.devices), self.blocks)

    def abstract(self) -> TrainState:
        return abstract_state(self.shapes, self.mesh, self.dims, DATA)

    def share(self) -> Share:
        return share(self.shapes, self.dims, self.layout)

    def init(self) -> TrainState:
        return self.adopt(make_state(self.make, self.abstract(), self.mesh, self.dims, FLAT))

    def put(self, batch: dict[str, np.ndarray]) -> Batch:
        return {k: jax.device_put(x.reshape(*self.per_device, *x.shape[1:]), self.split_here) for k, x in batch.items()}

    def lower(self, step: Step) -> Program:
        parts = len(self.devices)
        split_dims = self.slices
        grad_dims = step.trainable(split_dims) if self.layout.opt_state else None
        reduce = reducer(self.reduction, dtype=self.reduce_dtype, dims=grad_dims)

        def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
            sums = reduce(step.grads(state.view, batch, own_slots(self.table)))
            if grad_dims is None:
                return step.apply(state, sums, plain_total)
            index = jax.lax.axis_index(DATA)
            before = state.params
            own = jax.tree.map(lambda x, d: take(x, d, index, parts), before, split_dims)
            state, metrics = step.apply(state.replace(params=own), sums, totaller(grad_dims, DATA))
            joined = self.reduction.gather(step.trainable(state.params), grad_dims, DATA)
            return state.replace(params=merge(joined, before)), metrics

        def evaluate(state: TrainState, batch: Batch) -> Any:
            return reducer(self.reduction)(step.evaluate(state.view, batch, own_slots(self.table)))

        varies = jax.tree.leaves(jax.tree.map(lambda d: d != WHOLE, self.dims).replace(carry=self._carried(True)))
        treedef = jax.tree.structure(self.shapes)
        return Program(
            _Mapped(update, treedef, varies, self.devices, changes=True),
            _Mapped(evaluate, treedef, varies, self.devices, changes=False),
        )

    def averaged(self, state: TrainState) -> TrainState:
        ema = self.export(state).ema
        whole = jax.jit(same, out_shardings=self.everywhere)(like(ema, state.params))
        return state.replace(params=jax.tree.map(lambda x: _of_buffers(x.shape, self.here, x), whole))

    def arguments(self, example: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
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
            return _of_buffers(x.shape, self.everywhere, x)
        slices = [s.data.reshape(s.data.shape[1:]) for s in x.addressable_shards]
        place = NamedSharding(self.mesh, spec(dim, DATA))
        shape = whole_shape(slices[0], dim, len(self.devices))
        return jax.make_array_from_single_device_arrays(shape, place, slices)

    def _here(self, x: jax.Array, dim: int) -> jax.Array:
        """The inverse of `_everywhere`."""
        if dim == WHOLE:
            return _of_buffers(x.shape, self.here, x)
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


class _Mapped:
    """`pmap` of f(state, batch) -> (state, metrics), or sums: state goes in and out as two tuples of leaves, those that
    differ between devices and those that do not, because `pmap` over several processes wants its axes hashable."""

    def __init__(self, f: Callable, treedef: Any, varies: list[bool], devices: list[jax.Device], changes: bool):
        self.treedef, self.varies, self.changes = treedef, varies, changes

        def run(own: tuple, shared: tuple, batch: Batch) -> Any:
            out = f(self._join(own, shared), batch)
            return (*self._cut(out[0]), out[1]) if changes else out

        # Over several processes pmap takes all devices in their own order, which must be ours.
        chosen = None if jax.process_count() > 1 else devices
        assert chosen is not None or devices == jax.devices(), (devices, jax.devices())
        self.mapped = jax.pmap(
            run,
            axis_name=DATA,
            in_axes=(0, None, 0),
            out_axes=(0, None, None) if changes else None,
            donate_argnums=(0, 1) if changes else (),
            devices=chosen,
        )

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        out = self.mapped(*self._cut(state), batch)
        return (self._join(*out[:2]), out[2]) if self.changes else out

    def lower(self, state: TrainState, batch: Batch) -> Any:
        return self.mapped.lower(*self._cut(state), batch)

    def _cut(self, state: TrainState) -> tuple[tuple, tuple]:
        leaves = jax.tree.leaves(state)
        return tuple(x for x, v in zip(leaves, self.varies) if v), tuple(
            x for x, v in zip(leaves, self.varies) if not v
        )

    def _join(self, own: tuple, shared: tuple) -> TrainState:
        own_left, shared_left = iter(own), iter(shared)
        return jax.tree.unflatten(self.treedef, [next(own_left if v else shared_left) for v in self.varies])


def _of_buffers(shape: tuple[int, ...], sharding: NamedSharding, x: jax.Array) -> jax.Array:
    """The same replicated buffers as an array of another sharding."""
    return jax.make_array_from_single_device_arrays(shape, sharding, [s.data for s in x.addressable_shards])
