"""Build the strategy of local updates from a config."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import Partial

from jaxdp.config import Config
from jaxdp.config.training import OuterOptimizer
from jaxdp.errors import UsageError
from jaxdp.optim import OPTIMIZERS, checked, make_optimizer
from jaxdp.optim.evaluation import evaluation_arrays
from jaxdp.outer.replicas import OuterRule, Replicas
from jaxdp.parallel.placement import state_shapes
from jaxdp.parallel.reduction import Reduction
from jaxdp.process.context import current
from jaxdp.run.components import Parts, in_state_dtype
from jaxdp.run.strategies import make_reduction
from jaxdp.targets import bind, call, locate
from jaxdp.train.observer import Observer
from jaxdp.train.step import UpdateRule


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
