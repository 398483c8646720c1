"""The `pjit` strategy: one `jax.jit` over a mesh of all devices, a ZeRO layout, explicit reductions
in `shard_map`."""

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
from jaxdp.optim.evaluation import evaluation_arrays
from jaxdp.parallel import placement
from jaxdp.parallel.layout import UNSHARDED, Sharding
from jaxdp.parallel.padding import fit_trees, padded_shapes, resize
from jaxdp.parallel.reduction import Reduction
from jaxdp.parallel.strategy import Program, Strategy
from jaxdp.split import spec, split_dims
from jaxdp.train.average import EMA, averaged_state
from jaxdp.train.state import Batch, Sums, TrainState, merge
from jaxdp.train.step import Step


class PJit(Strategy):
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
        devices = placement.ordered_devices(devices)
        parts = group_size(sharding.shard_size, len(devices))
        hybrid = parts < len(devices)
        axes = Axes(SHARD, REPLICA) if hybrid else FLAT
        mesh = placement.data_mesh(devices, parts if hybrid else None)

        def others(opt_state: Any) -> Any:
            return split_dims(opt_state, parts, sharding.blocks)

        super().__init__(
            make, microbatches, reduction, reduce_dtype, devices, sharding, axes, mesh, others
        )
        self.full = NamedSharding(self.mesh, P())
        self.split = NamedSharding(self.mesh, P(self.axes.all))
        self.split_steps = NamedSharding(self.mesh, P(None, self.axes.all))

    def check(self, tx: Any, params: Any) -> None:
        """Accept any optimizer, as it gets full arrays; exact sums need an elementwise one, or the
        layout matters."""
        if (advice := self.arithmetic.advice) and self.layout.opt_state:
            check_elementwise(tx, params, 2, self.blocks, advice, pad=self.pad)  # on one too

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
        is `jax.jit`."""
        grads = self._on_each_device(step, is_update=True)
        evaluation = self._on_each_device(step, is_update=False)
        # `grads` runs on each device, in a `shard_map`; the update on global arrays, outside of it.
        apply = functools.partial(self.arithmetic.update, self._apply(step))

        def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
            return apply(state, grads(state, batch))

        def evaluate(state: TrainState, batch: Batch) -> Sums:
            return evaluation(state, batch)

        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs())
        return self._program(update, (shardings, self.full), evaluate)

    def _program(self, update: Callable, updated: Any, evaluate: Callable) -> Program:
        """Return the programs of functions (state, batch); updated: the shardings of the results."""

        def jitted(f: Callable) -> Any:
            return jax.jit(f, donate_argnums=0, out_shardings=updated)

        return Program(jitted(update), jax.jit(evaluate), jitted(placement.one_by_one(update)))

    def specs(self) -> TrainState:
        """Return how the state is split between devices, as PartitionSpecs."""
        specs = jax.tree.map(lambda d: spec(d, self.axes.shard), self.dims)
        kept = jax.tree.map(lambda _: P(self.axes.all), self.shapes.kept)
        return specs.replace(kept=kept, seed=P())

    def _on_each_device(self, step: Step, is_update: bool) -> Callable[..., Sums]:
        """Return (state, batch) -> sums over all devices."""
        everywhere: Any = P()
        over_devices: Any = P(self.axes.all)
        sums = Sums(*[everywhere] * len(Sums._fields))._replace(kept=over_devices)
        if is_update and self.layout.opt_state:
            sums = sums._replace(grads=self._grad_specs(step))
        return self._map(self.device_sums(step, is_update), (self.specs(), over_devices), sums)

    def _apply(self, step: Step) -> Any:
        """Return `step.apply` for gradients, optimizer state and updates that may be sharded."""
        full: Any = P()
        if not self.layout.opt_state:

            def apply_full(state: TrainState, sums: Sums) -> Any:
                return step.apply(state, sums, self.total_of(state, None))

            return apply_full
        dims, specs = step.trainable(self.slices), self._grad_specs(step)
        shapes, shard = step.trainable(self.shapes.params), self.axes.shard

        def gather(params: Any) -> Any:
            return fit_trees(self.reduction.gather(params, dims, shard), shapes)

        def local_total(grads: Any, number: jax.Array) -> jax.Array:
            return self.arithmetic.total(grads, dims, shard, number)

        joined, total_of = (
            self._map(gather, (specs,), full),
            self._map(local_total, (specs, full), full),
        )
        padded = padded_shapes(self.shapes.params, self.slices, self.parts)

        def constrain(tree: Any) -> Any:
            def shard_leaf(x: jax.Array, dim: int) -> jax.Array:
                return jax.lax.with_sharding_constraint(
                    x, NamedSharding(self.mesh, spec(dim, shard))
                )

            return jax.tree.map(shard_leaf, fit_trees(tree, padded), self.slices)

        def apply(state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, jax.Array]]:
            number, before = state.step, state.params

            def total(grads: Any) -> jax.Array:
                return total_of(grads, number)

            state, metrics = step.apply(state.replace(params=constrain(before)), sums, total)
            params = constrain(state.params)
            if not self.layout.params:  # replicated between updates; frozen ones were not split
                params = merge(joined(step.trainable(params)), before)
            return state.replace(params=params), metrics

        return apply

    def _grad_specs(self, step: Step) -> Any:
        return jax.tree.map(lambda d: spec(d, self.axes.shard), step.trainable(self.slices))

    def _map(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(
            f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def averaged(self, state: TrainState) -> TrainState:
        shardings = jax.tree.map(lambda x: x.sharding, state.params)
        ema = resize(placement.like(state.extra[EMA], state.params), state.params)
        params = jax.jit(placement.same, out_shardings=shardings)(ema)
        return state.replace(params=params, model_state=averaged_state(state))

    def evaluated(self, state: TrainState) -> TrainState:
        if not (arrays := evaluation_arrays(state.opt_state)):
            return state
        return state.replace(params=self._evaluated(state.step, state.params, arrays))

    @functools.cached_property
    def _evaluated(self) -> Callable[..., Any]:
        return self.evaluated_params(
            jax.tree.map(
                lambda d: NamedSharding(self.mesh, spec(d, self.axes.shard)), self.dims.params
            )
        )

    def argument_shapes(self, example: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        count = self.assignment.size

        def over_devices(x: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self.split)

        kept = jax.tree.map(lambda x: over_devices(x, (count, *x.shape[1:])), self.shapes.kept)
        seed = jax.ShapeDtypeStruct((), np.uint32, sharding=self.full)
        state = self.abstract(padded=True).replace(kept=kept, seed=seed)
        return state, {k: over_devices(x, (count, *x.shape)) for k, x in example.items()}

    def export(self, state: TrainState, padded: bool = False) -> TrainState:
        kept = placement.gather_kept(self.assignment, state.kept, self.full)
        state = state.replace(kept=kept, seed=None)
        return state if padded else resize(state, self.abstract())

    def adopt(self, state: TrainState) -> TrainState:
        state = resize(state.replace(seed=None), self.abstract(padded=True))
        seed: Any = self.replicate({"seed": self.seed})["seed"]
        kept = placement.scatter_kept(self.assignment, state.kept, self.split)
        return state.replace(kept=kept, seed=seed)


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
