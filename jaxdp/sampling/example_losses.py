"""More losses: a function of outputs and labels, and a cross-entropy for uneven classes."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.errors import UsageError
from jaxdp.losses import Batch, SoftmaxCrossEntropy, fit_mask, labels_of
from jaxdp.measures.measured import F1, Precision, Recall
from jaxdp.targets import locate

KEY = "loss.args"


class PerExample:
    """The mean of what a function (outputs, labels) returns for each example, over all of an update.

    function: such as those of `optax.losses`, or its dotted path; it returns [example, ...], of several
    numbers an example their mean. A loss whose second argument is called labels or targets becomes one
    of these. Masked examples do not count. Raises UsageError for a function that returns one number,
    such as a mean over a part of the batch: the mean of an update is over all devices.
    """

    def __init__(self, function: Any):
        self.function = (
            locate(f"{KEY}.function", function, {}) if isinstance(function, str) else function
        )

    def __call__(self, outputs: jax.Array, batch: Batch):
        losses = jnp.asarray(self.function(outputs, labels_of(batch)))
        if losses.ndim == 0:
            raise UsageError(
                f"loss: {getattr(self.function, '__name__', self.function)} returns one number; return a loss of each "
                "example: the mean of a part of the batch would depend on how many devices share it"
            )
        mask = fit_mask(batch["mask"], losses)
        return jnp.sum(jnp.where(mask != 0, losses, 0) * mask), jnp.sum(mask), {}


class WeightedCrossEntropy(SoftmaxCrossEntropy):
    """Cross-entropy with `class_weights`, and precision, recall and F1 of a class or of all.

    class_weights: a positive number for each class. The loss is the weighted mean over all examples of
    an update, as in PyTorch's `CrossEntropyLoss(weight)`; accuracy stays unweighted. With label_smoothing
    the whole loss of an example has the weight of its label, where PyTorch gives each class's share of
    the label its own. positive: the
    class, by name or number, whose `precision`, `recall` and `f1` are metrics; None: `f1_0`, `f1_1`,
    ... of all, and their mean `macro_f1`. Each is one quotient of sums over all examples, on any number
    of devices, and not a mean over batches. It is NaN without examples to divide by.

    outputs: logits [..., classes]; batch["labels"]: integers [...]. Raises UsageError for other shapes,
    and weights that are not positive or not one for each class.
    """

    reads_logits = False

    def __init__(
        self,
        class_weights: Sequence[float] | None = None,
        positive: int | str | None = 1,
        label_smoothing: float = 0.0,
    ):
        super().__init__(label_smoothing)
        kinds = [F1] if positive is None else [Precision, Recall, F1]
        self.metrics = [kind(positive) for kind in kinds]
        for each in self.metrics:
            each.key = KEY
        self.class_weights = [*np.atleast_1d(() if class_weights is None else class_weights)]
        if not all(isinstance(w, Real) and 0 < w < math.inf for w in self.class_weights):  # type: ignore[operator]
            raise UsageError(
                f"{KEY}.class_weights: {class_weights!r} is not a list of positive numbers, such as [1, 19]"
            )

    def __call__(self, outputs: Any, batch: Batch):
        labels = labels_of(batch)
        if labels.dtype.kind not in "iu":
            raise UsageError(
                f"loss: WeightedCrossEntropy is for integer labels, not {labels.dtype}; use SoftmaxCrossEntropy"
            )
        total, weight, metrics = super().__call__(outputs, batch)
        classes = outputs.shape[-1]
        if self.class_weights and len(self.class_weights) != classes:
            raise UsageError(
                f"{KEY}.class_weights: {len(self.class_weights)} numbers for {classes} classes; give one for each"
            )
        metrics["accuracy"] = metrics["accuracy"], weight
        weight = metrics.pop("class weight", weight)
        for each in self.metrics:
            metrics |= each(outputs, batch)
        return total, weight, metrics

    def _terms(self, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """Return the losses, times the weights of their classes, and these weights."""
        terms = super()._terms(logits, labels)
        if not self.class_weights:
            return terms
        weights = jnp.asarray(self.class_weights, logits.dtype)[labels]
        losses = {name: x * weights for name, x in terms.items() if name != "accuracy"}
        return {**terms, **losses, "class weight": weights}

    def derive(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the mean of the F1 of all classes."""
        return self.metrics[-1].derive(means)
