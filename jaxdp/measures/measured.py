"""A loss with more metrics, by name or dotted path."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxdp.errors import UsageError
from jaxdp.losses import (
    LOSSES,
    Batch,
    SoftmaxCrossEntropy,
    apply_loss,
    check,
    compute_logits,
    make_loss,
)
from jaxdp.measures.of_classes import AUC, F1, KEY, Precision, Recall
from jaxdp.targets import attribute, targets_in

METRICS = {metric.__name__: metric for metric in (Precision, Recall, F1, AUC)}


class Measured:
    """A loss with more metrics, in training and evaluation.

    loss: a name, {target, args}, or a loss. metrics: names, {target, args}, or objects. Each is a
    function (outputs, batch) -> {name: sum, (sum, weight) or, of "sums:name", an array}, as the
    metrics of a loss; it may be an object with a `derive`.

    So each is a function of sums over all examples, on any number of devices, and no mean over
    batches. Raises UsageError for two metrics of one name, for one that does not fit the outputs, and
    for a loss that couples the examples of a batch.
    """

    reads_logits = True

    def __init__(self, loss: Any = "SoftmaxCrossEntropy", metrics: Sequence[Any] = ()):
        key = "loss.args.loss"
        self.loss = make(key, loss, "loss", "SoftmaxCrossEntropy", LOSSES)
        if attribute(self.loss, "scope", "example") == "global":
            raise UsageError(f"{key}: {loss} couples examples; metrics cannot be added to it")
        self.metrics = [make(KEY, entry, "metric", "F1", METRICS) for entry in metrics]
        self.check = functools.partial(check, self.loss)

    def __call__(self, outputs: Any, batch: Batch):
        total, weight, metrics = apply_loss(self.loss, outputs, batch)
        scores = compute_logits(outputs)
        if isinstance(self.loss, SoftmaxCrossEntropy) and batch["labels"].ndim == scores.ndim:
            # The labels are probabilities, as those of Mixup.
            batch = {**batch, "labels": jnp.argmax(batch["labels"], -1)}
        for each in self.metrics:
            more = each(scores, batch)
            if both := metrics.keys() & more.keys():
                raise UsageError(f"{KEY}: {min(both)!r} is there twice; leave one out")
            metrics = {**metrics, **more}
        return total, weight, metrics

    def derive(self, means: Mapping[str, Any]) -> dict[str, float]:
        """Return what the loss and the metrics derive."""
        derived = dict[str, float]()
        for each in (self.loss, *self.metrics):
            derived |= attribute(each, "derive", lambda means: {})(means)
        return derived


def make(key: str, entry: Any, kind: str, example: str, table: Mapping[str, Any]) -> Any:
    """Return the loss or the metric of an entry; see `Measured`. Raises UsageError."""
    if callable(entry):
        return entry
    [(target, args)] = targets_in(key, [entry], kind, example)
    return make_loss(target, args, key, table)
