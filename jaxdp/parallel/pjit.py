"""One `jax.jit` over a mesh of all devices: state in a ZeRO layout, with the reductions written out in `shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.axes import FLAT, REPLICA, SHARD, Axes
from jaxdp.errors import UsageError
from jaxdp.optim import check_elementwise
from jaxdp.parallel.base import (
    Program,
    TwoParts,
    abstract_state,
    applier,
    collect,
    data_mesh,
    deal,
    like,
    make_state,
    of_this_process,
    one_by_one,
    ordered_devices,
    over_slots,
    reducer,
    same,
    sent_by_call,
    slot_table,
    totaller,
)
from jaxdp.parallel.exact import check_devices, largest, pieces_of
from jaxdp.parallel.layout import ZERO, Share, make_gather, share, state_dims
from jaxdp.parallel.reduction import Reduction
from jaxdp.parallel.rounding import running
from jaxdp.split import spec
from jaxdp.step import Batch, Step, Sums, Total, TrainState, View, merge


class PJit:
    """State laid out over a mesh (NamedSharding), batches split along all its axes.

    zero: the stage. shard_size: the devices that share one copy of the split state; None means all. accumulator:
    'split' sums the gradients of stages 2 and 3 over the devices slot by slot, 'whole' once after all slots. blocks:
    paths of the parameters that are stacked [block, ...]. split_as: leaves are split as this many parts would be, a
    multiple of ours; to plan for more devices than there are.
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
        self.devices = ordered_devices(devices)
        self.layout, self.blocks = ZERO[zero], blocks
        self.split_grads = self.layout.grads and accumulator == "split"
        self.most = largest(microbatches) if reduction.exact else 1
        if reduction.exact:
            check_devices(microbatches, len(self.devices), self.split_grads)
        self.table = slot_table(microbatches, len(self.devices), reduction.exact and self.split_grads)
        self.parts = group_size(shard_size, len(self.devices))
        hybrid = self.parts < len(self.devices)
        self.axes = Axes(SHARD, REPLICA) if hybrid else FLAT
        self.mesh = data_mesh(self.devices, self.parts) if hybrid else data_mesh(self.devices)
        self.local_slots = self.table[of_this_process(self.devices)].reshape(-1)
        self.by_call = sent_by_call(self.devices)
        self.whole = NamedSharding(self.mesh, P())
        self.split = NamedSharding(self.mesh, P(self.axes.all))
        self.split_steps = NamedSharding(self.mesh, P(None, self.axes.all))
        self.reduction, self.reduce_dtype = reduction, reduce_dtype
        self.make, self.shapes = make, jax.eval_shape(make)
        self.dims = state_dims(self.shapes, self.layout, split_as or self.parts, blocks, self.most)
        whole_split = state_dims(self.shapes, ZERO[3], split_as or self.parts, blocks, self.most)
        self.slices: Any = whole_split.params  # the dims of gradients and updates, where any state is split

    def check(self, tx: Any, params: Any) -> None:
        """Any optimizer works: it sees whole arrays. But one that looks beyond an element rounds by how they lie."""
        if self.reduction.exact and self.layout.opt_state and self.most > 1:
            advice = (
                "with reduction: exact, ZeRO needs an elementwise one, such as sgd, adam, adamw or lion, or zero: 0"
            )
            check_elementwise(tx, params, 2, self.blocks, advice)  # what any number of devices splits

    def abstract(self) -> TrainState:
        return abstract_state(self.shapes, self.mesh, self.dims, self.axes.shard)

    def share(self) -> Share:
        return share(self.shapes, self.dims, self.layout)

    def init(self) -> TrainState:
        return self.adopt(make_state(self.make, self.abstract(), self.mesh, self.dims, self.axes))

    def put(self, batch: dict[str, np.ndarray], several: bool = False) -> Batch:
        place = self.split_steps if several else self.split
        if self.by_call:
            return batch  # type: ignore[return-value]
        if jax.process_count() == 1:
            return jax.device_put(batch, place)
        return {k: jax.make_array_from_process_local_data(place, x) for k, x in batch.items()}

    def hold(self, arrays: dict[str, np.ndarray]) -> Batch:
        return {k: jax.make_array_from_process_local_data(self.whole, x, x.shape) for k, x in arrays.items()}

    def lower(self, step: Step) -> Program:
        whole: Any = P()
        dims, shard = self.dims, self.axes.shard
        split_dims = self.slices
        grad_dims = step.trainable(split_dims) if self.layout.opt_state else None
        specs = lambda dims: jax.tree.map(lambda d: spec(d, shard), dims)
        grad_specs = whole if grad_dims is None else specs(grad_dims)
        over_devices = P(self.axes.all)
        view = View(whole, specs(dims.params), whole, whole, over_devices)
        map_over = lambda f, i, o: jax.shard_map(f, mesh=self.mesh, in_specs=i, out_specs=o, check_vma=False)
        exact = self.reduction.exact

        def replica(f: Callable[..., Sums], split_grads: bool, reduce: Callable[[Sums], Sums], grads: Any) -> Any:
            """One of the step's functions on each device's share, and the sums of all."""
            share = over_slots(f, reduce, self.table, self.axes, exact, self.split_grads)

            def run(view: View, batch: Batch) -> Sums:
                params, gather = make_gather(
                    view.params,
                    split_dims,
                    split_params=self.layout.params,
                    split_grads=split_grads,
                    reduction=self.reduction,
                    axes=self.axes,
                    blocks=self.blocks,
                    trainable=step.trainable,
                    reduce_dtype=self.reduce_dtype,
                    live=running(view.step) if exact else None,
                )
                return share(view._replace(params=params), batch, gather)

            mapped = map_over(run, (view, over_devices), Sums(grads, whole, whole, whole, whole, over_devices))

            def share_of(state: TrainState, batch: Batch) -> Sums:
                return mapped(state.view, batch)

            share_of.__name__ = f.__name__
            return share_of

        reduce = reducer(self.reduction, self.axes, self.reduce_dtype, grad_dims, self.split_grads)
        grads = replica(step.grads, self.split_grads, reduce, grad_specs)
        evaluate = replica(step.evaluate, False, reducer(self.reduction, self.axes), whole)
        place = lambda tree, dims: jax.tree.map(
            lambda x, d: jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec(d, shard))), tree, dims
        )
        joined = map_over(lambda params: self.reduction.gather(params, grad_dims, shard), (grad_specs,), whole)

        measured_in = pieces_of(step.trainable(self.shapes.params), self.blocks, self.most) if exact else None

        def total_of(update: jax.Array) -> Total:
            """`total` in update number `update`."""
            if grad_dims is None:
                return totaller(None, shard, measured_in, update)

            def total(measure: Callable[[Any], jax.Array], tree: Any) -> jax.Array:
                local = lambda tree, update: totaller(grad_dims, shard, measured_in, update)(measure, tree)
                return map_over(local, (grad_specs, whole), whole)(tree, update)

            return total

        def apply(state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, jax.Array]]:
            total = total_of(state.step)
            if grad_dims is None:
                return step.apply(state, sums, total)
            before = state.params
            state, metrics = step.apply(state.replace(params=place(before, split_dims)), sums, total)
            params = place(state.params, split_dims)
            if not self.layout.params:  # they were whole: what was frozen still is
                params = merge(joined(step.trainable(params)), before)
            return state.replace(params=params), metrics

        shardings = jax.tree.map(lambda d: NamedSharding(self.mesh, spec(d, shard)), dims)
        shardings = shardings.replace(carry=jax.tree.map(lambda _: self.split, self.shapes.carry))
        everywhere: Any = self.whole
        evaluated = Sums(everywhere, everywhere, everywhere, everywhere, everywhere, self.split)
        evaluation = jax.jit(evaluate, out_shardings=evaluated)
        results = (shardings, self.whole)

        def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
            return apply(state, grads(state, batch))

        if not exact:
            compiled = lambda f: jax.jit(f, donate_argnums=0, out_shardings=results)
            return Program(compiled(update), evaluation, compiled(one_by_one(update)))

        def between(lowered: Any) -> Sums:
            sums = lowered.out_info
            placed = lambda tree, place: jax.tree.map(
                lambda x, p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, p)), tree, place
            )
            all_whole = lambda tree: jax.tree.map(lambda _: whole, tree)
            places = all_whole(sums) if grad_dims is None else all_whole(sums)._replace(grads=grad_specs)
            return placed(sums, places._replace(carry=jax.tree.map(lambda _: over_devices, sums.carry)))

        parts = (jax.jit(grads), jax.jit(applier(apply, exact), donate_argnums=0, out_shardings=results))
        return Program(TwoParts(*parts, between), evaluation)

    def averaged(self, state: TrainState) -> TrainState:
        shardings = jax.tree.map(lambda x: x.sharding, state.params)
        return state.replace(params=jax.jit(same, out_shardings=shardings)(like(state.ema, state.params)))

    def arguments(self, example: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        slots = self.table.size
        state = self.abstract()
        place = lambda x, shape: jax.ShapeDtypeStruct(shape, x.dtype, sharding=self.split)
        carry = jax.tree.map(lambda x: place(x, (slots, *x.shape[1:])), self.shapes.carry)
        return state.replace(carry=carry), {k: place(x, (slots, *x.shape)) for k, x in example.items()}

    def export(self, state: TrainState) -> TrainState:
        return state if state.carry is None else state.replace(carry=collect(self.table, state.carry, self.whole))

    def adopt(self, state: TrainState) -> TrainState:
        return state if state.carry is None else state.replace(carry=deal(self.table, state.carry, self.split))


def group_size(shard_size: int | None, devices: int) -> int:
    """The devices of one sharding group. Raises UsageError where groups of this size do not make up all."""
    if shard_size is None:
        return devices
    if not 1 < shard_size <= devices or devices % shard_size:
        fits = [k for k in range(2, devices + 1) if devices % k == 0]
        raise UsageError(
            f"parallel.shard_size: {shard_size} does not split {devices} devices into equal groups; "
            f"{f'use one of {fits}' if fits else 'leave it null'}",
            rank=0,
        )
    return shard_size
