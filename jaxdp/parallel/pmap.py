"""The `pmap` strategy: `jax.pmap` over each process's devices, `psum` over all: the classic
data-parallel loop."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from jaxdp.axes import DATA, FLAT
from jaxdp.errors import UsageError
from jaxdp.optim import check_elementwise
from jaxdp.optim.evaluation import evaluation_arrays
from jaxdp.parallel import placement
from jaxdp.parallel.layout import UNSHARDED, Sharding
from jaxdp.parallel.mapped import Mapped, from_buffers, reshard
from jaxdp.parallel.padding import fit_trees, resize
from jaxdp.parallel.reduction import Reduction
from jaxdp.parallel.strategy import Program, Strategy, replicated
from jaxdp.split import WHOLE, spec, take
from jaxdp.train.average import EMA, averaged_state
from jaxdp.train.state import Batch, Sums, TrainState, merge
from jaxdp.train.step import Step


class PMap(Strategy):
    """State replicated on the devices of every process; each device computes the full update.

    Every device divides the same psum by the same weight (`lax.pmean` with weights), so all stay
    equal. zero: 1 gives each device a slice of the optimizer state and of the update, and needs an
    elementwise optimizer. The other arguments are those of `PJit`.
    """

    def __init__(
        self,
        make: Partial,
        microbatches: int,
        reduction: Reduction,
        reduce_dtype: Any = None,
        devices: Sequence[jax.Device] | None = None,
        sharding: Sharding = UNSHARDED,
    ):
        if sharding.zero > 1 or sharding.shard_size is not None:
            key = "zero" if sharding.zero > 1 else "shard_size"
            raise UsageError(
                f"parallel.{key}: {getattr(sharding, key)} does not work under pmap; set "
                "parallel.backend to pjit",
                rank=0,
            )
        devices = placement.ordered_devices(devices)
        mesh = placement.data_mesh(devices)
        super().__init__(
            make, microbatches, reduction, reduce_dtype, devices, sharding, FLAT, mesh, replicated
        )
        local = [self.devices[i] for i in placement.of_this_process(self.devices)]
        self.per_device = (len(local), self.assignment.shape[1])
        self.replicated = NamedSharding(self.mesh, P())
        self.replicated_locally = NamedSharding(placement.data_mesh(local), P())
        self.split = NamedSharding(self.mesh, P(DATA))
        self.split_locally = NamedSharding(placement.data_mesh(local), P(DATA))

    def check(self, tx: Any, params: Any) -> None:
        parts = 2 if self.arithmetic.advice else len(self.devices)
        if self.layout.opt_state and parts > 1:
            check_elementwise(tx, params, parts, self.blocks, pad=self.pad)

    def shard_batch(self, batch: dict[str, np.ndarray], several: bool = False) -> Batch:
        def by_device(x: np.ndarray) -> np.ndarray:
            """Reshape to [local device, local, ...] or [local device, step, local, ...]."""
            if several:
                return x.reshape(len(x), *self.per_device, *x.shape[2:]).swapaxes(0, 1)
            return x.reshape(*self.per_device, *x.shape[1:])

        shards = {k: by_device(x) for k, x in batch.items()}
        if self.by_call:
            return shards  # type: ignore[return-value]
        return self._transfer(shards, self.split_locally, self.split)

    def replicate(self, arrays: dict[str, np.ndarray]) -> Batch:
        return self._transfer(arrays, self.replicated_locally, self.replicated)

    def _transfer(
        self, arrays: dict[str, np.ndarray], local: NamedSharding, sharding: NamedSharding
    ) -> Batch:
        """Copy to this process's devices; with several processes, as parts of global arrays (see
        `Mapped`)."""
        on_device: Batch = jax.device_put(arrays, local)
        if jax.process_count() == 1:
            return on_device
        return {k: reshard(x, sharding) for k, x in on_device.items()}

    def compile(self, step: Step) -> Program:
        """Return the programs: each device computes its microbatches, reduces and applies the full
        update."""
        grads, evaluate = self.device_sums(step, True), self.device_sums(step, False)
        apply = functools.partial(self.arithmetic.update, self._apply(step))

        def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
            return apply(state, grads(state, batch))

        varies = jax.tree.map(lambda d: d != WHOLE, self.dims).replace(kept=True, seed=False)
        evaluated: Any = Sums(*[False] * len(Sums._fields))._replace(kept=True)

        def mapped(f: Callable) -> Any:
            return Mapped(f, (varies, True), (varies, False), self.devices, donate=True)

        evaluation = Mapped(evaluate, (varies, True), evaluated, self.devices)
        return Program(mapped(update), evaluation, mapped(placement.one_by_one(update)))

    def _apply(self, step: Step) -> Callable[..., Any]:
        """Return `step.apply`; under ZeRO-1, on this device's slices, gathering the new
        parameters."""
        parts, dims = len(self.devices), step.trainable(self.slices)

        def apply_full(state: TrainState, sums: Sums) -> Any:
            return step.apply(state, sums, self.total_of(state, None))

        def apply(state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, jax.Array]]:
            index, before = jax.lax.axis_index(DATA), state.params
            shard = jax.tree.map(lambda x, d: take(x, d, index, parts), before, self.slices)
            total = self.total_of(state, dims)
            state, metrics = step.apply(state.replace(params=shard), sums, total)
            joined = self.reduction.gather(step.trainable(state.params), dims, DATA)
            params = merge(fit_trees(joined, step.trainable(before)), before)
            return state.replace(params=params), metrics

        return apply if self.layout.opt_state else apply_full

    def averaged(self, state: TrainState) -> TrainState:
        ema = placement.like(self.export(state).extra[EMA], state.params)
        full = jax.jit(placement.same, out_shardings=self.replicated)(ema)
        return self._with_params(state, full).replace(model_state=averaged_state(state))

    def evaluated(self, state: TrainState) -> TrainState:
        exported = self.export(state.replace(kept={}), padded=True)
        if not (arrays := evaluation_arrays(exported.opt_state)):
            return state
        return self._with_params(state, self._evaluated(exported.step, exported.params, arrays))

    @functools.cached_property
    def _evaluated(self) -> Callable[..., Any]:
        return self.evaluated_params(self.replicated)

    def _with_params(self, state: TrainState, full: Any) -> TrainState:
        """Return the state with these parameters, global arrays that are replicated."""
        is_local = state.step.is_fully_addressable
        sharding = self.replicated_locally if is_local else self.replicated
        return state.replace(
            params=jax.tree.map(lambda x: from_buffers(x.shape, sharding, x), full)
        )

    def argument_shapes(self, example: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        local, count = self.per_device

        def local_shape(x: Any, dim: int) -> Any:
            """Return the shape [local device, ...slice] of a split leaf; a replicated one keeps its
            shape."""
            slice_ = (n // len(self.devices) if d == dim else n for d, n in enumerate(x.shape))
            return jax.ShapeDtypeStruct(x.shape if dim == WHOLE else (local, *slice_), x.dtype)

        def stack(x: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((local, count, *shape), x.dtype)

        state = jax.tree.map(local_shape, self.stored, self.dims)
        kept = jax.tree.map(lambda x: stack(x, x.shape[1:]), self.shapes.kept)
        state = state.replace(kept=kept, seed=jax.ShapeDtypeStruct((), np.uint32))
        return state, {k: stack(x, x.shape) for k, x in example.items()}

    def export(self, state: TrainState, padded: bool = False) -> TrainState:
        rest = state.replace(kept={}, seed=None)
        exported = jax.tree.map(self._to_global, rest, self.dims.replace(kept={}))
        kept = jax.tree.map(lambda x: self._to_global(x, 0), state.kept)
        kept = placement.gather_kept(self.assignment, kept, self.replicated)
        exported = exported.replace(kept=kept)
        return exported if padded else resize(exported, self.abstract())

    def adopt(self, state: TrainState) -> TrainState:
        state = resize(state.replace(seed=None), self.abstract(padded=True))
        local = jax.tree.map(self._to_local, state.replace(kept={}), self.dims.replace(kept={}))
        kept = placement.scatter_kept(self.assignment, state.kept, self.split)
        kept = jax.tree.map(lambda x: self._to_local(x, 0), kept)
        return local.replace(kept=kept, seed=jax.device_put(self.seed, self.replicated_locally))

    def _to_global(self, x: jax.Array, dim: int) -> jax.Array:
        """Convert a replicated array, or slices [local device, ...] along `dim`, to a global array;
        no data moves."""
        if dim == WHOLE:
            return from_buffers(x.shape, self.replicated, x)
        slices = [s.data.reshape(s.data.shape[1:]) for s in x.addressable_shards]
        sharding = NamedSharding(self.mesh, spec(dim, DATA))
        sizes = enumerate(slices[0].shape)
        shape = tuple(n * len(self.devices) if d == dim else n for d, n in sizes)
        return jax.make_array_from_single_device_arrays(shape, sharding, slices)

    def _to_local(self, x: jax.Array, dim: int) -> jax.Array:
        """Invert `_to_global`."""
        if dim == WHOLE:
            return from_buffers(x.shape, self.replicated_locally, x)
        slices = [s.data[None] for s in x.addressable_shards]
        shape = (len(slices), *slices[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.split_locally, slices)
