"""A loss that couples all examples of a batch (contrastive learning), in two passes.

The first pass computes the outputs of all microbatches, joins them over replicas and differentiates
the loss with respect to them; the second computes each microbatch again with these cotangents for
its loss (GradCache, Gao et al., arXiv 2101.06983).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.losses import LossFn, apply_loss
from jaxdp.train.metric_sums import check_result

Tree = Any


class Coupled(NamedTuple):
    """The result of a loss over the full batch for each local microbatch [local, ...]: its share of
    the sums, and the derivatives by its outputs."""

    loss: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array]
    cotangents: Tree


def couple(loss: LossFn, outputs: Tree, batch: Tree, numbers: jax.Array, train: bool) -> Coupled:
    """Apply the loss to the full batch and split the result over this replica's microbatches.

    Args:
        outputs, batch: of all microbatches [microbatch, example, ...].
        numbers: of the microbatches of this replica [local].
        train: also differentiate with respect to the outputs.
    """
    rows = batch["mask"].reshape(len(batch["mask"]), -1).sum(-1)

    def batch_loss(outputs: Tree) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (outputs, batch))
        total, weight, metrics = check_result(apply_loss(loss, *flat))
        return total, (weight, metrics)

    if train:
        (total, (weight, metrics)), grads = jax.value_and_grad(
            batch_loss, has_aux=True, allow_int=True
        )(outputs)
        cotangents = jax.tree.map(lambda x, c: c if _is_float(x) else x, outputs, grads)
    else:
        (total, (weight, metrics)), cotangents = batch_loss(outputs), None
    index = jnp.maximum(numbers, 0)
    fraction = (rows / jnp.maximum(rows.sum(), 1))[index].astype(total.dtype)

    def share(x):
        return x.astype(total.dtype) * fraction

    cotangents = jax.tree.map(lambda x: x[index], cotangents)
    return jax.lax.stop_gradient(
        Coupled(share(total), share(weight), jax.tree.map(share, metrics), cotangents)
    )


def surrogate_loss(outputs: Tree, cotangents: Tree) -> jax.Array:
    """Return the sum of outputs x cotangents, whose gradient is that of the coupled loss."""
    pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(cotangents))
    return sum((jnp.sum(x * y) for x, y in pairs if _is_float(x)), jnp.zeros(()))


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
