"""A cross-entropy for uneven classes: a weight for each, and precision, recall and F1."""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxdp.errors import UsageError
from jaxdp.losses import Batch, Logits, SoftmaxCrossEntropy
from jaxdp.measures.of_classes import F1, Precision, Recall

KEY = "loss.args"


class WeightedCrossEntropy(SoftmaxCrossEntropy):
    """Cross-entropy with `class_weights`, and precision, recall and F1 of a class or of all.

    class_weights: a positive number for each class. The loss is the weighted mean over all examples of
    an update, as in PyTorch's `CrossEntropyLoss(weight)`; accuracy stays unweighted. positive: the
    class whose `precision`, `recall` and `f1` are metrics; None: `f1_0`, `f1_1`, ... of all, and their
    mean `macro_f1`. Each is one quotient of sums over all examples, on any number of devices, and not a
    mean over batches. It is NaN without examples to divide by.

    outputs: logits [example, classes]; batch["labels"]: integers [example]. Raises UsageError for
    other shapes, and weights that are not positive or not one for each class.
    """

    def __init__(
        self,
        class_weights: Sequence[float] | None = None,
        positive: int | None = 1,
        label_smoothing: float = 0.0,
    ):
        super().__init__(label_smoothing)
        kinds = [F1] if positive is None else [Precision, Recall, F1]
        self.metrics = [kind(positive) for kind in kinds]
        for each in self.metrics:
            each.key = KEY
        weights = list(class_weights or ())
        if not all(isinstance(w, int | float) and 0 < w < math.inf for w in weights):
            raise UsageError(
                f"{KEY}.class_weights: {class_weights!r} is not a list of positive numbers, such as [1, 19]"
            )
        self.class_weights = weights

    def __call__(self, outputs: jax.Array | Logits, batch: Batch):
        labels = jnp.asarray(batch["labels"])
        if isinstance(outputs, Logits) or labels.ndim != 1 or outputs.ndim != 2:
            raise UsageError(
                f"loss: WeightedCrossEntropy is for logits [example, classes] and labels [example], not for labels "
                f"{labels.shape}; use SoftmaxCrossEntropy"
            )
        classes = outputs.shape[-1]
        if self.class_weights and len(self.class_weights) != classes:
            raise UsageError(
                f"{KEY}.class_weights: {len(self.class_weights)} numbers for {classes} classes; give one for each"
            )
        total, weight, metrics = super().__call__(outputs, batch)
        accuracy = metrics["accuracy"], weight
        if self.class_weights:
            of_class = jnp.asarray(self.class_weights, total.dtype)
            mask = batch["mask"] * of_class[jnp.clip(labels, 0, classes - 1)]
            total, weight, metrics = super().__call__(outputs, {**batch, "mask": mask})
        metrics["accuracy"] = accuracy
        for each in self.metrics:
            metrics |= each(outputs, batch)
        return total, weight, metrics

    def derive(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the mean of the F1 of all classes."""
        return self.metrics[-1].derive(means)
