"""Train a configuration on its devices, with the step and a strategy, from the oracle's first state."""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.checkpoint.digest import host
from jaxdp.core.options import UpdateRule
from jaxdp.core.state import TrainState
from jaxdp.data.prefetch import read_batch
from jaxdp.errors import UsageError, one_line
from jaxdp.verify.compare import Errors, Reference, Worst, leaf_errors, worst
from jaxdp.verify.configurations import Configuration
from jaxdp.verify.oracle import Setup, Start, partition, without_carry
from jaxdp.verify.problem import FAILED, OK, REFUSED, Trial

BUCKETS = 3  # about this many, however small the model
DRAWN = 1e-6  # initial values are drawn in float32, which two programs may round differently


class Result(NamedTuple):
    """verdict: OK, FAILED, or REFUSED as a run would be. errors: of each compared leaf; failure: why there are none."""

    configuration: Configuration
    verdict: str
    errors: Errors
    failure: str
    seconds: float

    @property
    def worst(self) -> Worst:
        return worst(self.errors)

    @property
    def outcome(self) -> str:
        return self.verdict if self.failure else f"{self.worst.error:.1e}{' FAILED' * (self.verdict == FAILED)}"


def run_configuration(
    setup: Setup, reference: Reference, configuration: Configuration, devices: Sequence[jax.Device], tolerance: float
) -> Result:
    """Train the updates of the trial, and compare the result with the oracle's."""
    began, errors, verdict = time.monotonic(), Errors(), FAILED
    try:
        state, curve = train(setup, reference.rule, configuration, devices)
        errors = reference.errors(state, curve, tolerance)
        failure = "" if errors else "nothing was compared"
        verdict = OK if errors and worst(errors).error <= tolerance else FAILED
    except UsageError as error:
        failure, verdict = one_line(error), REFUSED
    except Exception as error:
        failure = f"{type(error).__name__}: {one_line(error)}"
    return Result(configuration, verdict, errors, failure, time.monotonic() - began)


def train(
    setup: Setup, rule: UpdateRule, configuration: Configuration, devices: Sequence[jax.Device]
) -> tuple[TrainState, dict[str, np.ndarray]]:
    """Return (the state after the last update, {metric: [update]}), on the host."""
    problem, trial, start, _ = setup
    bucket_mb = sum(math.prod(x.shape) * 8 for x in jax.tree.leaves(start.params)) / BUCKETS / 1e6
    strategy, step = problem.build(problem, trial, rule, configuration, devices, bucket_mb)
    strategy.check(rule.tx, step.trainable(strategy.shapes.params))
    initial, first = strategy.export(strategy.init()), oracle_state(trial, start, rule)
    exponents, arrays = initial.exponents, jax.tree.map(host, initial.replace(opt_state=None, exponents=None))
    drawn = worst(leaf_errors(arrays, first.replace(opt_state=None)))
    if not drawn.error <= DRAWN:
        raise RuntimeError(f"the initial {drawn.leaf} differs by {drawn.error:.1e}: init is not a function of its key")
    put = lambda x, like: jax.make_array_from_callback(x.shape, like.sharding, lambda part: np.array(x[part]))
    state = jax.tree.map(put, first, strategy.abstract().replace(exponents=None))
    state, program, curve = strategy.adopt(state.replace(exponents=exponents)), strategy.compile(step), []
    for i in range(len(trial.batches)):
        batch = read_batch(problem.dataset, trial.order, i, strategy.local_microbatches)
        state, metrics = program.update(state, strategy.shard_batch(batch))
        curve.append(jax.device_get(metrics))
        if np.any(curve[-1].pop("disagreeing_state", 0)):
            raise RuntimeError("the microbatches disagree on integers of the model's state; all must change one alike")
    final = jax.tree.map(host, strategy.export(state).replace(exponents=None))
    return final, {name: np.array([metrics[name] for metrics in curve]) for name in curve[0]}


def oracle_state(trial: Trial, start: Start, rule: UpdateRule) -> TrainState:
    """Return the oracle's first state as a TrainState on the host."""
    params, (model_state, carry) = start.params, without_carry(start.model_state)
    carry = jax.tree.map(lambda x: np.stack([x] * trial.microbatches), carry)
    opt_state, ema = rule.tx.init(partition(params, rule.frozen)[0]), None if rule.ema_decay is None else params
    state: Any = TrainState(jnp.zeros((), jnp.int32), params, model_state, opt_state, ema=ema, carry=carry)
    return jax.tree.map(np.asarray, state)
