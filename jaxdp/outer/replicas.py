"""Local updates: logical replicas train alone for `every` updates; then an outer optimizer moves
what they share.

    inner    each replica updates its own parameters, with its own microbatches and its own optimizer state
    outer    gradient = shared parameters - mean of the replicas' parameters; then all replicas start from the result

This is DiLoCo (Douillard et al., arXiv 2311.08105), after local SGD and federated averaging. The
replicas are logical: the config decides how many there are, so one device computes what many sites
would. A device has several replicas, or several devices share one. Nothing is sent between replicas
but the differences, every `every` updates.

`make_replicas` builds this strategy from a config.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from jaxdp.config import Config
from jaxdp.config.training import OuterOptimizer
from jaxdp.errors import UsageError
from jaxdp.exact.rounding import opaque_true, scan_unfused
from jaxdp.optim import OPTIMIZERS, checked, make_optimizer
from jaxdp.optim.evaluation import evaluation_arrays
from jaxdp.optim.optimizers import Master, master_copy
from jaxdp.parallel.layout import Sharding
from jaxdp.parallel.pjit import PJit
from jaxdp.parallel.placement import assign_microbatches, of_device, ordered_devices, state_shapes
from jaxdp.parallel.reduction import NEVER, Plan, Reduction
from jaxdp.parallel.strategy import Program
from jaxdp.parallel.sums import arithmetic
from jaxdp.process.context import current
from jaxdp.run.components import Parts, in_state_dtype, make_reduction
from jaxdp.split import DATA, FLAT, Axes
from jaxdp.targets import bind, call, locate
from jaxdp.train.average import EMA, EMA_STATE
from jaxdp.train.observer import Observer
from jaxdp.train.skip import Guard
from jaxdp.train.state import (
    Batch,
    Sums,
    TrainState,
    floats,
    merge,
    microbatch_key,
    select,
    weighted_state,
)
from jaxdp.train.step import Forward, Step, UpdateRule, make_step

Tree = Any
OUTER = "outer"  # the axis of the logical replicas; inside one of them, DATA
OUTER_KEY = 1 << 20  # differs from what the keys of microbatches are folded with


class OuterRule(NamedTuple):
    """replicas: their number. every: updates between two outer steps. forward: of the model.
    update: of what the replicas share, in an outer step. reduction: of the differences between the
    replicas.
    """

    replicas: int
    every: int
    forward: Forward
    update: UpdateRule
    reduction: Reduction


class Local(NamedTuple):
    """In the place of a state's optimizer state. replicas: their states, stacked [replica, ...];
    outer: of the outer optimizer.
    """

    replicas: TrainState
    outer: Tree


class Replicas(PJit):
    """State of the replicas split over the axis `outer`; each replica's microbatches over the axis
    `data`.

    State and batches are placed as by `PJit`, whose arguments the others are. devices: in the order
    in which replicas are split over them. Raises UsageError if neither the replicas can be split
    over the devices nor the devices over the replicas, or if the model carries state from batch to
    batch."""

    shares_loss = False  # each process sees that of its own replica

    def __init__(
        self,
        make: Partial,
        microbatches: int,
        reduction: Reduction,
        rule: OuterRule,
        reduce_dtype: Any,
        devices: Sequence[jax.Device],
    ):
        parts, self.per_device = split_replicas(rule.replicas, len(devices))
        grid = np.array(devices).reshape(parts, -1)  # [part, device that shares its replicas]
        self.rule = rule
        self.of_replica = assign_microbatches(
            microbatches // rule.replicas, grid.shape[1], reduction.group
        )
        make = Partial(lambda make: self.completed(make()), make)
        sharding = Sharding(blocks=rule.forward.model.blocks)
        super().__init__(make, microbatches, reduction, reduce_dtype, devices, sharding)
        if self.shapes.kept:
            raise UsageError(
                "outer.replicas: the model carries state from batch to batch; use ordinary training",
                rank=0,
            )
        mesh = Mesh(grid, (OUTER, DATA), axis_types=(AxisType.Auto,) * 2)
        self.distribute(mesh, assign_replicas(self.of_replica, rule.replicas, parts))
        self.parts, self.axes = parts, Axes(shard=OUTER, replica=DATA)
        local = self.state_dims.opt_state  # all are replicated
        by_replica = local._replace(replicas=jax.tree.map(lambda _: 0, local.replicas))
        self.state_dims = self.state_dims.replace(opt_state=by_replica)

    def completed(self, state: TrainState) -> TrainState:
        """Return the initial state from that of ordinary training: replicas that are equal, and a
        new outer optimizer. The running averages are those of what the replicas share."""
        own, update = dict(state.extra), self.rule.update
        averages = {name: own.pop(name) for name in (EMA, EMA_STATE) if name in own}
        replicas = copies(state.replace(extra=own, seed=None), self.rule.replicas)
        local = Local(replicas, update.tx.init(update.trainable(state.params)))
        return state.replace(opt_state=local, extra=averages)

    def plan(self, step: Step, is_update: bool) -> Plan:
        """Return the plan of one replica's update, or of an evaluation, whose microbatches all
        devices share."""
        plan = super().plan(step, is_update)
        if not is_update:
            return dataclasses.replace(plan, axes=Axes(shard=DATA, replica=OUTER))
        return dataclasses.replace(
            plan, axes=FLAT, assignment=self.of_replica, when=NEVER, later=False
        )

    def compile(self, step: Step) -> Program:
        """Return the programs. Metrics of an update are those of this process's first replica, but
        `halted` is that of all replicas at the last outer step: all processes halt at the same
        update."""
        of_all = self.plan(step, is_update=False)
        evaluate = self.device_sums(of_all, step.evaluate)
        grads = self.device_sums(self.plan(step, is_update=True), step.grads)
        apply = functools.partial(self.arithmetic.update, self.apply_to_slices(step))

        @functools.partial(jax.jit, inline=True)  # traced once
        def one_replica(seed: jax.Array, piece: Any) -> Any:
            replica, batch, numbers = piece
            replica = replica.replace(seed=seed)
            new, metrics = apply(replica, grads(replica, batch, numbers))

            # A replica without examples, as in a ragged last batch, skips the update, but that is
            # no fault.
            skipped = replica.guard.replace(skipped=new.guard.skipped)
            guard = select(metrics["weight"] == 0, skipped, new.guard)
            return None, (new.replace(guard=guard, seed=None), metrics)

        def by_replica(x: jax.Array) -> jax.Array:
            return x.reshape(self.per_device, -1, *x.shape[1:])

        def update(state: TrainState, batch: Batch) -> Any:
            microbatches = jax.tree.map(by_replica, (batch, of_all.numbers()))
            pieces = state.opt_state.replicas, *microbatches
            one = functools.partial(one_replica, state.seed)
            _, (replicas, metrics) = scan_unfused(one, pieces, opaque_true(state.step))
            opt_state = state.opt_state._replace(replicas=replicas)
            new = state.replace(step=state.step + 1, opt_state=opt_state)
            is_due = new.step % self.rule.every == 0
            new = jax.lax.cond(is_due, self._outer_step, lambda state: state, new)
            return new, {**jax.tree.map(lambda x: x[0], metrics), "halted": new.guard.halted}

        arguments, everywhere = (self.specs(), self.by_device.spec), P()
        return self.program(
            self.on_each_device(update, arguments, (self.specs(), everywhere)),
            self.on_each_device(evaluate, arguments, everywhere),
        )

    def _outer_step(self, state: TrainState) -> TrainState:
        """Return the state after an outer update: the mean difference, the outer optimizer, and its
        result on all replicas."""
        rule, (replicas, outer) = self.rule, state.opt_state
        trainable, statistics = rule.update.trainable, floats(state.model_state)
        shared = master_copy(trainable(state.params), outer)

        @jax.vmap
        def compare(number: jax.Array, replica: TrainState) -> tuple[jax.Array, Tree, Tree]:
            """Return a replica's key, what it adds to the difference, and to the model state."""
            key = microbatch_key(state.seed, state.step, number)
            own = master_copy(trainable(replica.params), replica.opt_state)
            states = floats(replica.model_state)
            return (
                jax.random.fold_in(key, OUTER_KEY),
                jax.tree.map(jnp.subtract, shared, own),
                weighted_state(statistics, states, jnp.ones(()), jnp.bool_(True)),
            )

        first = jax.lax.axis_index(OUTER) * self.per_device
        keys, differences, states = compare(first + jnp.arange(self.per_device), replicas)
        sum_over = functools.partial(
            arithmetic(rule.reduction).sum_rows, rule.reduction, axis=OUTER, rows=rule.replicas
        )
        sums = Sums(
            grads=sum_over(differences, keys=keys),
            loss=jnp.zeros(()),
            weight=rule.replicas * jnp.ones(()),
            metrics={},
            model_state=sum_over(states, keys=None),
        )
        step = make_step(rule.forward, rule.update)

        def move(state: TrainState, sums: Sums) -> TrainState:
            return step.apply(state, sums, lambda _: jnp.zeros(2))[0]  # the norm is not needed

        before = state.replace(
            model_state=statistics, opt_state=outer, loss_scale=None, guard=Guard()
        )
        new = self.arithmetic.rounded(move, state.step)(before, sums)

        # A replica that skipped an update may have another counter than the first.
        of_first = jax.tree.map(lambda x: of_device(x[0], OUTER, 0), replicas.model_state)
        new = new.replace(model_state=merge(new.model_state, of_first))
        spread = functools.partial(copies, number=self.per_device)
        opt_state = replicas.opt_state
        if isinstance(new.opt_state, Master):
            opt_state = opt_state._replace(low=spread(new.opt_state.low))
        replicas = replicas.replace(
            params=spread(new.params), model_state=spread(new.model_state), opt_state=opt_state
        )
        return new.replace(
            step=state.step,
            opt_state=Local(replicas, new.opt_state),
            loss_scale=state.loss_scale,
            guard=shared_guard(replicas.guard),
        )


def shared_guard(guards: Guard) -> Guard:
    """Return the guard of the replicas [replica] that have halted: of their counters the largest,
    and the first update of all."""
    halted = guards.halted > 0
    guard = jax.tree.map(lambda x: jax.lax.pmax(jnp.where(halted, x, 0).max(0), OUTER), guards)
    since = jnp.where(halted, guards.since, guard.halted_at).min(0)
    return guard.replace(since=jax.lax.pmin(since, OUTER))


def copies(tree: Tree, number: int) -> Tree:
    """Return each leaf [...] as [replica, ...]."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *x.shape)), tree)


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
    local = assignment[:, None]
    first = (assignment.max() + 1) * np.arange(replicas)  # microbatch of each replica
    # [part, device that shares its replicas, replica, local]
    every = np.where(local < 0, -1, local + first.reshape(parts, 1, -1, 1))
    return every.reshape(parts * len(assignment), -1)


def make_replicas(
    config: Config,
    parts: Parts,
    make_state: Partial,
    reduction: Reduction,
    devices: Sequence[jax.Device],
) -> Replicas:
    """Build the strategy of local updates; reduction: that of gradients. Raises UsageError."""
    if evaluation_arrays(state_shapes(make_state).opt_state):
        raise UsageError(
            f"outer.replicas: {config.outer.replicas} with optimizer.target: {config.optimizer.target}, which "
            "evaluates other parameters than it trains, and an outer step moves only the latter; use another "
            "optimizer, or set outer.replicas to 1"
        )
    hosts = current().hosts  # replicas are split between hosts first
    if len(hosts) != jax.process_count():  # a script has connected the processes
        hosts = ()
    return Replicas(
        make_state,
        config.microbatches,
        reduction,
        make_outer(config, parts, reduction),
        parts.forward.policy.reduce,
        ordered_devices(devices, hosts),
    )


def make_outer(config: Config, parts: Parts, reduction: Reduction) -> OuterRule:
    """Build the rule of the outer steps; reduction: that of gradients. Raises UsageError if the run
    does not work with local updates."""
    outer, optimizer, key = config.outer, config.outer.optimizer, "outer.optimizer"
    if parts.steps % outer.every:
        raise UsageError(
            f"outer.every: {outer.every} does not divide the {parts.steps} updates of epochs: {config.epochs}; set "
            f"steps to {-(-parts.steps // outer.every) * outer.every} instead"
        )
    target = locate(key, optimizer.target, OPTIMIZERS)
    is_default = optimizer.target != "sgd" and optimizer.args == OuterOptimizer().args
    args = {} if is_default else optimizer.args  # the default is for sgd
    if "learning_rate" in args:
        raise UsageError(
            "outer.optimizer.args.learning_rate: it is set by outer.optimizer.lr; set that"
        )
    bound = bind(key, target, args)
    make = functools.partial(
        make_optimizer,
        target,
        lambda step: optimizer.lr,
        no_decay=config.optimizer.no_decay,
        blocks=parts.forward.model.blocks,
        roles=parts.roles,
        **bound.keywords,
    )
    tx = checked(optimizer.target, call(key, bound, make), key)
    if outer.reduction:
        reduction = make_reduction(outer.reduction, config.parallel.bucket_mb)
    decay = parts.rule.ema_decay  # per update: an outer step moves an average as far as `every`
    update = UpdateRule(
        tx=in_state_dtype(config, tx),
        frozen=parts.rule.frozen,
        ema_decay=None if decay is None else decay**outer.every,
    )
    return OuterRule(outer.replicas, outer.every, parts.forward, update, reduction)


@dataclasses.dataclass
class LastStep(Observer):
    """Say at the end which updates came after the last outer step. every: updates between two."""

    every: int
    log: Any

    def pause(self, step: int, last: bool) -> None:
        if last and (lost := step % self.every):
            self.log.writer.say(
                f"the last {lost} updates came after the last outer step, and changed no parameters"
            )
