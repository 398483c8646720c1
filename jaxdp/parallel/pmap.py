"""The `pmap` strategy: `jax.pmap` over each process's devices, `psum` over all: the classic
data-parallel loop.
"""

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
from jaxdp.optim.evaluation import evaluation_arrays, evaluation_params
from jaxdp.parallel import placement
from jaxdp.parallel.gather import GatherRule, make_gather
from jaxdp.parallel.layout import UNSHARDED, ZERO, Sharding, Share, param_dims, share, state_dims
from jaxdp.parallel.mapped import Mapped, from_buffers, reshard
from jaxdp.parallel.padding import fit_trees, padded_shapes, resize
from jaxdp.parallel.reduction import Reduction
from jaxdp.parallel.strategy import Program
from jaxdp.parallel.sums import ReductionPlan, arithmetic, joiner, replica_microbatches
from jaxdp.split import WHOLE, spec, take
from jaxdp.train.average import averaged_state
from jaxdp.train.frozen import merge
from jaxdp.train.state import Batch, Sums, TrainState
from jaxdp.train.step import Step


class PMap:
    """State replicated on the devices of every process; each device computes the full update.

    Every replica divides the same psum by the same weight (`lax.pmean` with weights), so all stay
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
            value = getattr(sharding, key)
            raise UsageError(
                f"parallel.{key}: {value} does not work under pmap; set parallel.backend to pjit",
                rank=0,
            )
        self.devices = placement.ordered_devices(devices)
        self.arithmetic = arithmetic(reduction)
        self.assignment = placement.assign_microbatches(
            microbatches, len(self.devices), reduction.group
        )
        indices = placement.of_this_process(self.devices)
        local = [self.devices[i] for i in indices]
        self.local_microbatches = self.assignment[indices].reshape(-1)
        self.per_device = (len(local), self.assignment.shape[1])
        self.by_call = placement.sent_by_call(self.devices)
        self.mesh = placement.data_mesh(self.devices)
        self.replicated = NamedSharding(self.mesh, P())
        self.replicated_locally = NamedSharding(placement.data_mesh(local), P())
        self.split = NamedSharding(self.mesh, P(DATA))
        self.split_locally = NamedSharding(placement.data_mesh(local), P(DATA))
        self.reduction, self.reduce_dtype = reduction, reduce_dtype
        self.layout, self.blocks, self.parts = (
            ZERO[sharding.zero],
            sharding.blocks,
            len(self.devices),
        )
        self.make, self.shapes = make, placement.state_shapes(make)
        # Of gradients too, if any state is split.
        self.slices: Any = param_dims(self.shapes.params, sharding, self.parts)
        others = jax.tree.map(lambda _: WHOLE, self.shapes.opt_state)
        self.dims = state_dims(self.shapes, self.layout, self.slices, others)
        self.stored, self.pad = padded_shapes(self.shapes, self.dims, self.parts), sharding.pad

    def check(self, tx: Any, params: Any) -> None:
        parts = 2 if self.arithmetic.elementwise else len(self.devices)
        if self.layout.opt_state and parts > 1:
            check_elementwise(tx, params, parts, self.blocks, pad=self.pad)

    def abstract(self, padded: bool = False) -> TrainState:
        return placement.abstract_state(
            self.stored if padded else self.shapes, self.mesh, self.dims, DATA
        )

    def share(self) -> Share:
        return share(self.shapes, self.dims, self.layout)

    def init(self) -> TrainState:
        stored, live = self.abstract(padded=True), self.arithmetic.live
        return self.adopt(placement.make_state(self.make, stored, self.mesh, self.dims, FLAT, live))

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
        `Mapped`).
        """
        on_device: Batch = jax.device_put(arrays, local)
        return (
            {k: reshard(x, sharding) for k, x in on_device.items()}
            if jax.process_count() > 1
            else on_device
        )

    def compile(self, step: Step) -> Program:
        """Return the programs: each device computes its microbatches, reduces and applies the full
        update.
        """
        arithmetic = self.arithmetic
        grad_dims = step.trainable(self.slices) if self.layout.opt_state else None
        plan = ReductionPlan(self.reduction, self.assignment, FLAT)
        evaluate = self._summed(step, step.evaluate, plan)
        grads = self._summed(
            step, step.grads, plan._replace(dims=grad_dims, dtype=self.reduce_dtype, is_update=True)
        )
        apply = arithmetic.finish(self._apply(step, grad_dims))

        def update(
            seed: jax.Array, state: TrainState, batch: Batch
        ) -> tuple[TrainState, dict[str, jax.Array]]:
            return apply(state, grads(seed, state, batch))

        varies = jax.tree.map(lambda d: d != WHOLE, self.dims).replace(carry=True)
        yes: Any = True
        no: Any = False
        evaluated = Sums(no, no, no, no, no, yes, no)

        def mapped(f):
            return Mapped(f, step.seed, (varies, True), (varies, False), self.devices, donate=True)

        evaluation = Mapped(evaluate, step.seed, (varies, True), evaluated, self.devices)
        return Program(mapped(update), evaluation, mapped(placement.one_by_one(update)))

    def _summed(
        self, step: Step, f: Callable[..., Sums], plan: ReductionPlan
    ) -> Callable[..., Sums]:
        """Return (seed, state, batch) -> sums over all devices of a step's function on each
        device's microbatches.
        """
        of_microbatches, reduce = self.arithmetic.over_microbatches(f, plan)
        rule = GatherRule(self.reduction, FLAT, self.blocks, step.trainable)

        def device_sums(seed: jax.Array, state: TrainState, batch: Batch) -> Sums:
            live = self.arithmetic.live(state.step)
            params, gather = make_gather(
                state.params, self.slices, self.shapes.params, rule._replace(live=live)
            )
            numbers, join = (
                replica_microbatches(self.assignment, FLAT),
                joiner(self.assignment, FLAT),
            )
            return reduce(
                of_microbatches(
                    state.replace(params=params).view(seed), batch, numbers, gather, join
                )
            )

        return device_sums

    def _apply(self, step: Step, grad_dims: Any) -> Callable[..., Any]:
        """Return `step.apply`; under ZeRO-1, on this device's slices, gathering the new parameters."""
        parts = len(self.devices)

        def apply(state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, jax.Array]]:
            total = self.arithmetic.total(grad_dims, DATA, state.step)
            if grad_dims is None:
                return step.apply(state, sums, total)
            index, before = jax.lax.axis_index(DATA), state.params
            shard = jax.tree.map(lambda x, d: take(x, d, index, parts), before, self.slices)
            state, metrics = step.apply(state.replace(params=shard), sums, total)
            joined = self.reduction.gather(step.trainable(state.params), grad_dims, DATA)
            return state.replace(
                params=merge(fit_trees(joined, step.trainable(before)), before)
            ), metrics

        return apply

    def averaged(self, state: TrainState) -> TrainState:
        ema = placement.like(self.export(state).ema, state.params)
        full = jax.jit(placement.same, out_shardings=self.replicated)(ema)
        return self._with_params(state, full).replace(model_state=averaged_state(state))

    def evaluated(self, state: TrainState) -> TrainState:
        exported = self.export(state.replace(carry=None), padded=True)
        if not (kept := evaluation_arrays(exported.opt_state)):
            return state
        return self._with_params(
            state, self._evaluation_params(exported.step, exported.params, kept)
        )

    @functools.cached_property
    def _evaluation_params(self) -> Callable[..., Any]:
        def compute(step, *arguments):
            return self.arithmetic.rounded(evaluation_params, step)(*arguments)

        return jax.jit(compute, out_shardings=self.replicated)

    def _with_params(self, state: TrainState, full: Any) -> TrainState:
        """Return the state with these parameters, global arrays that are replicated."""
        sharding = self.replicated_locally if state.step.is_fully_addressable else self.replicated
        return state.replace(
            params=jax.tree.map(lambda x: from_buffers(x.shape, sharding, x), full)
        )

    def argument_shapes(self, example: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        local, count = self.per_device

        def local_shape(x: Any, dim: int) -> Any:
            """Return the shape [local device, ...slice] of a split leaf; a replicated one keeps its
            shape.
            """
            slice_ = (n // len(self.devices) if d == dim else n for d, n in enumerate(x.shape))
            return jax.ShapeDtypeStruct(x.shape if dim == WHOLE else (local, *slice_), x.dtype)

        state = jax.tree.map(
            local_shape, self.stored.replace(carry=None), self.dims.replace(carry=None)
        )

        def stack(x, shape):
            return jax.ShapeDtypeStruct((local, count, *shape), x.dtype)

        carry = jax.tree.map(lambda x: stack(x, x.shape[1:]), self.shapes.carry)
        return state.replace(carry=carry), {k: stack(x, x.shape) for k, x in example.items()}

    def export(self, state: TrainState, padded: bool = False) -> TrainState:
        exported = jax.tree.map(
            self._to_global, state.replace(carry=None), self.dims.replace(carry=None)
        )
        if state.carry is not None:
            carry = jax.tree.map(lambda x: self._to_global(x, 0), state.carry)
            exported = exported.replace(
                carry=placement.gather_carry(self.assignment, carry, self.replicated)
            )
        return exported if padded else resize(exported, self.abstract())

    def adopt(self, state: TrainState) -> TrainState:
        state = resize(state, self.abstract(padded=True))
        local = jax.tree.map(
            self._to_local, state.replace(carry=None), self.dims.replace(carry=None)
        )
        if state.carry is None:
            return local
        carry = placement.scatter_carry(self.assignment, state.carry, self.split)
        return local.replace(carry=jax.tree.map(lambda x: self._to_local(x, 0), carry))

    def _to_global(self, x: jax.Array, dim: int) -> jax.Array:
        """Convert a replicated array, or slices [local device, ...] along `dim`, to a global array;
        no data moves.
        """
        if dim == WHOLE:
            return from_buffers(x.shape, self.replicated, x)
        slices = [s.data.reshape(s.data.shape[1:]) for s in x.addressable_shards]
        sharding = NamedSharding(self.mesh, spec(dim, DATA))
        shape = tuple(
            n * len(self.devices) if d == dim else n for d, n in enumerate(slices[0].shape)
        )
        return jax.make_array_from_single_device_arrays(shape, sharding, slices)

    def _to_local(self, x: jax.Array, dim: int) -> jax.Array:
        """Invert `_to_global`."""
        if dim == WHOLE:
            return from_buffers(x.shape, self.replicated_locally, x)
        slices = [s.data[None] for s in x.addressable_shards]
        shape = (len(slices), *slices[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.split_locally, slices)
