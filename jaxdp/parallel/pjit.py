"""The `pjit` strategy: one `jax.jit` over a mesh of all devices, a ZeRO layout, explicit reductions
in `shard_map`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from jaxdp.axes import FLAT, REPLICA, SHARD, Axes
from jaxdp.errors import UsageError
from jaxdp.optim import check_elementwise
from jaxdp.optim.evaluation import evaluation_arrays, evaluation_params
from jaxdp.parallel import placement
from jaxdp.parallel.gather import GatherRule, make_gather
from jaxdp.parallel.layout import UNSHARDED, ZERO, Sharding, Share, param_dims, share, state_dims
from jaxdp.parallel.padding import fit_trees, padded_shapes, resize
from jaxdp.parallel.reduction import Reduction
from jaxdp.parallel.strategy import Program, Seeded
from jaxdp.parallel.sums import ReductionPlan, arithmetic, joiner, replica_microbatches
from jaxdp.split import spec, split_dims
from jaxdp.train.average import averaged_state
from jaxdp.train.frozen import merge
from jaxdp.train.state import Batch, Sums, TrainState, View
from jaxdp.train.step import Step


class PJit:
    """State sharded over a mesh (NamedSharding), batches sharded along all its axes."""

    def __init__(
        self,
        make: Partial,
        microbatches: int,
        reduction: Reduction,
        reduce_dtype: Any = None,
        devices: Sequence[jax.Device] | None = None,
        sharding: Sharding = UNSHARDED,
    ):
        self.devices = placement.ordered_devices(devices)
        self.layout, self.blocks, self.arithmetic = (
            ZERO[sharding.zero],
            sharding.blocks,
            arithmetic(reduction),
        )
        self.split_grads = self.layout.grads and sharding.gradient_buffer == "sharded"
        self.assignment = placement.assign_microbatches(
            microbatches, len(self.devices), reduction.group
        )
        self.parts = group_size(sharding.shard_size, len(self.devices))
        hybrid = self.parts < len(self.devices)
        self.axes = Axes(SHARD, REPLICA) if hybrid else FLAT
        self.mesh = (
            placement.data_mesh(self.devices, self.parts)
            if hybrid
            else placement.data_mesh(self.devices)
        )
        self.local_microbatches = self.assignment[placement.of_this_process(self.devices)].reshape(
            -1
        )
        self.by_call = placement.sent_by_call(self.devices)
        self.full = NamedSharding(self.mesh, P())
        self.split = NamedSharding(self.mesh, P(self.axes.all))
        self.split_steps = NamedSharding(self.mesh, P(None, self.axes.all))
        self.reduction, self.reduce_dtype = reduction, reduce_dtype
        self.make, self.shapes = make, placement.state_shapes(make)
        # Of gradients too, if any state is split.
        self.slices: Any = param_dims(self.shapes.params, sharding, self.parts)
        others = split_dims(self.shapes.opt_state, self.parts, self.blocks)
        self.dims = state_dims(self.shapes, self.layout, self.slices, others)
        self.stored, self.pad = padded_shapes(self.shapes, self.dims, self.parts), sharding.pad

    def check(self, tx: Any, params: Any) -> None:
        """Accept any optimizer, as it gets full arrays; exact sums need an elementwise one, or the
        layout matters.
        """
        if self.arithmetic.elementwise and self.layout.opt_state:
            check_elementwise(
                tx, params, 2, self.blocks, self.arithmetic.elementwise, pad=self.pad
            )  # on one too

    def abstract(self, padded: bool = False) -> TrainState:
        return placement.abstract_state(
            self.stored if padded else self.shapes, self.mesh, self.dims, self.axes.shard
        )

    def share(self) -> Share:
        return share(self.shapes, self.dims, self.layout)

    def init(self) -> TrainState:
        stored, live = self.abstract(padded=True), self.arithmetic.live
        return self.adopt(
            placement.make_state(self.make, stored, self.mesh, self.dims, self.axes, live)
        )

    def shard_batch(self, batch: dict[str, np.ndarray], several: bool = False) -> Batch:
        sharding = self.split_steps if several else self.split
        if self.by_call:
            return batch  # type: ignore[return-value]
        if jax.process_count() == 1:
            return jax.device_put(batch, sharding)
        return {k: jax.make_array_from_process_local_data(sharding, x) for k, x in batch.items()}

    def replicate(self, arrays: dict[str, np.ndarray]) -> Batch:
        return {
            k: jax.make_array_from_process_local_data(self.full, x, x.shape)
            for k, x in arrays.items()
        }

    def compile(self, step: Step) -> Program:
        """Return the programs: explicit collectives inside `shard_map` sum the gradients; the rest
        is `jax.jit`.
        """
        full: Any = P()
        grad_dims = step.trainable(self.slices) if self.layout.opt_state else None
        grad_specs = full if grad_dims is None else self._specs(grad_dims)
        plan = ReductionPlan(self.reduction, self.assignment, self.axes)
        evaluation = self._summed(step, step.evaluate, plan, full)
        plan = plan._replace(
            dims=grad_dims, per_microbatch=self.split_grads, dtype=self.reduce_dtype, is_update=True
        )
        grads = self._summed(step, step.grads, plan, grad_specs)
        apply = self.arithmetic.finish(self._apply(step, grad_dims, grad_specs))

        def update(
            seed: jax.Array, state: TrainState, batch: Batch
        ) -> tuple[TrainState, dict[str, jax.Array]]:
            return apply(state, grads(state.view(seed), batch))

        def evaluate(seed: jax.Array, state: TrainState, batch: Batch) -> Sums:
            return evaluation(state.view(seed), batch)

        shardings = jax.tree.map(
            lambda d: NamedSharding(self.mesh, spec(d, self.axes.shard)), self.dims
        )
        shardings = shardings.replace(carry=jax.tree.map(lambda _: self.split, self.shapes.carry))
        everywhere: Any = self.full
        sums = Sums(
            everywhere, everywhere, everywhere, everywhere, everywhere, self.split, everywhere
        )
        return self._program(step, update, (shardings, self.full), evaluate, sums)

    def _program(
        self, step: Step, update: Any, updated: Any, evaluate: Any, evaluated: Any
    ) -> Program:
        """Return the programs of functions (seed, state, batch) and the shardings of their results."""
        seed = self.replicate({"seed": np.array(step.seed)})["seed"]

        def jitted(f):
            return Seeded(jax.jit(f, donate_argnums=1, out_shardings=updated), seed)

        evaluation = Seeded(jax.jit(evaluate, out_shardings=evaluated), seed)
        return Program(jitted(update), evaluation, jitted(placement.one_by_one(update)))

    def _summed(
        self, step: Step, f: Callable[..., Sums], plan: ReductionPlan, grad_specs: Any
    ) -> Any:
        """Return (view, batch) -> sums over all devices of a function of the step on each device's
        microbatches.
        """
        full: Any = P()
        of_microbatches, reduce = self.arithmetic.over_microbatches(f, plan)
        rule = GatherRule(
            self.reduction,
            self.axes,
            self.blocks,
            step.trainable,
            shard_params=self.layout.params,
            shard_grads=plan.per_microbatch and self.arithmetic.in_backward,
            reduce_dtype=self.reduce_dtype,
        )

        def device_sums(view: View, batch: Batch) -> Sums:
            live = self.arithmetic.live(view.step)
            params, gather = make_gather(
                view.params, self.slices, self.shapes.params, rule._replace(live=live)
            )
            numbers, join = (
                replica_microbatches(self.assignment, self.axes),
                joiner(self.assignment, self.axes),
            )
            return reduce(
                of_microbatches(view._replace(params=params), batch, numbers, gather, join)
            )

        over_devices = P(self.axes.all)
        view = View(full, full, self._specs(self.dims.params), full, full, over_devices, full)
        sums = Sums(grad_specs, full, full, full, full, over_devices, full)
        return self._map(device_sums, (view, over_devices), sums)

    def _apply(self, step: Step, grad_dims: Any, grad_specs: Any) -> Any:
        """Return `step.apply` for gradients, optimizer state and updates that may be sharded."""
        full: Any = P()
        shard, total_of = self.axes.shard, self.arithmetic.total
        if grad_dims is None:
            return lambda state, sums: step.apply(state, sums, total_of(None, shard, state.step))
        shapes = step.trainable(self.shapes.params)

        def gather(params):
            return fit_trees(self.reduction.gather(params, grad_dims, shard), shapes)

        joined = self._map(gather, (grad_specs,), full)

        def constrain(tree: Any) -> Any:
            def sharding(d):
                return NamedSharding(self.mesh, spec(d, shard))

            tree = fit_trees(tree, padded_shapes(self.shapes.params, self.slices, self.parts))
            return jax.tree.map(
                lambda x, d: jax.lax.with_sharding_constraint(x, sharding(d)), tree, self.slices
            )

        def apply(state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, jax.Array]]:
            def total(grads: Any) -> jax.Array:
                def local(grads, update):
                    return total_of(grad_dims, shard, update)(grads)

                return self._map(local, (grad_specs, full), full)(grads, number)

            number, before = state.step, state.params
            state, metrics = step.apply(state.replace(params=constrain(before)), sums, total)
            params = constrain(state.params)
            if (
                not self.layout.params
            ):  # they are replicated between updates; frozen ones were not split
                params = merge(joined(step.trainable(params)), before)
            return state.replace(params=params), metrics

        return apply

    def _specs(self, dims: Any) -> Any:
        return jax.tree.map(lambda d: spec(d, self.axes.shard), dims)

    def _map(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(
            f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def averaged(self, state: TrainState) -> TrainState:
        shardings = jax.tree.map(lambda x: x.sharding, state.params)
        ema = resize(placement.like(state.ema, state.params), state.params)
        params = jax.jit(placement.same, out_shardings=shardings)(ema)
        return state.replace(params=params, model_state=averaged_state(state))

    def evaluated(self, state: TrainState) -> TrainState:
        if not (kept := evaluation_arrays(state.opt_state)):
            return state
        return state.replace(params=self._evaluation_params(state.step, state.params, kept))

    @functools.cached_property
    def _evaluation_params(self) -> Callable[..., Any]:
        def compute(step, *arguments):
            return self.arithmetic.rounded(evaluation_params, step)(*arguments)

        shardings = jax.tree.map(
            lambda d: NamedSharding(self.mesh, spec(d, self.axes.shard)), self.dims.params
        )
        return jax.jit(compute, out_shardings=shardings)

    def argument_shapes(self, example: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        count = self.assignment.size
        state = self.abstract(padded=True)

        def shard(x, shape):
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self.split)

        carry = jax.tree.map(lambda x: shard(x, (count, *x.shape[1:])), self.shapes.carry)
        return state.replace(carry=carry), {
            k: shard(x, (count, *x.shape)) for k, x in example.items()
        }

    def export(self, state: TrainState, padded: bool = False) -> TrainState:
        if state.carry is not None:
            state = state.replace(
                carry=placement.gather_carry(self.assignment, state.carry, self.full)
            )
        return state if padded else resize(state, self.abstract())

    def adopt(self, state: TrainState) -> TrainState:
        state = resize(state, self.abstract(padded=True))
        if state.carry is None:
            return state
        return state.replace(
            carry=placement.scatter_carry(self.assignment, state.carry, self.split)
        )


def group_size(shard_size: int | None, devices: int) -> int:
    """Return the number of devices in a sharding group. Raises UsageError if it does not divide all
    devices.
    """
    if shard_size is None:
        return devices
    if not 1 < shard_size <= devices or devices % shard_size:
        divisors = [k for k in range(2, devices + 1) if devices % k == 0]
        raise UsageError(
            f"parallel.shard_size: {shard_size} does not split {devices} devices into equal groups; "
            f"{f'use one of {divisors}' if divisors else 'leave it null'}",
            rank=0,
        )
    return shard_size
