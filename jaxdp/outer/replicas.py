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
from collections.abc import Callable, Sequence
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
from jaxdp.exact.rounding import opaque_true, scan_unfused, zeros
from jaxdp.optim import OPTIMIZERS, checked, make_optimizer
from jaxdp.optim.evaluation import evaluation_arrays
from jaxdp.optim.optimizers import Master, master_copy
from jaxdp.parallel.layout import Sharding
from jaxdp.parallel.pjit import PJit
from jaxdp.parallel.placement import assign_microbatches, of_device, ordered_devices, state_shapes
from jaxdp.parallel.reduction import NEVER, Reduction
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
ALL = Axes(shard=DATA, replica=OUTER)
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
        parts, self.per_device = split_replicas(rule.replicas, len(ordered))
        sharing = len(ordered) // parts  # devices that share one replica
        self.rule, self.own = rule, microbatches // rule.replicas  # microbatches of a replica
        self.of_replica = assign_microbatches(self.own, sharing, reduction.group)
        make = Partial(lambda make: with_replicas(make(), rule), make)
        sharding = Sharding(blocks=rule.forward.model.blocks)
        super().__init__(make, microbatches, reduction, reduce_dtype, ordered, sharding)
        if self.shapes.kept:
            raise UsageError(
                "outer.replicas: the model carries state from batch to batch; use ordinary training",
                rank=0,
            )
        grid = np.array(ordered).reshape(parts, sharing)
        mesh = Mesh(grid, (OUTER, DATA), axis_types=(AxisType.Auto,) * 2)
        self.distribute(mesh, assign_replicas(self.of_replica, rule.replicas, parts))
        self.parts, self.axes = parts, Axes(shard=OUTER, replica=DATA)
        local = self.dims.opt_state  # all are replicated
        by_replica = local._replace(replicas=jax.tree.map(lambda _: 0, local.replicas))
        self.dims = self.dims.replace(opt_state=by_replica)

    def completed(self, state: TrainState) -> TrainState:
        return with_replicas(state, self.rule)

    def compile(self, step: Step) -> Program:
        """Return the programs. Metrics of an update are those of this process's first replica, but
        `halted` is that of all replicas at the last outer step: all processes halt at the same
        update."""
        arguments, everywhere = (self.specs(), self.by_device.spec), P()

        # All devices share the microbatches of an evaluation.
        plan = dataclasses.replace(self.plan(step, is_update=False), axes=ALL)
        return self.program(
            self.on_each_device(self._update(step), arguments, (self.specs(), everywhere)),
            self.on_each_device(self.device_sums(plan, step.evaluate), arguments, everywhere),
        )

    def numbers(self) -> jax.Array:
        """Return the numbers of this device's replicas."""
        return jax.lax.axis_index(OUTER) * self.per_device + jnp.arange(self.per_device)

    def _update(self, step: Step) -> Callable[..., Any]:
        """Return an update on one device: of each of its replicas, and of what all share if that is
        due."""
        plan = dataclasses.replace(
            self.plan(step, is_update=True),
            axes=FLAT,
            assignment=self.of_replica,
            when=NEVER,
            later=False,
        )
        grads = self.device_sums(plan, step.grads)
        apply = functools.partial(self.arithmetic.update, self._apply(step))
        outer_step = self._outer_step()

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
            return None, (new.replace(guard=guard, seed=None), metrics)

        def update(state: TrainState, batch: Batch) -> Any:
            batch = jax.tree.map(lambda x: x.reshape(self.per_device, -1, *x.shape[1:]), batch)
            pieces = self.numbers(), state.opt_state.replicas, batch
            one = functools.partial(one_replica, state.seed)
            _, (replicas, metrics) = scan_unfused(one, pieces, opaque_true(state.step))
            opt_state = state.opt_state._replace(replicas=replicas)
            new = state.replace(step=state.step + 1, opt_state=opt_state)
            is_due = new.step % self.rule.every == 0
            new = jax.lax.cond(is_due, outer_step, lambda state: state, new)
            return new, {**jax.tree.map(lambda x: x[0], metrics), "halted": new.guard.halted}

        return update

    def _outer_step(self) -> Callable[[TrainState], TrainState]:
        """Return the outer update: the mean difference, the outer optimizer, and its result on all
        replicas.
        """
        rule, trainable = self.rule, self.rule.update.trainable
        step = make_step(rule.forward, rule.update)
        spread = functools.partial(copies, number=self.per_device)
        sum_over = functools.partial(
            arithmetic(rule.reduction).sum_rows, rule.reduction, axis=OUTER, rows=rule.replicas
        )

        def move(state: TrainState, moved: Tree, states: Tree) -> TrainState:
            """Return the state after an update of what the replicas share, from sums over them. Of
            its model state, integers are None."""
            local = state.opt_state
            shared = state.replace(
                model_state=floats(state.model_state),
                opt_state=local.outer,
                loss_scale=None,
                guard=Guard(),
            )
            sums = Sums(
                grads=moved,
                loss=jnp.zeros(()),
                weight=rule.replicas * jnp.ones(()),
                metrics={},
                model_state=states,
            )
            new, _ = step.apply(shared, sums, lambda _: jnp.zeros(2))  # the norm is not needed
            return new.replace(
                step=state.step,
                opt_state=local._replace(outer=new.opt_state),
                loss_scale=state.loss_scale,
            )

        def key(state: TrainState, number: jax.Array) -> jax.Array:
            own = microbatch_key(state.seed, state.step, number)
            return jax.random.fold_in(own, OUTER_KEY)

        def outer_step(state: TrainState) -> TrainState:
            replicas = state.opt_state.replicas
            own = master_copy(trainable(replicas.params), replicas.opt_state)
            shared = master_copy(trainable(state.params), state.opt_state.outer)
            differences = jax.tree.map(lambda x, y: y - x, own, shared)
            keys = jax.vmap(key, (None, 0))(state, self.numbers())
            states = jax.vmap(weighted_state, (None, 0, 0, None))(
                floats(state.model_state),
                floats(replicas.model_state),
                jnp.ones(self.per_device),
                jnp.bool_(True),
            )
            sums = sum_over(differences, keys=keys), sum_over(states, keys=None)
            new = self.arithmetic.rounded(move, state.step)(state, *sums)

            # A replica that skipped an update may have another counter than the first.
            of_first = jax.tree.map(lambda x: of_device(x[0], OUTER, 0), replicas.model_state)
            model_state = merge(new.model_state, of_first)
            replicas = replicas.replace(params=spread(new.params), model_state=spread(model_state))
            if isinstance(new.opt_state.outer, Master):
                low = spread(new.opt_state.outer.low)
                replicas = replicas.replace(opt_state=replicas.opt_state._replace(low=low))
            opt_state = new.opt_state._replace(replicas=replicas)
            guard = shared_guard(replicas.guard)
            return new.replace(model_state=model_state, guard=guard, opt_state=opt_state)

        return outer_step


def shared_guard(guards: Guard) -> Guard:
    """Return the guard of the replicas [replica] that have halted: of their counters the largest,
    and the first update of all."""
    halted = guards.halted > 0
    guard = select(halted, guards, zeros(guards))
    guard = jax.tree.map(lambda x: jax.lax.pmax(x.max(0), OUTER), guard)
    since = jnp.where(halted, guards.since, guard.halted_at).min(0)
    return guard.replace(since=jax.lax.pmin(since, OUTER))


def with_replicas(one: TrainState, rule: OuterRule) -> TrainState:
    """Return the initial state from that of ordinary training: replicas that are equal, and a new
    outer optimizer. The running averages are those of what the replicas share."""
    own = dict(one.extra)
    averages = {name: own.pop(name) for name in (EMA, EMA_STATE) if name in own}
    replicas = copies(one.replace(extra=own, seed=None), rule.replicas)
    local = Local(replicas, rule.update.tx.init(rule.update.trainable(one.params)))
    return one.replace(opt_state=local, extra=averages)


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
    first = (int(assignment.max()) + 1) * np.arange(replicas)  # microbatch of each replica
    every = np.where(assignment < 0, -1, assignment + first[:, None, None])
    # [part, replica of the part, device of the replica, local] -> [device, local]
    by_part = every.reshape(parts, -1, *assignment.shape).swapaxes(1, 2)
    return by_part.reshape(parts * len(assignment), -1)


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
    rule = make_outer(config, parts, reduction)
    hosts = current().hosts
    if len(hosts) != jax.process_count():  # a script has connected the processes
        hosts = ()
    dtype = parts.forward.policy.reduce
    return Replicas(make_state, config.microbatches, reduction, rule, dtype, devices, hosts)


def make_outer(config: Config, parts: Parts, reduction: Reduction) -> OuterRule:
    """Build the rule of the outer steps; reduction: that of gradients. Raises UsageError if the run
    does not work with local updates."""
    outer = config.outer
    if parts.steps % outer.every:
        raise UsageError(
            f"outer.every: {outer.every} does not divide the {parts.steps} updates of epochs: {config.epochs}; set "
            f"steps to {-(-parts.steps // outer.every) * outer.every} instead"
        )
    target = locate("outer.optimizer", outer.optimizer.target, OPTIMIZERS)
    is_default = outer.optimizer.target != "sgd" and outer.optimizer.args == OuterOptimizer().args
    args = {} if is_default else outer.optimizer.args  # the default is for sgd
    if "learning_rate" in args:
        raise UsageError(
            "outer.optimizer.args.learning_rate: it is set by outer.optimizer.lr; set that"
        )
    bound = bind("outer.optimizer", target, args)
    args = {
        "no_decay": config.optimizer.no_decay,
        "blocks": parts.forward.model.blocks,
        "roles": parts.roles,
        **bound.keywords,
    }
    tx = call(
        "outer.optimizer",
        bound,
        lambda: make_optimizer(target, lambda step: outer.optimizer.lr, **args),
    )
    if outer.reduction:
        reduction = make_reduction(outer.reduction, config.parallel.bucket_mb)
    decay = parts.rule.ema_decay  # per update: an outer step moves an average as far as `every`
    update = UpdateRule(
        tx=in_state_dtype(config, checked(outer.optimizer.target, tx, "outer.optimizer")),
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
