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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from jaxdp.config import Config
from jaxdp.errors import UsageError
from jaxdp.exact.rounding import scan_unfused
from jaxdp.optim import OPTIMIZERS, checked, make_optimizer
from jaxdp.optim.evaluation import evaluation_arrays
from jaxdp.optim.optimizers import Master, master_copy
from jaxdp.parallel.pjit import PJit
from jaxdp.parallel.placement import assign_microbatches, of_device, ordered_devices, state_shapes
from jaxdp.parallel.reduction import Reduction
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
    in which replicas are split over them; their number divides that of replicas, or is a multiple of
    it. Raises UsageError if the model carries state from batch to batch."""

    shares_loss = False  # each process sees that of its own replica

    def __init__(
        self,
        make: Partial,
        microbatches: int,
        reduction: Reduction,
        rule: OuterRule,
        devices: list[jax.Device],
    ):
        self.rule = rule
        make = Partial(lambda make: self.completed(make()), make)
        # A loop over replicas cannot send the gradients of one block while it computes others.
        reduction = reduction._replace(overlaps=False)
        super().__init__(make, microbatches, reduction, rule.forward.policy.reduce, devices)
        if self.shapes.kept:
            raise UsageError(
                "outer.replicas: the model carries state from batch to batch; set it to 1", rank=0
            )
        self.parts = min(rule.replicas, len(devices))  # parts of the devices with other replicas
        self.per_device = rule.replicas // self.parts
        grid = np.array(devices).reshape(self.parts, -1)  # [part, device that shares its replicas]
        each = microbatches // rule.replicas
        self.of_replica = assign_microbatches(each, grid.shape[1], reduction.group)
        # [part, device that shares its replicas, replica, local]
        own, first = self.of_replica[:, None], each * np.arange(rule.replicas)
        numbers = np.where(own < 0, own, own + first.reshape(self.parts, 1, -1, 1))
        self.distribute(Mesh(grid, (OUTER, DATA)), numbers.reshape(len(devices), -1))
        self.axes = Axes(OUTER, DATA)
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

    def compile(self, step: Step) -> Program:
        """Return the programs. Metrics of an update are those of this process's first replica, but
        `halted` is that of all replicas at the last outer step: all processes halt at the same
        update."""
        evaluation, training = self.plan(step, is_update=False), self.plan(step, is_update=True)
        of_all = dataclasses.replace(evaluation, axes=Axes(DATA, OUTER))
        of_one = dataclasses.replace(training, axes=FLAT, assignment=self.of_replica)
        grads = self.device_sums(of_one, step.grads)
        apply = functools.partial(self.arithmetic.update, self.apply_to_slices(step))

        def update(state, batch):
            @functools.partial(jax.jit, inline=True)  # traced once
            def one_replica(piece):
                replica, batch, numbers = piece
                replica = replica.replace(seed=state.seed)
                new, metrics = apply(replica, grads(replica, batch, numbers))

                # A replica without examples, as in a ragged last batch, skips the update, but that
                # is no fault.
                skipped = replica.guard.replace(skipped=new.guard.skipped)
                guard = select(metrics["weight"] == 0, skipped, new.guard)
                return None, (new.replace(guard=guard, seed=None), metrics)

            microbatches = jax.tree.map(
                lambda x: x.reshape(self.per_device, -1, *x.shape[1:]), (batch, of_all.numbers())
            )
            pieces = state.opt_state.replicas, *microbatches
            _, (replicas, metrics) = scan_unfused(one_replica, pieces, state.step)
            opt_state = state.opt_state._replace(replicas=replicas)
            new = state.replace(step=state.step + 1, opt_state=opt_state)
            is_due = new.step % self.rule.every == 0
            new = jax.lax.cond(is_due, self._outer_step, lambda state: state, new)
            return new, {**jax.tree.map(lambda x: x[0], metrics), "halted": new.guard.halted}

        specs = self.specs()
        arguments = specs, self.by_device.spec
        return self.program(
            self.on_each_device(update, arguments, (specs, P())),
            self.on_each_device(self.device_sums(of_all, step.evaluate), arguments, P()),
        )

    def _outer_step(self, state: TrainState) -> TrainState:
        """Return the state after an outer update: the mean difference, the outer optimizer, and its
        result on all replicas."""
        rule, (replicas, outer) = self.rule, state.opt_state
        shared = master_copy(rule.update.trainable(state.params), outer)
        # [replica, ...]
        own = master_copy(rule.update.trainable(replicas.params), replicas.opt_state)

        statistics, one = floats(state.model_state), jnp.ones(())

        @jax.vmap
        def key_and_state(number, new):
            """Return a replica's key, and what it adds to the model state."""
            key = microbatch_key(state.seed, state.step, number)
            key = jax.random.fold_in(key, OUTER_KEY)
            return key, weighted_state(statistics, new, one, jnp.bool_(True))

        numbers = jax.lax.axis_index(OUTER) * self.per_device + jnp.arange(self.per_device)
        keys, states = key_and_state(numbers, floats(replicas.model_state))
        sum_over = functools.partial(
            arithmetic(rule.reduction).sum_rows, rule.reduction, axis=OUTER, rows=rule.replicas
        )
        sums = Sums(
            grads=sum_over(jax.tree.map(jnp.subtract, shared, own), keys=keys),
            loss=jnp.zeros(()),
            weight=rule.replicas * one,
            metrics={},
            model_state=sum_over(states, keys=None),
        )
        step = make_step(rule.forward, rule.update)

        def move(state, sums):
            return step.apply(state, sums, lambda _: jnp.zeros(2))[0]  # the norm is not needed

        before = state.replace(
            model_state=statistics, opt_state=outer, loss_scale=None, guard=Guard()
        )
        new = self.arithmetic.rounded(move, state.step)(before, sums)

        # A replica that skipped an update may have another counter than the first.
        of_first = jax.tree.map(lambda x: of_device(x[0], OUTER, 0), replicas.model_state)
        model_state = merge(new.model_state, of_first)
        opt_state = replicas.opt_state
        if isinstance(new.opt_state, Master):
            opt_state = opt_state._replace(low=copies(new.opt_state.low, self.per_device))

        # The counters of the replicas that have halted: the largest, and the first update of all.
        guards, halted = replicas.guard, replicas.guard.halted > 0
        guard = jax.tree.map(lambda x: jax.lax.pmax(jnp.where(halted, x, 0).max(0), OUTER), guards)
        since = jnp.where(halted, guards.since, guard.halted_at).min(0)
        replicas = replicas.replace(
            params=copies(new.params, self.per_device),
            model_state=copies(model_state, self.per_device),
            opt_state=opt_state,
        )
        return state.replace(
            params=new.params,
            model_state=model_state,
            opt_state=Local(replicas, new.opt_state),
            extra=new.extra,
            guard=guard.replace(since=jax.lax.pmin(since, OUTER)),
        )


def copies(tree: Tree, number: int) -> Tree:
    """Return each leaf [...] as [replica, ...]."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *x.shape)), tree)


def make_replicas(
    config: Config,
    parts: Parts,
    make_state: Partial,
    reduction: Reduction,
    devices: list[jax.Device],
) -> Replicas:
    """Build the strategy of local updates; reduction: that of gradients. Raises UsageError if the
    run does not work with local updates."""
    outer = config.outer
    key, section = "outer.optimizer", outer.optimizer
    if evaluation_arrays(state_shapes(make_state).opt_state):
        raise UsageError(
            f"outer.replicas: {config.outer.replicas} with optimizer.target: {config.optimizer.target}, which "
            "evaluates other parameters than it trains, and an outer step moves only the latter; use another "
            "optimizer, or set outer.replicas to 1"
        )
    if parts.steps % outer.every:
        raise UsageError(
            f"outer.every: {outer.every} does not divide the {parts.steps} updates of the run, and those after the "
            f"last outer step would be lost; set steps to {-(-parts.steps // outer.every) * outer.every}"
        )
    target = locate(key, section.target, OPTIMIZERS)
    args = section.args
    if section.target != "sgd" and args == type(section)().args:
        args = {}  # the default is for sgd
    if "learning_rate" in args:
        raise UsageError(f"{key}.args.learning_rate: it is set by {key}.lr; set that")
    bound = bind(key, target, args)
    make = functools.partial(
        make_optimizer,
        target,
        lambda step: section.lr,
        no_decay=config.optimizer.no_decay,
        blocks=parts.forward.model.blocks,
        roles=parts.roles,
        **bound.keywords,
    )
    decay = parts.rule.ema_decay  # per update: an outer step moves an average as far as `every`
    update = UpdateRule(
        tx=in_state_dtype(config, checked(section.target, call(key, bound, make), key)),
        frozen=parts.rule.frozen,
        ema_decay=decay and decay**outer.every,
    )
    kind = outer.reduction
    between = kind and make_reduction(kind, config.parallel.bucket_mb)
    return Replicas(
        make_state,
        config.microbatches,
        reduction,
        OuterRule(outer.replicas, outer.every, parts.forward, update, between or reduction),
        ordered_devices(devices, current().hosts),  # replicas are split between hosts first
    )


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
