"""Train a configuration on its devices, with the step and a strategy; also from the oracle's first
state.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.checkpoint.leaves import host
from jaxdp.data.prefetch import read_batch
from jaxdp.errors import UsageError, one_line
from jaxdp.models.base import CARRY
from jaxdp.parallel.strategy import Strategy
from jaxdp.precision import is_key
from jaxdp.train.average import EMA, EMA_STATE
from jaxdp.train.state import Batch, TrainState
from jaxdp.train.step import Step, UpdateRule
from jaxdp.verify.compare import Reference, leaf_errors, worst
from jaxdp.verify.configurations import Configuration
from jaxdp.verify.oracle import Setup, Start, partition, statistics, without_carry
from jaxdp.verify.problem import FAILED, OK, Trial
from jaxdp.verify.verdict import Result

BUCKETS = 3  # about this many, however small the model
DRAWN = 1e-6  # initial values are drawn in float32, which two programs may round differently


def run_configuration(
    setup: Setup,
    reference: Reference,
    configuration: Configuration,
    devices: Sequence[jax.Device],
    tolerance: float,
) -> Result:
    """Train the updates of the trial, and compare the result with the oracle's. Raises UsageError
    as a run would.
    """
    try:
        state, curve = train(setup, reference.rule, configuration, devices)
    except UsageError:
        raise
    except Exception as error:
        return Result(configuration, FAILED, note=f"{type(error).__name__}: {one_line(error)}")
    errors = reference.errors(state, curve, tolerance)
    if not errors:
        return Result(configuration, FAILED, note="nothing was compared")
    largest = worst(errors)
    verdict = OK if largest.error <= tolerance else FAILED
    return Result(configuration, verdict, f"{largest.error:.1e}", largest.leaf, errors)


def train(
    setup: Setup, rule: UpdateRule, configuration: Configuration, devices: Sequence[jax.Device]
) -> tuple[TrainState, dict[str, np.ndarray]]:
    """Return (the state after the last update, {metric: [update]}), on the host."""
    problem, trial, start, _ = setup
    bucket_mb = sum(math.prod(x.shape) * 8 for x in jax.tree.leaves(start.params)) / BUCKETS / 1e6
    strategy, step = problem.build(problem, trial, rule, configuration, devices, bucket_mb)
    strategy.check(rule.tx, step.trainable(strategy.shapes.params))
    initial, first = strategy.export(strategy.init()), oracle_state(trial, start, rule)
    exponents = {name: x for name, x in initial.extra.items() if name not in first.extra}
    initial = initial.replace(extra={name: initial.extra[name] for name in first.extra})
    arrays = jax.tree.map(host, initial.replace(opt_state=None))
    drawn = worst(leaf_errors(arrays, first.replace(opt_state=None)))
    if not drawn.error <= DRAWN:
        raise RuntimeError(
            f"the initial {drawn.leaf} differs by {drawn.error:.1e}: init is not a function of its key"
        )

    def put(x, like):
        return jax.make_array_from_callback(x.shape, like.sharding, lambda part: np.array(x[part]))

    state = jax.tree.map(lambda x, y: y if is_key(y) else put(x, y), first, initial)
    del initial

    def read(i):
        return strategy.shard_batch(
            read_batch(problem.dataset, trial.order, i, strategy.local_microbatches)
        )

    state = strategy.adopt(state.replace(extra={**state.extra, **exponents}))
    final, curve = run_updates(strategy, step, state, map(read, range(len(trial.batches))))
    if np.any(curve.pop("disagreeing_state", 0)):
        raise RuntimeError(
            "the microbatches disagree on integers of the model's state; all must change one alike"
        )
    return final, curve


def run_updates(
    strategy: Strategy, step: Step, state: TrainState, batches: Iterable[Batch]
) -> tuple[TrainState, dict[str, np.ndarray]]:
    """Return (the exported state after an update on each batch, {metric: [update]}), on the host."""
    program, curve = strategy.compile(step), []
    for batch in batches:
        state, metrics = program.update(state, batch)
        curve.append(jax.tree.map(host, metrics))
    final = jax.tree.map(host, strategy.export(state))
    return final, {
        name: np.array([metrics[name] for metrics in curve]) for name in (curve or [{}])[0]
    }


def oracle_state(trial: Trial, start: Start, rule: UpdateRule) -> TrainState:
    """Return the oracle's first state as a TrainState on the host."""
    params, (model_state, carry) = start.params, without_carry(start.model_state)
    opt_state = rule.tx.init(partition(params, rule.frozen)[0])
    kept, extra = {}, {}
    if carry is not None:
        kept[CARRY] = jax.tree.map(lambda x: np.stack([x] * trial.microbatches), carry)
    if rule.ema_decay is not None:
        extra[EMA] = params
        if (averages := statistics(model_state)) is not None:
            extra[EMA_STATE] = averages
    step: Any = jnp.zeros((), jnp.int32)
    state = TrainState(step, params, model_state, opt_state, extra=extra, kept=kept)
    return jax.tree.map(host, state)
