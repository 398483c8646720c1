"""Train a configuration on its devices, with the step and a strategy; also from the oracle's first
state.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxdp.checkpoint.leaves import host
from jaxdp.config import Precision
from jaxdp.data.dataset import Dataset
from jaxdp.data.example_order import ExampleOrder
from jaxdp.data.prefetch import read_batch
from jaxdp.errors import UsageError, one_line
from jaxdp.parallel.strategy import Strategy
from jaxdp.precision import is_key, policy
from jaxdp.train.state import Batch, TrainState
from jaxdp.train.step import Step, UpdateRule
from jaxdp.verify.compare import Reference, differences, worst
from jaxdp.verify.configurations import Configuration
from jaxdp.verify.oracle import Curve, Oracle, first_state, stack
from jaxdp.verify.problem import FAILED, OK, make_variant
from jaxdp.verify.verdict import Result

BUCKETS = 3  # about this many, however small the model
DRAWN = 1e-6  # initial values are drawn in float32, which two programs may round differently
FLOAT64 = Precision("float64", "float64", "float64")


def run_configuration(
    oracle: Oracle,
    reference: Reference,
    devices: Sequence[jax.Device],
    tolerance: float,
    configuration: Configuration,
) -> Result:
    """Train the updates of the trial, and compare the result with the oracle's. Raises UsageError
    as a run would.
    """
    try:
        state, curve = train(oracle, reference.rule, configuration, devices)
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
    oracle: Oracle, rule: UpdateRule, configuration: Configuration, devices: Sequence[jax.Device]
) -> tuple[TrainState, Curve]:
    """Return (the state after the last update, {metric: [update]}), on the host."""
    (config, parts), trial, params = oracle.problem, oracle.trial, oracle.start.params
    casts = policy("float64", "float64", "float64")
    forward = parts.forward._replace(policy=casts, loss_scaling=None)
    strategy, step = make_variant(
        dataclasses.replace(config, microbatches=trial.microbatches, precision=FLOAT64),
        parts._replace(forward=forward, rule=rule, order=trial.order),
        configuration,
        devices,
        bucket_mb=sum(x.nbytes for x in jax.tree.leaves(params)) / BUCKETS / 1e6,
        exact_group=1,
    )
    strategy.check(rule.tx, step.trainable(strategy.shapes.params))
    initial, first = strategy.export(strategy.init()), first_state(oracle, params, rule)
    # the oracle has no exponents of integer sums
    first = first.replace(extra=initial.extra | first.extra)
    drawn = worst(differences(initial.replace(opt_state=None), first.replace(opt_state=None)))
    if not drawn.error <= DRAWN:
        raise RuntimeError(
            f"the initial {drawn.leaf} differs by {drawn.error:.1e}: init is not a function of its key"
        )

    def put(x, like):
        if is_key(like):
            return like
        return jax.make_array_from_callback(x.shape, like.sharding, lambda part: np.array(x[part]))

    state = jax.tree.map(put, jax.tree.map(host, first), initial)
    del initial
    read = functools.partial(read_local, trial.order, parts.dataset, strategy)
    batches = map(read, range(len(trial.batches)))
    final, curve = run_updates(strategy, step, strategy.adopt(state), batches)
    if np.any(curve.pop("disagreeing_state", 0)):
        raise RuntimeError(
            "the microbatches disagree on integers of the model's state; all must change one alike"
        )
    return final, curve


def read_local(order: ExampleOrder, dataset: Dataset, strategy: Strategy, step: int) -> Batch:
    """Return the batch of an update on the strategy's devices."""
    return strategy.shard_batch(read_batch(dataset, order, step, strategy.local_microbatches))


def run_updates(
    strategy: Strategy, step: Step, state: TrainState, batches: Iterable[Batch]
) -> tuple[TrainState, Curve]:
    """Return (the exported state after an update on each batch, {metric: [update]}), on the host."""
    program, curve = strategy.compile(step), []
    for batch in batches:
        state, metrics = program.update(state, batch)
        curve.append(jax.tree.map(host, metrics))
    return jax.tree.map(host, strategy.export(state)), stack(curve)
