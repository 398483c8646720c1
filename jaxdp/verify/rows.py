"""A row trains the same few updates on its devices, by the step and a strategy, from the oracle's own first state."""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.errors import UsageError, one_line
from jaxdp.precision import Policy
from jaxdp.step import Step, TrainState, init_state, make_step
from jaxdp.verify.compare import Errors, Reference, Worst, by_group, leaf_errors, parts, worst
from jaxdp.verify.matrix import place
from jaxdp.verify.oracle import Start, divide, plain, without_carry
from jaxdp.verify.subject import Row, Subject, Trial

WIDE = Policy(jnp.float64, jnp.float64, jnp.float64)
BUCKETS = 3  # about so many, however small the model
DRAWN = 1e-6  # initial values are drawn in float32, which two programs may round differently

Curve = dict[str, np.ndarray]  # {metric: [update]}


class Result(NamedTuple):
    """row: None is the step alone. errors: by leaf, of what is judged; problem: why there are none, where a run would
    be refused too."""

    row: Row | None
    errors: Errors
    problem: str | None = None
    refused: bool = False
    seconds: float = 0.0

    @property
    def worst(self) -> Worst:
        return worst(self.errors)

    @property
    def groups(self) -> dict[str, Worst]:
        return by_group(self.errors)


def make_runner(
    subject: Subject,
    trial: Trial,
    start: Start,
    reference: Reference,
    devices: Sequence[jax.Device],
    one: Callable[[Callable], Callable] = plain,
) -> Callable[[Row | None], Result]:
    """row -> how far it is from the oracle; None is the step alone, under jit on one device.

    one: what makes a function of one device, as for `make_oracle`.
    """
    first = first_state(subject, trial, start, reference)
    bucket_mb = sum(math.prod(x.shape) * 8 for x in jax.tree.leaves(start.params)) / BUCKETS / 1e6
    want = parts(reference.trained, reference.trained.curve)

    def make_state() -> TrainState:
        return make_first(subject, trial, reference.tx, reference.frozen)

    def train(row: Row | None) -> tuple[TrainState, Curve]:
        step = make_step(
            subject.model,
            subject.loss,
            reference.tx,
            seed=subject.seed,
            policy=WIDE,
            clip_norm=subject.clip_norm,
            accumulate=row.accumulate if row else "vmap",
            remat=subject.remat(row.zero if row else 0),
            frozen=reference.frozen,
            ema_decay=subject.ema_decay,
            transform=subject.transform,
        )
        if row is None:
            return alone(step, first, trial, one)
        strategy = place(row, make_state, trial.microbatches, devices, bucket_mb, blocks=subject.model.blocks)
        strategy.check(reference.tx, step.trainable(strategy.shapes.params))
        made = strategy.export(strategy.init())
        drawn = worst(leaf_errors(made.replace(opt_state=None), first.replace(opt_state=None)))
        if drawn.error > DRAWN:
            raise RuntimeError(
                f"the initial {drawn.leaf} differs by {drawn.error:.1e}: model.init is not a function of its key"
            )
        put = lambda x, like: jax.device_put(np.asarray(x), like.sharding, may_alias=False)
        state = strategy.adopt(jax.tree.map(put, first, strategy.abstract()))
        program, curve = strategy.lower(step), []
        for i in range(len(trial.batches)):
            state, metrics = program.update(state, strategy.put(trial.slots(i, strategy.local_slots)))
            curve.append(jax.device_get(metrics))
        return jax.tree.map(np.asarray, strategy.export(state)), by_metric(curve)

    def run(row: Row | None) -> Result:
        began = time.monotonic()
        try:
            trained, curve = train(row)
        except UsageError as error:
            return Result(row, {}, one_line(error), refused=True, seconds=time.monotonic() - began)
        except Exception as error:
            return Result(row, {}, f"{type(error).__name__}: {one_line(error)}", seconds=time.monotonic() - began)
        errors = leaf_errors(parts(trained, {k: v for k, v in curve.items() if k in want["curve"]}), want)
        judged = {leaf: e for leaf, e in errors.items() if leaf not in reference.shaky}
        return Result(row, judged, seconds=time.monotonic() - began)

    return run


def alone(step: Step, state: TrainState, trial: Trial, one: Callable[[Callable], Callable]) -> tuple[TrainState, Curve]:
    """All microbatches on one device: `apply` after `grads`, and nothing between."""
    slots = np.arange(trial.microbatches)
    update = jax.jit(one(lambda state, batch: step.apply(state, step.grads(state.view, batch, slots))))
    curve = []
    for batch in trial.batches:
        state, metrics = update(state, batch)
        curve.append(jax.device_get(metrics))
    return jax.tree.map(np.asarray, state), by_metric(curve)


def by_metric(curve: list[dict[str, jax.Array]]) -> Curve:
    return {name: np.array([metrics[name] for metrics in curve]) for name in curve[0]}


def make_first(subject: Subject, trial: Trial, tx: optax.GradientTransformation, frozen: Sequence[str]) -> TrainState:
    """The first state as a run makes it, but in float64."""
    averaged = subject.ema_decay is not None
    return init_state(
        subject.model, tx, WIDE, subject.seed, trial.microbatches, trial.example, frozen=frozen, ema=averaged
    )


def first_state(subject: Subject, trial: Trial, start: Start, reference: Reference) -> TrainState:
    """The first state with the oracle's own values, on the host."""
    model_state, carry = without_carry(start.model_state)
    if carry is not None:
        carry = jax.tree.map(lambda x: np.stack([x] * trial.microbatches), carry)
    state = TrainState(
        jnp.zeros((), jnp.int32),
        start.params,
        model_state,
        jax.jit(reference.tx.init)(divide(start.params, reference.frozen)[0]),
        ema=None if subject.ema_decay is None else start.params,
        carry=carry,
    )
    return jax.tree.map(np.asarray, state)
