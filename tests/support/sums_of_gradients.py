"""How much a device rounds where it adds the gradients of its microbatches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxdp.data.prefetch import read_batches
from jaxdp.run.components import Parts
from jaxdp.train.state import Batch, TrainState, expand_to
from jaxdp.train.step import Replica, Step

SUMMED = 8  # microbatches at most


def error_of_sum(parts: Parts, step: Step, state: TrainState) -> float:
    """Return how much a device rounds where it adds the gradients of its microbatches, relative to
    these.

    A microbatch's own gradient is that of the same program with the masks of all others set to
    zero. So it does not matter how the model rounds. NaN if a microbatch's own gradient is not
    finite."""
    numbers = np.arange(min(parts.order.microbatches, SUMMED))
    batch = read_batches(parts.dataset, parts.order, [0], numbers)
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
