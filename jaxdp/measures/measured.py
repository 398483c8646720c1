"""A loss with more metrics, by name or dotted path."""

import functools
from collections import Counter
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
    derive_of,
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
    batches. Of several built-in ones of a name, each has the number of its class: f1_0, f1_3. Raises
    UsageError for two metrics of one name, for one that returns something else or does not fit the
    outputs, and for a loss that couples the examples of a batch.
    """

    reads_logits = True

    def __init__(self, loss: Any = "SoftmaxCrossEntropy", metrics: Sequence[Any] = ()):
        key = "loss.args.loss"
        self.loss = make(key, loss, "loss", "SoftmaxCrossEntropy", LOSSES)
        if attribute(self.loss, "scope", "example") == "global":
            raise UsageError(f"{key}: {loss} couples examples; metrics cannot be added to it")
        self.metrics = [make(KEY, entry, "metric", "F1", METRICS) for entry in metrics]
        of_one = [x for x in self.metrics if getattr(x, "positive", None) is not None]
        counts = Counter(x.name for x in of_one)
        for metric in of_one:
            if counts[metric.name] > 1:
                metric.name += f"_{metric.positive}"
        self.check = functools.partial(check, self.loss)

    def __call__(self, outputs: Any, batch: Batch):
        total, weight, metrics = apply_loss(self.loss, outputs, batch)
        scores = compute_logits(outputs)
        if isinstance(self.loss, SoftmaxCrossEntropy) and batch["labels"].ndim == scores.ndim:
            # The labels are probabilities, as those of Mixup.
            batch = {**batch, "labels": jnp.argmax(batch["labels"], -1)}
        for each in self.metrics:
            metrics = joined(metrics, each(scores, batch), each)
        return total, weight, metrics

    def derive(self, means: Mapping[str, Any]) -> dict[str, float]:
        """Return what the loss and the metrics derive."""
        derived = dict[str, float]()
        for each in (self.loss, *self.metrics):
            derived = joined(derived, derive_of(each)(means), each)
        return derived


def joined(numbers: Mapping[str, Any], more: Any, metric: Any) -> dict[str, Any]:
    """Return the numbers with those that a metric returned. Raises UsageError for one that is there
    twice, and for anything but a dict."""
    if not isinstance(more, Mapping):
        name = attribute(metric, "__name__", type(metric).__name__)
        raise UsageError(
            f"{KEY}: {name} returned a {type(more).__name__}; a metric returns {{name: sum or (sum, weight)}}, and "
            "its derive {name: number}"
        )
    if both := numbers.keys() & more.keys():
        raise UsageError(f"{KEY}: {min(both)!r} is there twice; leave one out")
    return {**numbers, **more}


def make(key: str, entry: Any, kind: str, example: str, table: Mapping[str, Any]) -> Any:
    """Return the loss or the metric of an entry; see `Measured`. Raises UsageError."""
    if callable(entry):
        return entry
    [(target, args)] = targets_in(key, [entry], kind, example)
    return make_loss(target, args, key, table)
