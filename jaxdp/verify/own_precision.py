"""Train in a run's own precision, on one device and on several, with `scan` and `vmap`: nothing may
be rounded or skipped in one of them alone."""

import itertools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxdp.config import Config
from jaxdp.data.prefetch import read_batch
from jaxdp.errors import UsageError
from jaxdp.run.components import Parts, make_parts, set_jax
from jaxdp.train.state import Batch, TrainState, expand_to
from jaxdp.train.step import Replica, Step
from jaxdp.verify.configurations import ONE_DEVICE, clip, configuration_of
from jaxdp.verify.oracle import Curve
from jaxdp.verify.problem import (
    FAILED,
    OK,
    QUICK_COMPILATION,
    TOLERANCE,
    Check,
    Problem,
    make_variant,
)
from jaxdp.verify.trained import read_local, run_updates

UPDATES = 8  # at least
SUMMED = 8  # microbatches whose gradients are added, at most
SUM = 1e-5  # relative error of a sum of gradients: 1e-7 in float32, 1e-3 in bfloat16


class OwnPrecision(NamedTuple):
    """What training in the run's own precision gives: curves by configuration, one device with
    `scan` first. sums: the error of one device's sum of gradients, by `accumulate`."""

    curves: dict[str, Curve]
    sums: dict[str, float]


def train_in_own_precision(config: Config, devices: int, updates: int) -> OwnPrecision:
    """Train the first batches of a config (with the smaller arguments of `verify`) as its run does.

    A configuration that is refused, or cannot be mapped, is left out.
    """
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(QUICK_COMPILATION, "")
    set_jax(config)
    parts, used = make_parts(config), jax.devices()
    own, result = clip(configuration_of(config), used), OwnPrecision({}, {})
    for number, accumulate in itertools.product(sorted({1, devices}), ("scan", "vmap")):
        configuration = (ONE_DEVICE if number == 1 else own)._replace(accumulate=accumulate)
        try:
            strategy, step = make_variant(config, parts, configuration, used)
            state = strategy.init()
            if number == 1 and not Problem(config, parts).couples:
                result.sums[accumulate] = error_of_sum(parts, step, strategy.export(state))
            batches = (
                read_local(parts.order, parts.dataset, strategy, i)
                for i in range(max(updates, UPDATES))
            )
            _, curve = run_updates(strategy, step, state, batches)
            result.curves[configuration.title] = curve
        except UsageError:
            continue
        except NotImplementedError:
            if accumulate == "scan":
                raise
    return result


def error_of_sum(parts: Parts, step: Step, state: TrainState) -> float:
    """Return how much a device rounds where it adds the gradients of its microbatches, relative to
    these.

    A microbatch's own gradient is that of the same program with the masks of all others set to
    zero. So it does not matter how the model rounds. NaN if a microbatch's own gradient is not
    finite."""
    numbers = np.arange(min(parts.order.microbatches, SUMMED))
    batch = read_batch(parts.dataset, parts.order, 0, numbers)
    mask: Any = batch["mask"]
    alone: Any = np.eye(len(numbers), dtype=mask.dtype)
    kept = jax.tree.map(lambda x: x[: len(numbers)], state.kept)
    state = state.replace(kept=kept, seed=jnp.uint32(parts.forward.seed))

    @jax.jit
    def grads(state: TrainState, batch: Batch) -> Any:
        return step.grads(state, batch, Replica(jnp.asarray(numbers))).grads

    def gradient(state, mask):
        vector, _ = ravel_pytree(grads(state, {**batch, "mask": mask}))
        return np.asarray(vector, np.float64)

    def gradients(state):
        """Return those of the microbatches, and of their sum."""
        each = [gradient(state, mask * expand_to(one, mask)) for one in alone]
        return np.stack(each), gradient(state, mask)

    each, total = gradients(state)
    scale = state.loss_scale
    while not np.isfinite(each).all() and scale is not None and scale.value >= 1:
        scale = scale.replace(value=scale.value / 2)  # too large for a single microbatch
        each, total = gradients(state.replace(loss_scale=scale))
    if np.isfinite(each).all() and not np.isfinite(total).all():
        return np.inf
    return float(np.linalg.norm(total - each.sum(0)) / (np.linalg.norm(each) or 1.0))


def check_own_precision(found: OwnPrecision | str, dtype: np.dtype) -> Check:
    """Check that the gradients of microbatches are added without rounding to 16 bits, and that
    skipped updates, loss scales and losses do not depend on the devices. found: a text if the
    process failed. dtype: the least precise."""
    name, tolerance = f"in {dtype.name}", TOLERANCE[dtype.name]
    if isinstance(found, str):
        return Check(name, FAILED, f"nothing was compared in the run's own precision: {found}")
    for accumulate, error in found.sums.items():
        if error > SUM:
            text = (
                f"with parallel.accumulate: {accumulate} a device rounds the sum of its microbatches' gradients (by "
                f"{error:.1e}) where several devices do not, so their number changes the numbers"
            )
            return Check(name, FAILED, text)
    (first, want), *others = found.curves.items()
    for title, got in others:
        for metric, allowed in (("skipped", 0.0), ("loss_scale", 0.0), ("loss", tolerance)):
            x, y = (curve.get(metric, np.zeros(1)) for curve in (got, want))
            apart = ~np.isclose(x, y, allowed, 0.0, equal_nan=True)
            if apart.any():
                i = int(apart.argmax())
                text = f"{metric} of update {i + 1} is {x[i]:.6g} with {title}, but {y[i]:.6g} with {first}"
                return Check(name, FAILED, text)
    text = f"{len(found.curves)} configurations skip the same updates, with losses alike to {tolerance:g}"
    for accumulate, error in found.sums.items():
        text += f"; {accumulate} adds gradients to {error:.0e}"
    return Check(name, OK, text)
