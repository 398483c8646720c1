"""A loss that couples all examples of a batch (contrastive learning), as a wrapper of a step.

Two passes (GradCache, Gao et al., arXiv 2101.06983). The first computes the outputs of all
microbatches, joins them over the devices and differentiates the loss by them. The second is an
ordinary step, whose loss is a sum over examples: of the outputs times these derivatives.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.losses import LossFn, apply_loss
from jaxdp.precision import is_float
from jaxdp.train.state import Batch, Sums, TrainState, check_result

Tree = Any
COUPLED = "coupled"  # the batch's entry that brings the first pass to the second


def with_coupled_loss(
    step: Any, first_pass: Callable[..., tuple[Tree, Batch]], loss: LossFn
) -> Any:
    """Return the step of a loss that needs all outputs [microbatch x example, ...] at once.

    Args:
        first_pass: (state, batch, replica, train) -> (outputs, batch for the loss) of all devices.
    """

    def with_shares(sums_of: Callable[..., Sums], train: bool) -> Callable[..., Sums]:
        def in_two_passes(state: TrainState, batch: Batch, replica: Any) -> Sums:
            outputs, loss_batch = first_pass(state, batch, replica, train)
            share = shares(loss, outputs, loss_batch, replica.numbers, train)
            return sums_of(state, {**batch, COUPLED: share}, replica)

        return in_two_passes

    grads, evaluate = with_shares(step.grads, True), with_shares(step.evaluate, False)
    return step._replace(grads=grads, evaluate=evaluate)


def shares(loss: LossFn, outputs: Tree, batch: Batch, numbers: jax.Array, train: bool) -> Tree:
    """Apply the loss to the full batch and split the result over this device's microbatches.

    Args:
        outputs, batch: of all microbatches [microbatch, example, ...].
        numbers: of the microbatches of this device [local].
        train: also differentiate by the outputs.

    Returns:
        {"sums": each local microbatch's share [local] of the loss, the weight and the metrics,
         "cotangents": the loss's derivatives by the floats of the outputs [local, example, ...];
         in evaluation there are none}
    """

    def batch_loss(outputs: Tree) -> tuple[jax.Array, tuple]:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (outputs, batch))
        total, weight, metrics = check_result(apply_loss(loss, *flat))
        return total, (total, weight, metrics)

    if train:
        differentiated = jax.value_and_grad(batch_loss, has_aux=True, allow_int=True)
        (_, sums), cotangents = differentiated(outputs)
    else:
        (_, sums), cotangents = batch_loss(outputs), None
    index = jnp.maximum(numbers, 0)
    rows = batch["mask"].reshape(len(batch["mask"]), -1).sum(-1)
    fraction = (rows / jnp.maximum(rows.sum(), 1))[index].astype(sums[0].dtype)
    share = {
        "sums": jax.tree.map(lambda x: x.astype(fraction.dtype) * fraction, sums),
        "cotangents": [x[index] for x in floats_of(cotangents)],
    }
    return jax.lax.stop_gradient(share)


def coupled_result(outputs: Tree, share: Tree) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Return a microbatch's share of the (loss, weight, metrics); the loss has the coupled loss's
    derivative by the outputs."""
    loss, weight, metrics = share["sums"]
    pairs = zip(floats_of(outputs), share["cotangents"])
    if products := [jnp.sum(x * y) for x, y in pairs]:
        surrogate = sum(products, jnp.zeros(())).astype(loss.dtype)
        loss = loss + (surrogate - jax.lax.stop_gradient(surrogate))
    return loss, weight, metrics


def floats_of(tree: Tree) -> list[jax.Array]:
    """Return the leaves that are floats."""
    return [x for x in jax.tree.leaves(tree) if is_float(x)]
