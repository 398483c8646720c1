"""Local updates: logical replicas train alone for `every` updates; then an outer optimizer moves
what they share.

    inner    each replica updates its own parameters, with its own microbatches and its own optimizer state
    outer    gradient = shared parameters - mean of the replicas' parameters; then all replicas start from the result

This is DiLoCo (Douillard et al., arXiv 2311.08105), after local SGD and federated averaging. The
replicas are logical: the config decides how many there are, so one device computes what many sites
would. A device has several replicas, or several devices share one. Nothing is sent between replicas
but the differences, every `every` updates."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from jaxdp.axes import DATA, FLAT, Axes
from jaxdp.errors import UsageError
from jaxdp.exact.rounding import opaque_true, scan_unfused
from jaxdp.optim.master import Master, master_copy
from jaxdp.parallel.layout import ZERO
from jaxdp.parallel.pjit import PJit
from jaxdp.parallel.placement import (
    assign_microbatches,
    ordered_devices,
    state_shapes,
)
from jaxdp.parallel.reading import in_blocks
from jaxdp.parallel.reduction import Plan, Reduction
from jaxdp.parallel.strategy import Program
from jaxdp.parallel.sums import arithmetic
from jaxdp.split import WHOLE
from jaxdp.train.average import EMA, EMA_STATE, average, average_statistics
from jaxdp.train.model_state import floats, mean_state, weighted_state
from jaxdp.train.state import Batch, Sums, TrainState, merge, microbatch_key, select
from jaxdp.train.step import Step

Tree = Any
OUTER = "outer"  # the axis of the logical replicas; inside one of them, DATA
ALL = Axes(shard=DATA, replica=OUTER)
OUTER_KEY = 1 << 20  # differs from what the keys of microbatches are folded with


class OuterRule(NamedTuple):
    """replicas: their number. every: updates between two outer steps. tx: the outer optimizer.
    reduction: of the differences between the replicas.

    trainable: see `Step`. blocks: paths of the parameters that are stacked [block, ...]. ema_decay:
    of the average of the shared parameters, per update; an outer step moves it as far as `every`
    updates."""

    replicas: int
    every: int
    tx: optax.GradientTransformation
    reduction: Reduction
    trainable: Callable[[Tree], Tree]
    blocks: tuple[str, ...] = ()
    ema_decay: float | None = None


class Local(NamedTuple):
    """In the place of a state's optimizer state. replicas: their states, stacked [replica, ...];
    outer: of `tx`.
    """

    replicas: TrainState
    outer: Tree


class Replicas(PJit):
    """State of the replicas split over the axis `outer`; each replica's microbatches over the axis
    `data`.

    State and batches are placed as by `PJit`, whose arguments the others are. hosts: the host of
    each process, so that replicas are split between hosts first. Raises UsageError if neither the
    replicas can be split over the devices nor the devices over the replicas, or if the model
    carries state from batch to batch."""

    shares_loss = False  # each process sees that of its own replica

    def __init__(
        self,
        make: Partial,
        microbatches: int,
        reduction: Reduction,
        rule: OuterRule,
        reduce_dtype: Any = None,
        devices: Sequence[jax.Device] | None = None,
        hosts: Sequence[str] = (),
    ):
        ordered = ordered_devices(devices, hosts)
        self.parts, self.per_device = split_replicas(rule.replicas, len(ordered))
        self.sharing = len(ordered) // self.parts  # devices that share one replica
        self.own = microbatches // rule.replicas  # microbatches of a replica
        self.of_replica = assign_microbatches(self.own, self.sharing, reduction.group)
        mesh = Mesh(
            np.array(ordered).reshape(self.parts, -1),
            (OUTER, DATA),
            axis_types=(AxisType.Auto,) * 2,
        )
        self.distribute(mesh, assign_replicas(self.of_replica, rule.replicas, self.parts))
        self.axes = Axes(shard=OUTER, replica=DATA)
        self.rule, self.reduction, self.reduce_dtype = rule, reduction, reduce_dtype
        self.arithmetic, self.blocks, self.layout = arithmetic(reduction), rule.blocks, ZERO[0]
        self.make = Partial(lambda make: with_replicas(make(), rule), make)
        shapes = jax.eval_shape(lambda state: with_replicas(state, rule), state_shapes(make))
        self.shapes = self.stored = shapes.replace(seed=None)
        if self.shapes.kept:
            raise UsageError(
                "outer.replicas: the model carries state from batch to batch; use ordinary training",
                rank=0,
            )
        whole = jax.tree.map(lambda _: WHOLE, self.shapes)
        replicas = jax.tree.map(lambda _: 0, self.shapes.opt_state.replicas)
        self.dims: Any = whole.replace(opt_state=whole.opt_state._replace(replicas=replicas))
        self.slices: Any = whole.params

    def completed(self, state: TrainState) -> TrainState:
        return with_replicas(state, self.rule)

    def check(self, tx: Any, params: Any) -> None:
        """Accept any optimizer: it gets full arrays."""

    def compile(self, step: Step) -> Program:
        """Return the programs. Metrics of an update are those of this process's first replica, but
        `halted` is that of all replicas at the last outer step: all processes halt at the same
        update."""
        arguments, everywhere = (self.specs(), self.by_device.spec), P()
        return self.program(
            self.on_each_device(self._update(step), arguments, (self.specs(), everywhere)),
            self.on_each_device(self._evaluate(step), arguments, everywhere),
        )

    def _plan(self, step: Step, assignment: np.ndarray, axes: Axes, is_update: bool) -> Plan:
        return Plan(
            self.reduction,
            axes,
            assignment,
            self.slices,
            self.shapes.params,
            step.trainable,
            in_blocks=in_blocks(self.shapes.params, step.blocks),
            dtype=self.reduce_dtype if is_update else None,
            is_update=is_update,
        )

    def _evaluate(self, step: Step) -> Callable[..., Sums]:
        """Return the evaluation of the shared parameters: all devices share the microbatches."""
        plan = self._plan(step, self.assignment, ALL, is_update=False)
        sums = self.device_sums(plan, step.evaluate)

        def evaluate(state: TrainState, batch: Batch) -> Sums:
            return sums(state.replace(opt_state=None), batch)

        return evaluate

    def _update(self, step: Step) -> Callable[..., Any]:
        """Return an update on one device: of each of its replicas, and of what all share if that is
        due."""
        plan = self._plan(step, self.of_replica, FLAT, is_update=True)
        grads = self.device_sums(plan, step.grads)

        apply = functools.partial(self.arithmetic.update, self._apply(step))

        @functools.partial(jax.jit, inline=True)  # traced once
        def one_replica(seed: jax.Array, piece: Any) -> Any:
            number, replica, batch = piece
            replica = replica.replace(seed=seed)
            numbers = plan.numbers()
            numbers = jnp.where(numbers < 0, numbers, numbers + number * self.own)
            new, metrics = apply(replica, grads(replica, batch, numbers))

            # A replica without examples, as in a ragged last batch, skips the update, but that is
            # no fault.
            skipped = replica.guard.replace(skipped=new.guard.skipped)
            guard = select(metrics["weight"] == 0, skipped, new.guard)
            return seed, (new.replace(guard=guard, seed=None), metrics)

        def update(state: TrainState, batch: Batch) -> Any:
            live, count = opaque_true(state.step), self.per_device
            numbers = jax.lax.axis_index(OUTER) * count + jnp.arange(count)
            batch = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
            pieces = numbers, state.opt_state.replicas, batch
            like = jax.eval_shape(one_replica, state.seed, jax.tree.map(lambda x: x[0], pieces))[1]
            _, (replicas, metrics) = scan_unfused(one_replica, state.seed, pieces, live, like)
            opt_state = state.opt_state._replace(replicas=replicas)
            new = state.replace(step=state.step + 1, opt_state=opt_state)
            is_due = new.step % self.rule.every == 0
            new = jax.lax.cond(is_due, self._outer_step(step), lambda state: state, new)
            return new, {**jax.tree.map(lambda x: x[0], metrics), "halted": new.guard.halted}

        return update

    def _outer_step(self, step: Step) -> Callable[[TrainState], TrainState]:
        """Return the outer update: the mean difference, the outer optimizer, and its result on all
        replicas.
        """
        number, trainable, decay = self.rule.replicas, step.trainable, self.rule.ema_decay
        reduction = self.rule.reduction
        sum_over = functools.partial(
            arithmetic(reduction).sum_rows, reduction, axis=OUTER, rows=number
        )

        def move(state: TrainState, moved: Tree, states: Tree) -> tuple[Tree, ...]:
            """Return the parameters, the averages of the model, the running averages of both, and
            the outer optimizer's state, from sums."""
            params, mean = trainable(state.params), lambda x, like: (x / number).astype(like.dtype)
            like = master_copy(params, state.opt_state.outer)
            updates, outer = self.rule.tx.update(
                jax.tree.map(mean, moved, like), state.opt_state.outer, params
            )
            params = merge(optax.apply_updates(params, updates), state.params)
            averages = mean_state(floats(state.model_state), states, number * jnp.ones(()))[0]
            extra = dict(state.extra)
            if decay is not None:
                slow = decay**self.rule.every
                extra[EMA] = average(extra[EMA], params, slow)
                if EMA_STATE in extra:
                    extra[EMA_STATE] = average_statistics(extra[EMA_STATE], averages, slow)
            return params, averages, extra, outer

        def outer_step(state: TrainState) -> TrainState:
            replicas = state.opt_state.replicas
            own = master_copy(trainable(replicas.params), replicas.opt_state)
            shared = master_copy(trainable(state.params), state.opt_state.outer)
            differences = jax.tree.map(lambda x, y: y[None] - x, own, shared)
            numbers = jax.lax.axis_index(OUTER) * self.per_device + jnp.arange(self.per_device)
            keys = jax.vmap(
                lambda n: jax.random.fold_in(microbatch_key(state.seed, state.step, n), OUTER_KEY)
            )(numbers)

            def weigh(new, _):
                return weighted_state(floats(state.model_state), new, jnp.ones(()), jnp.bool_(True))

            states = jax.vmap(weigh)(
                floats(replicas.model_state), numbers
            )  # there may be no floats to map over
            sums = sum_over(differences, keys=keys), sum_over(states, keys=None)
            rounded = self.arithmetic.rounded(move, state.step)
            params, averages, extra, outer = rounded(state, *sums)
            model_state = merge(averages, jax.tree.map(first_of_all, replicas.model_state))

            def spread(tree):
                return jax.tree.map(
                    lambda x: jnp.broadcast_to(x, (self.per_device, *x.shape)), tree
                )

            replicas = replicas.replace(params=spread(params), model_state=spread(model_state))
            if isinstance(outer, Master):
                replicas = replicas.replace(
                    opt_state=replicas.opt_state._replace(low=spread(outer.low))
                )

            def of_halted(x):
                return jnp.where(replicas.guard.halted > 0, x, jnp.zeros_like(x))

            guard = jax.tree.map(lambda x: jax.lax.pmax(of_halted(x).max(0), OUTER), replicas.guard)
            since = jnp.where(replicas.guard.halted > 0, replicas.guard.since, guard.halted_at).min(
                0
            )
            guard = guard.replace(since=jax.lax.pmin(since, OUTER))
            return state.replace(
                params=params,
                model_state=model_state,
                extra=extra,
                guard=guard,
                opt_state=Local(replicas, outer),
            )

        return outer_step


def with_replicas(one: TrainState, rule: OuterRule) -> TrainState:
    """Return the initial state from that of ordinary training: replicas that are equal, and a new
    outer optimizer. The running averages are those of what the replicas share."""
    averages = {name: one.extra[name] for name in (EMA, EMA_STATE) if name in one.extra}
    own = {name: tree for name, tree in one.extra.items() if name not in averages}
    replicas = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (rule.replicas, *x.shape)), one.replace(extra=own, seed=None)
    )
    local = Local(replicas, rule.tx.init(rule.trainable(one.params)))
    return one.replace(opt_state=local, extra=averages)


def split_replicas(replicas: int, devices: int) -> tuple[int, int]:
    """Return (parts of the devices with other replicas, replicas of each part). Raises UsageError."""
    if replicas % devices and devices % replicas:
        fit = [n for n in range(1, devices + 1) if replicas % n == 0 or n % replicas == 0]
        raise UsageError(
            f"outer.replicas: {replicas} cannot be split over {devices} devices; use {fit[-1]} devices, or as many "
            "replicas as they divide (this changes the numbers)",
            rank=0,
        )
    parts = min(replicas, devices)
    return parts, replicas // parts


def assign_replicas(assignment: np.ndarray, replicas: int, parts: int) -> np.ndarray:
    """Return the microbatches of each device [device, local], from those of one replica [device of
    it, local].
    """
    own = int(assignment.max()) + 1
    every = np.stack(
        [np.where(assignment < 0, -1, assignment + number * own) for number in range(replicas)]
    )
    # [part, replica of the part, device of the replica, local] -> [device, local]
    return (
        every.reshape(parts, -1, *assignment.shape)
        .swapaxes(1, 2)
        .reshape(parts * len(assignment), -1)
    )


def first_of_all(x: jax.Array) -> jax.Array:
    """Return the first replica's value of x [local replica, ...] on all devices: a replica that
    skipped an update may have another counter."""
    small = jnp.issubdtype(x.dtype, jnp.bool_) or x.dtype.itemsize < 4
    sent = x[0].astype(jnp.int32) if small else x[0]  # a dtype that all backends support
    return jax.lax.all_gather(sent, OUTER)[0].astype(x.dtype)
