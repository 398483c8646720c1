"""A loss returns sums and a weight, never a mean: the division happens once, over all devices.

    (outputs, batch) -> (loss_sum [], weight [], {metric: sum []})

`batch["mask"]` is 1.0 for a real example (or token) and 0.0 for padding; metrics are divided by the same weight.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp.errors import UsageError

LossFn = Callable[[Any, dict[str, jax.Array]], tuple[jax.Array, jax.Array, dict[str, jax.Array]]]


class SoftmaxCrossEntropy:
    """Cross-entropy of integer labels, in nats, with accuracy.

    outputs: logits [..., classes]; batch["labels"]: integers [...]; batch["mask"]: [...] or its leading dims.
    label_smoothing: the share of probability spread evenly over all classes (Szegedy et al., arXiv 1512.00567).
    """

    def __init__(self, label_smoothing: float = 0.0):
        self.label_smoothing = label_smoothing

    def __call__(self, outputs: jax.Array, batch: dict[str, jax.Array]):
        labels = _labels(batch)
        if outputs.shape[:-1] != labels.shape:
            raise UsageError(
                f"loss: outputs {outputs.shape} do not fit labels {labels.shape}; the model must return logits "
                f"[{', '.join(map(str, labels.shape))}, classes]"
            )
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
        if self.label_smoothing:
            uniform = -jnp.mean(jax.nn.log_softmax(outputs), axis=-1)
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing * uniform
        mask = _fit(batch["mask"], losses)
        correct = (jnp.argmax(outputs, axis=-1).astype(labels.dtype) == labels).astype(losses.dtype)
        return jnp.sum(losses * mask), jnp.sum(mask), {"accuracy": jnp.sum(correct * mask)}


class MeanSquaredError:
    """The squared error, averaged over the dims that the mask has not: an example's, or a token's own.

    outputs and batch["labels"]: [example, ...]; batch["mask"]: its leading dims.
    """

    def __call__(self, outputs: jax.Array, batch: dict[str, jax.Array]):
        labels = _labels(batch).astype(outputs.dtype)
        if outputs.shape != labels.shape:
            raise UsageError(f"loss: outputs {outputs.shape} do not fit labels {labels.shape}")
        errors, dims = jnp.square(outputs - labels), min(batch["mask"].ndim, outputs.ndim)
        losses = jnp.mean(errors.reshape(*errors.shape[:dims], -1), axis=-1)
        mask = _fit(batch["mask"], losses)
        return jnp.sum(losses * mask), jnp.sum(mask), {}


def _fit(mask: jax.Array, losses: jax.Array) -> jax.Array:
    """mask [example] or [example, token] as the shape and dtype of losses."""
    if mask.shape != losses.shape[: mask.ndim]:
        raise UsageError(f"loss: the data's mask {mask.shape} does not fit the losses {losses.shape}, dim by dim")
    return jnp.broadcast_to(mask.reshape(mask.shape + (1,) * (losses.ndim - mask.ndim)), losses.shape).astype(
        losses.dtype
    )


def _labels(batch: dict[str, jax.Array]) -> jax.Array:
    if "labels" not in batch:
        raise UsageError(
            f"loss: it needs 'labels', and the data has {sorted(batch)}; name them so, or use another loss"
        )
    return batch["labels"]


LOSSES = {"SoftmaxCrossEntropy": SoftmaxCrossEntropy, "MeanSquaredError": MeanSquaredError}
