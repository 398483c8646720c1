"""Train a configuration on its devices, with the step and a strategy, from the oracle's first state."""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.checkpoint.digest import host
from jaxdp.core.state import TrainState, init_state
from jaxdp.core.step import make_step
from jaxdp.data.prefetch import read_batch
from jaxdp.errors import UsageError, one_line
from jaxdp.parallel.fixed_point import FORMATS
from jaxdp.parallel.integer_sums import remembering
from jaxdp.precision import Policy
from jaxdp.verify.compare import Errors, Reference, Worst, leaf_errors, worst
from jaxdp.verify.configurations import Configuration, make_strategy
from jaxdp.verify.oracle import Start, partition, without_carry
from jaxdp.verify.problem import Problem, Trial

FLOAT64 = Policy(jnp.float64, jnp.float64, jnp.float64)
BUCKETS = 3  # about this many, however small the model
DRAWN = 1e-6  # initial values are drawn in float32, which two programs may round differently


class Result(NamedTuple):
    """errors: of each leaf that is judged. failure: why there are none; refused: a run would be refused, too."""

    configuration: Configuration
    errors: Errors
    failure: str = ""
    refused: bool = False
    seconds: float = 0.0

    @property
    def worst(self) -> Worst:
        return worst(self.errors)


def run_configuration(
    problem: Problem,
    trial: Trial,
    start: Start,
    reference: Reference,
    configuration: Configuration,
    devices: Sequence[jax.Device],
    tolerance: float,
) -> Result:
    """Train the updates of the trial, and compare the result with the oracle's."""
    began = time.monotonic()
    errors, failure, refused = Errors(), "", False
    try:
        state, curve = train(problem, trial, start, reference.tx, configuration, devices)
        errors = reference.errors(state, curve, tolerance)
        failure = "" if errors else "nothing was judged"
    except UsageError as error:
        failure, refused = one_line(error), True
    except Exception as error:
        failure = f"{type(error).__name__}: {one_line(error)}"
    return Result(configuration, errors, failure, refused, time.monotonic() - began)


def train(
    problem: Problem,
    trial: Trial,
    start: Start,
    tx: optax.GradientTransformation,
    configuration: Configuration,
    devices: Sequence[jax.Device],
) -> tuple[TrainState, dict[str, np.ndarray]]:
    """Return (the state after the last update, {metric: [update]}), on the host."""
    step = make_step(
        problem.model,
        problem.loss,
        tx,
        seed=problem.seed,
        policy=FLOAT64,
        clip_norm=problem.clip_norm,
        accumulate=configuration.accumulate,
        remat=problem.remat(configuration.zero),
        frozen=problem.frozen,
        ema_decay=problem.ema_decay,
        transform=problem.transform,
    )
    make_state: Any = lambda: make_first_state(problem, trial, tx)
    if configuration.reduction in FORMATS:
        make_state = remembering(make_state, step.trainable)
    bucket_mb = sum(math.prod(x.shape) * 8 for x in jax.tree.leaves(start.params)) / BUCKETS / 1e6
    strategy = make_strategy(
        configuration, devices, make_state, trial.microbatches, bucket_mb, blocks=problem.model.blocks
    )
    strategy.check(tx, step.trainable(strategy.shapes.params))
    initial, first = strategy.export(strategy.init()), oracle_state(problem, trial, start, tx)
    drawn = worst(
        leaf_errors(jax.tree.map(host, initial.replace(opt_state=None, exponents=None)), first.replace(opt_state=None))
    )
    if drawn.error > DRAWN:
        raise RuntimeError(
            f"the initial {drawn.leaf} differs by {drawn.error:.1e}: model.init is not a function of its key"
        )
    put = lambda x, like: jax.make_array_from_callback(x.shape, like.sharding, lambda part: np.array(x[part]))
    state = jax.tree.map(put, first, strategy.abstract().replace(exponents=None))
    state = strategy.adopt(state.replace(exponents=initial.exponents))
    program, curve = strategy.compile(step), []
    for i in range(len(trial.batches)):
        batch = read_batch(problem.dataset, trial.order, i, strategy.local_slots)
        state, metrics = program.update(state, strategy.shard_batch(batch))
        curve.append(jax.device_get(metrics))
    final = jax.tree.map(host, strategy.export(state).replace(exponents=None))
    return final, {name: np.array([metrics[name] for metrics in curve]) for name in curve[0]}


def make_first_state(problem: Problem, trial: Trial, tx: optax.GradientTransformation) -> TrainState:
    """Initialize the state as a run does, but in float64."""
    ema = problem.ema_decay is not None
    return init_state(
        problem.model, tx, FLOAT64, problem.seed, trial.microbatches, trial.example, frozen=problem.frozen, ema=ema
    )


def oracle_state(problem: Problem, trial: Trial, start: Start, tx: optax.GradientTransformation) -> TrainState:
    """Return the oracle's first state as a TrainState on the host."""
    model_state, carry = without_carry(start.model_state)
    if carry is not None:
        carry = jax.tree.map(lambda x: np.stack([x] * trial.microbatches), carry)
    state = TrainState(
        jnp.zeros((), jnp.int32),
        start.params,
        model_state,
        tx.init(partition(start.params, problem.frozen)[0]),
        ema=None if problem.ema_decay is None else start.params,
        carry=carry,
    )
    return jax.tree.map(np.asarray, state)
