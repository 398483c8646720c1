"""A data-parallel strategy: where the state and a batch are, and the one sum between `grads` and
`apply`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import Partial

from jaxdp.axes import Axes
from jaxdp.optim.evaluation import evaluation_params
from jaxdp.parallel import placement
from jaxdp.parallel.layout import ZERO, Sharding, Share, param_dims, share, state_dims
from jaxdp.parallel.padding import padded_shapes
from jaxdp.parallel.reading import in_blocks
from jaxdp.parallel.reduction import Reduction
from jaxdp.parallel.sum_plan import EVERY, LAST, NEVER, Plan
from jaxdp.parallel.sums import arithmetic
from jaxdp.split import WHOLE
from jaxdp.train.state import Batch, Sums, TrainState
from jaxdp.train.step import Step

Update = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


class Program(NamedTuple):
    """The compiled programs of a step; each also has `.lower(state, batch)`.

    update(state, batch) -> (state, metrics), donating the state; evaluate(state, batch) -> Sums over
    all devices. updates: several updates on batches [step, ...], with metrics[step].
    """

    update: Update
    evaluate: Callable[[TrainState, Batch], Sums]
    updates: Update

    def lowered(self, state: TrainState, batch: Batch, several: bool = False) -> dict[str, Any]:
        """Lower `update` for these arguments, or `updates` if several."""
        name = "updates" if several else "update"
        return {name: getattr(self, name).lower(state, batch)}


class Strategy:
    """A backend for the loop and the checkpoint, with the layout of a state over devices.

    A subclass has `check`, `shard_batch`, `replicate`, `compile`, `averaged`, `evaluated`,
    `argument_shapes`, `export` and `adopt`.

    Args:
        make: a `Partial` that returns the initial state.
        microbatches: their number in a batch.
        reduce_dtype: of gradients while they are sent.
        axes: of the mesh, along whose `axes.shard` the sharded state is split.
        others: returns the dims of leaves of the optimizer's state that mirror no parameter.

    Attributes:
        parts: the number of devices that share one copy of what is sharded.
        blocks: paths of parameters that are stacked [block, ...].
        assignment: int32 [device, local], the numbers of the microbatches of each device, -1 for
            none.
        local_microbatches: those of this process's devices, in the order of `shard_batch`.
        shapes: of the exported state; stored: with padding.
        dims: the dim along which each leaf of the state is sharded, or WHOLE.
        slices: the same for gradients and updates, if any state is sharded.
    """

    def __init__(
        self,
        make: Partial,
        microbatches: int,
        reduction: Reduction,
        reduce_dtype: Any,
        devices: Sequence[jax.Device],
        sharding: Sharding,
        axes: Axes,
        mesh: Mesh,
        others: Callable[[Any], Any],
    ):
        self.devices, self.axes, self.mesh = list(devices), axes, mesh
        self.parts = mesh.shape[axes.shard]
        self.reduction, self.reduce_dtype = reduction, reduce_dtype
        self.arithmetic = arithmetic(reduction)
        self.layout, self.blocks, self.pad = ZERO[sharding.zero], sharding.blocks, sharding.pad
        self.assignment = placement.assign_microbatches(
            microbatches, len(self.devices), reduction.group
        )
        own = placement.of_this_process(self.devices)
        self.local_microbatches = self.assignment[own].reshape(-1)
        self.by_call = placement.sent_by_call(self.devices)
        self.make, self.shapes = make, placement.state_shapes(make).replace(seed=None)
        self.slices: Any = param_dims(self.shapes.params, sharding, self.parts)
        self.dims = state_dims(self.shapes, self.layout, self.slices, others(self.shapes.opt_state))
        self.stored = padded_shapes(self.shapes, self.dims, self.parts)
        self.every = self.layout.grads and sharding.gradient_buffer == "sharded"

    def check(self, tx: Any, params: Any) -> None:
        """Raise UsageError if the optimizer cannot work on this strategy's slices."""
        raise NotImplementedError

    def shard_batch(self, batch: dict[str, np.ndarray], several: bool = False) -> Batch:
        """Place this process's microbatches [local, example, ...] on their devices.

        several: the microbatches of several updates [step, local, ...], for `Program.updates`.
        """
        raise NotImplementedError

    def replicate(self, arrays: dict[str, np.ndarray]) -> Batch:
        """Copy arrays to each device of this process; batches from `shard_batch` index into them."""
        raise NotImplementedError

    def compile(self, step: Step) -> Program:
        """Return the step's programs over all devices; each is compiled at its first call."""
        raise NotImplementedError

    def averaged(self, state: TrainState) -> TrainState:
        """Return the state with its average as its parameters, and the model state that belongs to
        it, for evaluation."""
        raise NotImplementedError

    def evaluated(self, state: TrainState) -> TrainState:
        """Return the state with the parameters to evaluate, if the optimizer has others
        (`jaxdp.optim.evaluation`)."""
        raise NotImplementedError

    def argument_shapes(self, example: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        """Return the shapes of a program's arguments for microbatches like `example` {name:
        [example, ...]}."""
        raise NotImplementedError

    def export(self, state: TrainState, padded: bool = False) -> TrainState:
        """Return global arrays in logical shapes, the same for every strategy, without the seed.

        padded: keep the padding of leaves that have some (`jaxdp.parallel.padding`); then no data
        moves."""
        raise NotImplementedError

    def adopt(self, state: TrainState) -> TrainState:
        """Return the state as this strategy stores it: the inverse of `export`, from logical
        shapes."""
        raise NotImplementedError

    @functools.cached_property
    def seed(self) -> np.ndarray:
        """Return the seed of the initial state, which an exported state does not have."""
        return np.asarray(jax.jit(placement.seed_of)(self.make))

    def abstract(self, padded: bool = False) -> TrainState:
        """Return shapes, dtypes and shardings of the exported state: as in a checkpoint, or with
        the padding."""
        shapes = self.stored if padded else self.shapes
        return placement.abstract_state(shapes, self.mesh, self.dims, self.axes.shard)

    def share(self) -> Share:
        """Return the share of the state that is sharded."""
        return share(self.shapes, self.dims, self.layout)

    def init(self) -> TrainState:
        """Compute the state before the first update in place: sharded leaves are never full on a
        device."""
        stored = self.abstract(padded=True)
        make = placement.make_state
        return self.adopt(make(self.make, stored, self.mesh, self.dims, self.axes, self.arithmetic))

    def plan(self, step: Step, is_update: bool) -> Plan:
        """Return how a program of the step stores parameters and sums gradients.

        Gradients of blocks are summed in the backward pass where that hides their way: not in
        buckets, which pack the gradients of all layers, and not on one device.
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
            self.slices,
            self.shapes.params,
            step.trainable,
            sharded=self.layout.params,
            sliced=self.layout.opt_state,
            when=when,
            later=later,
            in_blocks=in_blocks(self.shapes.params, step.blocks),
            dtype=self.reduce_dtype,
            is_update=is_update,
        )

    def device_sums(self, step: Step, is_update: bool) -> Callable[[TrainState, Batch], Sums]:
        """Return (state, batch) -> sums over all devices, to be called on each device."""
        plan, f = self.plan(step, is_update), step.grads if is_update else step.evaluate

        def sums(state: TrainState, batch: Batch) -> Sums:
            replica = self.arithmetic.replica(plan, plan.numbers(), state.step)
            local = self.arithmetic.over_microbatches(f, plan, state, batch, replica)
            return self.arithmetic.over_devices(plan, local)

        return sums

    def total_of(self, state: TrainState, dims: Any) -> Callable[[Any], jax.Array]:
        """Return the argument `total` of `Step.apply`, to be called on each device if gradients are
        slices along dims."""
        total, axis = self.arithmetic.total, self.axes.shard
        return lambda grads: total(grads, dims, axis, state.step)

    def evaluated_params(self, out_shardings: Any) -> Callable[..., Any]:
        """Return (step, params, arrays) -> the parameters to evaluate."""

        def compute(step: jax.Array, *arguments: Any) -> Any:
            return self.arithmetic.rounded(evaluation_params, step)(*arguments)

        return jax.jit(compute, out_shardings=out_shardings)


def replicated(tree: Any) -> Any:
    """Return the dims of a tree of which nothing is sharded."""
    return jax.tree.map(lambda _: WHOLE, tree)
