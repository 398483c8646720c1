"""A data-parallel strategy: where the state and a batch are, and the programs of a step over all
devices. Gradients are summed over the devices once, inside `grads` or after it: see `reduction`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from jaxdp.optim.evaluation import evaluation_arrays, evaluation_params
from jaxdp.parallel import placement
from jaxdp.parallel.layout import UNSHARDED, ZERO, Sharding, Share, param_dims, share, state_dims
from jaxdp.parallel.placement import fit_trees, padded_shapes, resize, sharding_of
from jaxdp.parallel.reading import in_blocks
from jaxdp.parallel.reduction import EVERY, LAST, NEVER, Plan, Reduction, order_of
from jaxdp.parallel.sums import GradFunction, arithmetic
from jaxdp.split import FLAT, REPLICA, SHARD, WHOLE, Axes, fit, spec
from jaxdp.train.average import EMA, averaged_state
from jaxdp.train.state import Batch, Sums, TrainState, merge
from jaxdp.train.step import Step

Tree = Any
Update = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


class Program(NamedTuple):
    """The compiled programs of a step; each also has `.lower(state, batch)`.

    update(state, batch) -> (state, metrics), donating the state; evaluate(state, batch) -> Sums over
    all devices. updates: several updates on batches [step, ...], with metrics[step].
    """

    update: Update
    evaluate: Callable[[TrainState, Batch], Sums]
    updates: Update

    def lowered(self, state: TrainState, batch: Batch, several: bool = False) -> Any:
        """Lower `update` for these arguments, or `updates` if several."""
        program: Any = self.updates if several else self.update
        return program.lower(state, batch)


class Strategy:
    """A backend for the loop and the checkpoint, with the layout of a state over devices.

    All arrays are global, over the devices of all processes. A subclass has `check`,
    `on_each_device`, `compiled` and `slice_params`; if its programs take arrays of another shape than the
    exported ones, also `lead`, `specs`, `shard_batch`, `to_programs` and `from_programs`.

    Args:
        make: a `Partial` that returns the initial state.
        microbatches: their number in a batch.
        reduce_dtype: of gradients while they are sent; None: their own.
        devices: None: all.

    Attributes:
        mesh: of the devices; the sharded state is split along its axis `axes.shard`.
        parts: the number of devices that share one copy of what is sharded.
        blocks: paths of parameters that are stacked [block, ...].
        assignment: int32 [device, local], the numbers of the microbatches of each device, -1 for
            none.
        local_microbatches: those of this process's devices, in the order of `shard_batch`.
        shapes: of the exported state; stored: with padding.
        state_dims: the dim along which each leaf of the state is sharded, or WHOLE.
        param_dims: the same for gradients and updates, if any state is sharded.
        every: every pass over microbatches sums its gradients over the devices.
    """

    shares_loss = True  # the loss of an update is that of all devices

    def __init__(
        self,
        make: Partial,
        microbatches: int,
        reduction: Reduction,
        reduce_dtype: Any = None,
        devices: Sequence[jax.Device] | None = None,
        sharding: Sharding = UNSHARDED,
    ):
        self.check_sharding(sharding)
        ordered = placement.ordered_devices(devices)
        self.parts = placement.group_size(sharding.shard_size, len(ordered))
        in_groups = self.parts < len(ordered)
        self.axes = Axes(SHARD, REPLICA) if in_groups else FLAT
        assignment = placement.assign_microbatches(microbatches, len(ordered), reduction.group)
        self.distribute(placement.data_mesh(ordered, self.parts if in_groups else None), assignment)
        self.reduction, self.reduce_dtype = reduction, reduce_dtype
        self.arithmetic = arithmetic(reduction)
        self.layout, self.blocks, self.pad = ZERO[sharding.zero], sharding.blocks, sharding.pad
        self.make, self.shapes = make, placement.state_shapes(make).replace(seed=None)
        self.param_dims: Any = param_dims(self.shapes.params, sharding, self.parts)
        others = self.other_dims(self.shapes.opt_state)
        self.state_dims = state_dims(self.shapes, self.layout, self.param_dims, others)
        self.stored = padded_shapes(self.shapes, self.state_dims, self.parts)
        self.every = self.layout.grads and sharding.gradient_buffer == "sharded"

    def completed(self, state: TrainState) -> TrainState:
        """Return an initial state of ordinary training with what this strategy adds."""
        return state

    def distribute(self, mesh: Mesh, assignment: np.ndarray) -> None:
        """Set the devices, and what each has of a batch."""
        self.mesh, self.devices, self.assignment = mesh, list(mesh.devices.flat), assignment
        self.replicated = NamedSharding(mesh, P())
        self.by_device = NamedSharding(mesh, P(mesh.axis_names))
        own = placement.of_this_process(self.devices)
        self.local_microbatches = assignment[own].reshape(-1)
        # On one CPU device, `device_put` costs 20 us per array more than NumPy arrays as arguments.
        # Elsewhere it runs before the call, and overlaps with the previous one.
        is_cpu = self.devices[0].platform == "cpu"
        self.by_call = len(self.devices) == 1 and jax.process_count() == 1 and is_cpu

    @property
    def lead(self) -> tuple[int, ...]:
        """Return the leading dims of what belongs to all microbatches of all devices."""
        return (self.assignment.size,)

    def check_sharding(self, sharding: Sharding) -> None:
        """Raise UsageError if the strategy does not work with this sharding."""

    def check(self, tx: Any, params: Tree) -> None:
        """Raise UsageError if the optimizer cannot work on this strategy's slices."""
        raise NotImplementedError

    def on_each_device(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Return f as `apply` calls it, to be run on each device; specs: of its arguments and
        results."""
        raise NotImplementedError

    def compiled(self, f: Callable, out_specs: Any, donate: bool = False) -> Any:
        """Return the program of f(state, batch); donate: its first argument."""
        raise NotImplementedError

    def slice_params(self, params: Tree) -> Tree:
        """Return the parameters as the optimizer gets them, inside a program: in slices."""
        raise NotImplementedError

    def other_dims(self, opt_state: Tree) -> Tree:
        """Return the dims of leaves of the optimizer's state that mirror no parameter."""
        return jax.tree.map(lambda _: WHOLE, opt_state)

    # --- Programs --------------------------------------------------------------------

    def compile(self, step: Step) -> Program:
        """Return the step's programs over all devices; each is compiled at its first call.

        update = jit(apply(state, on_each_device(grads)(state, batch)))
        grads      `Step.grads` on the device's microbatches, then the sums over the devices
        apply      `Step.apply` of these sums, on the slices that the optimizer gets
        """
        arguments, summed = (self.specs(), self.by_device.spec), self.sums_specs()
        of_grads = summed
        if self.layout.opt_state:
            of_grads = summed._replace(grads=self._slice_specs(step))
        global_sums = self.device_sums(self.plan(step, is_update=True), step.grads)
        global_sums = self.on_each_device(global_sums, arguments, of_grads)
        evaluate = self.device_sums(self.plan(step, is_update=False), step.evaluate)
        evaluate = self.on_each_device(evaluate, arguments, summed)
        apply = functools.partial(self.arithmetic.update, self.apply_to_slices(step))

        def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
            return apply(state, global_sums(state, batch))

        return self.program(update, evaluate)

    def program(self, update: Callable, evaluate: Callable) -> Program:
        """Compile functions (state, batch) -> (state, metrics), and -> sums."""

        def updates(state: TrainState, batches: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
            return jax.lax.scan(update, state, batches)

        updated = (self.specs(), P())
        return Program(
            self.compiled(update, updated, donate=True),
            self.compiled(evaluate, self.sums_specs()),
            self.compiled(updates, updated, donate=True),
        )

    def specs(self) -> TrainState:
        """Return how programs take the state, split between devices, as PartitionSpecs."""
        specs = jax.tree.map(lambda d: spec(d, self.axes.shard), self.state_dims)
        kept = jax.tree.map(lambda _: self.by_device.spec, self.shapes.kept)
        return specs.replace(kept=kept, seed=P())

    def sums_specs(self) -> Sums:
        """Return how sums over all devices are split, as PartitionSpecs."""
        everywhere: Any = P()
        return Sums(*[everywhere] * len(Sums._fields))._replace(kept=self.by_device.spec)

    def plan(self, step: Step, is_update: bool) -> Plan:
        """Return how a program of the step stores parameters and sums gradients.

        In stages 2 and 3 the backward pass sums them, since no device has room for all full ones,
        unless `gradient_buffer` is replicated. Otherwise it sums those of scanned blocks where that
        hides their way: not in buckets, which pack the gradients of all layers, and not on one
        device.
        """
        overlaps = bool(step.blocks) and self.reduction.overlaps and self.arithmetic.in_backward
        later = is_update and overlaps and len(self.devices) > 1
        if is_update and self.every and self.parts > 1:
            when = EVERY
        else:
            when = LAST if later else NEVER
        return Plan(
            self.reduction,
            self.axes,
            self.assignment,
            self.param_dims,
            self.shapes.params,
            step.trainable,
            params_sharded=self.layout.params,
            update_in_slices=self.layout.opt_state,
            when=when,
            later=later,
            in_blocks=in_blocks(self.shapes.params, step.blocks),
            dtype=self.reduce_dtype,
            is_update=is_update,
        )

    def device_sums(self, plan: Plan, f: GradFunction) -> Callable[..., Sums]:
        """Return (state, batch, numbers) -> the sums of f over all devices, to be called on each.

        numbers: of the microbatches in the batch; None: those of the plan.
        """

        def sums(state: TrainState, batch: Batch, numbers: jax.Array | None = None) -> Sums:
            numbers = plan.numbers() if numbers is None else numbers
            replica = self.arithmetic.replica(plan, numbers, state.step)
            local = self.arithmetic.over_microbatches(f, plan, state, batch, replica)
            return self.arithmetic.over_devices(plan, local)

        return sums

    def apply_to_slices(self, step: Step) -> Callable[..., Any]:
        """Return `step.apply` for sums over all devices; where the optimizer's state is sharded, on
        slices of gradients and parameters."""
        shard, everywhere = self.axes.shard, P()
        is_sliced, are_gathered = self.layout.opt_state, not self.layout.params
        dims = step.trainable(self.param_dims) if is_sliced else None
        shapes, specs = step.trainable(self.shapes.params), self._slice_specs(step)

        def total(grads: Tree, number: jax.Array) -> jax.Array:
            return self.arithmetic.total(grads, dims, shard, number)

        def gather(params: Tree) -> Tree:
            return fit_trees(self.reduction.gather(params, dims, shard), shapes)

        if is_sliced:
            total = self.on_each_device(total, (specs, everywhere), everywhere)
            gather = self.on_each_device(gather, (specs,), everywhere)

        def apply(state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, jax.Array]]:
            number, before = state.step, state.params
            params = self.slice_params(before) if is_sliced else before

            new, metrics = step.apply(
                state.replace(params=params), sums, lambda grads: total(grads, number)
            )
            if is_sliced and are_gathered:  # frozen ones are as before
                new = new.replace(params=merge(gather(step.trainable(new.params)), before))
            return new, metrics

        return apply

    def _slice_specs(self, step: Step) -> Tree:
        return jax.tree.map(lambda d: spec(d, self.axes.shard), step.trainable(self.param_dims))

    # --- Arrays -------------------------------------------------------------------------

    def shard_batch(self, batch: dict[str, np.ndarray], several: bool = False) -> Batch:
        """Place this process's microbatches [local, example, ...] on their devices.

        several: the microbatches of several updates [step, local, ...], for `Program.updates`.
        """
        if self.by_call:
            return batch  # type: ignore[return-value]
        over_steps = NamedSharding(self.mesh, P(None, *self.by_device.spec))
        sharding = over_steps if several else self.by_device
        return jax.make_array_from_process_local_data(sharding, batch)

    def replicate(self, arrays: Tree) -> Tree:
        """Copy arrays to each device; batches from `shard_batch` index into them."""
        return jax.make_array_from_process_local_data(self.replicated, arrays)

    def argument_shapes(self, example: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        """Return the shapes of a program's arguments for microbatches like `example` {name:
        [example, ...]}."""

        def of_all(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*self.lead, *shape), dtype, sharding=self.by_device)

        kept = jax.tree.map(lambda x: of_all(x.shape[1:], x.dtype), self.shapes.kept)
        seed = jax.ShapeDtypeStruct((), np.uint32, sharding=self.replicated)
        state = self.to_programs(self.abstract(padded=True).replace(kept={}))
        batch = {name: of_all(x.shape, x.dtype) for name, x in example.items()}
        return state.replace(kept=kept, seed=seed), batch

    def abstract(self, padded: bool = False) -> TrainState:
        """Return shapes, dtypes and shardings of the exported state: as in a checkpoint, or with
        the padding."""

        def place(x: jax.ShapeDtypeStruct, dim: int) -> jax.ShapeDtypeStruct:
            sharding = sharding_of(x.shape, self.mesh, dim, self.axes.shard)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(place, self.stored if padded else self.shapes, self.state_dims)

    @functools.cached_property
    def seed(self) -> np.ndarray:
        """Return the seed of the initial state, which an exported state does not have."""
        return np.asarray(jax.jit(placement.seed_of)(self.make))

    def init(self) -> TrainState:
        """Compute the state before the first update in place: sharded leaves are never full on a
        device."""
        stored = self.abstract(padded=True)

        # `make` is an argument, with its own, so that runs with other seeds share the program.
        def full(make: Partial) -> TrainState:
            def exported() -> TrainState:
                return make().replace(seed=None)

            return fit_trees(self.arithmetic.make_state(exported, self.mesh), stored)

        state = jax.jit(full, out_shardings=jax.tree.map(lambda x: x.sharding, stored))(self.make)
        if jax.process_count() > 1:
            state = placement.from_first(state, self.mesh, self.state_dims, self.axes)
        return self.adopt(state)

    def export(self, state: TrainState, padded: bool = False) -> TrainState:
        """Return global arrays in logical shapes, the same for every strategy, without the seed.

        padded: keep the padding of leaves that have some (`jaxdp.parallel.placement`); then no data
        moves."""

        def in_order(x: jax.Array) -> jax.Array:
            return x.reshape(-1, *x.shape[len(self.lead) :])[order_of(self.assignment)]

        kept = self._reordered(in_order, state.kept, self.replicated)
        exported = self.from_programs(state.replace(kept={}, seed=None)).replace(kept=kept)
        return exported if padded else resize(exported, self.abstract())

    def adopt(self, state: TrainState) -> TrainState:
        """Return the state as this strategy stores it: the inverse of `export`, from logical
        shapes."""

        def by_device(x: jax.Array) -> jax.Array:
            # A place without a microbatch repeats the first.
            return x[np.maximum(self.assignment, 0).reshape(self.lead)]

        state = resize(state.replace(seed=None), self.abstract(padded=True))
        kept = self._reordered(by_device, state.kept, self.by_device)
        state = self.to_programs(state.replace(kept={}))
        return state.replace(kept=kept, seed=self.replicate(self.seed))

    def _reordered(self, order: Callable, tree: Tree, sharding: NamedSharding) -> Tree:
        if not tree:
            return tree
        return jax.jit(lambda tree: jax.tree.map(order, tree), out_shardings=sharding)(tree)

    def to_programs(self, state: TrainState) -> TrainState:
        """Convert an exported state (or shapes), with padding, to what programs take."""
        return state

    def from_programs(self, state: TrainState) -> TrainState:
        """Invert `to_programs`."""
        return state

    # --- Evaluation ---------------------------------------------------------------------

    def averaged(self, state: TrainState) -> TrainState:
        """Return the state with its average as its parameters, and the model state that belongs to
        it, for evaluation."""
        exported = self.export(state.replace(kept={}), padded=True)
        params = self._averaged_params(exported.extra[EMA])
        return state.replace(params=params, model_state=averaged_state(state))

    def evaluated(self, state: TrainState) -> TrainState:
        """Return the state with the parameters to evaluate, if the optimizer has others
        (`jaxdp.optim.evaluation`)."""
        exported = self.export(state.replace(kept={}), padded=True)
        if not (arrays := evaluation_arrays(exported.opt_state)):
            return state
        params = self._evaluated_params(exported.step, exported.params, arrays)
        return state.replace(params=params)

    @functools.cached_property
    def _averaged_params(self) -> Callable[..., Tree]:
        def to_params(average: Tree) -> Tree:
            def convert(x: jax.Array, like: Any) -> jax.Array:
                return fit(x.astype(like.dtype), like.shape)

            return jax.tree.map(convert, average, self.stored.params)

        return jax.jit(to_params, out_shardings=self._param_shardings())

    @functools.cached_property
    def _evaluated_params(self) -> Callable[..., Tree]:
        def compute(step: jax.Array, *arguments: Any) -> Tree:
            return self.arithmetic.rounded(evaluation_params, step)(*arguments)

        return jax.jit(compute, out_shardings=self._param_shardings())

    def _param_shardings(self) -> Tree:
        return jax.tree.map(lambda x: x.sharding, self.abstract(padded=True).params)

    def share(self) -> Share:
        """Return the share of the state that is sharded."""
        return share(self.shapes, self.state_dims, self.layout)
