"""A loss with more metrics, by name or dotted path; and the metrics of classes. Each is a quotient of sums
over all examples, or a function of such sums."""

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.errors import UsageError
from jaxdp.losses import (
    LOSSES,
    SUMS,
    Batch,
    SoftmaxCrossEntropy,
    apply_loss,
    check,
    compute_logits,
    derive_of,
    fit_mask,
    labels_of,
    make_loss,
    one_array,
    wide,
)
from jaxdp.targets import attribute, targets_in

KEY = "loss.args.metrics"
# The bins of AUC have one width in arcsinh(SHARPNESS x log-odds), which is in [-WIDEST, WIDEST].
BINS, SHARPNESS, WIDEST = 8192, 100.0, 15.0
Sums = dict[str, Any]


class OfClasses:
    """A measure of logits [..., class] and integer labels [...]. Raises UsageError for others, such as
    those of a regression.

    name: of the metric. positive: the class that it is about, by its name in the data or its number;
    None: it is about all. number: that of `positive`, which a run sets if the data names its classes. A
    subclass has sums(logits [row, class], labels [row], mask [row]) -> the metrics of a loss, where a
    row is an example or a token. All of them are NaN where a logit is: no class is predicted there.
    """

    key = f"{KEY}.args"  # of its arguments
    name: str
    positive: Any
    number: Any
    sums: Any

    def __call__(self, outputs: Any, batch: Batch) -> Sums:
        labels, shape = labels_of(batch), one_array(outputs).shape
        classes = shape[-1]
        if shape != (*labels.shape, classes) or not jnp.issubdtype(labels.dtype, jnp.integer):
            raise UsageError(
                f"{KEY}: {type(self).__name__} is of classes, of logits [..., class] and integers [...]; outputs are "
                f"{shape} and labels {labels.dtype.name}{labels.shape}, as of a regression; leave it out"
            )
        if (self.number or 0) not in range(classes):
            raise UsageError(
                f"{self.key}.positive: {self.positive!r} is none of {classes} classes; give its name, or 0 to "
                f"{classes - 1}"
            )
        # A sum in 16 bits would count to 256 or 2,048.
        logits = outputs.reshape(-1, classes).astype(wide(outputs.dtype))
        mask = fit_mask(batch["mask"], labels.astype(logits.dtype)).reshape(-1)
        # A logit may be -inf, for a class that cannot be.
        has_classes = jnp.isfinite(jax.nn.logsumexp(logits, -1)) | (mask == 0)
        sums = self.sums(logits, labels.reshape(-1), mask)
        return jax.tree.map(lambda x: jnp.where(has_classes.all(), x, jnp.nan), sums)


class Precision(OfClasses):
    """The share of the predictions of class `positive` that are right: `precision`. positive: None: of
    each class, `precision_0`, ..., and their mean, `macro_precision`.

    factors (a, b, c): the quotient is a x right / (b x predictions + c x examples of the class)."""

    name = "precision"
    factors = 1, 1, 0

    def __init__(self, positive: int | str | None = 1):
        self.positive = self.number = positive

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Sums:
        predicted = jnp.argmax(logits, -1)
        a, b, c = self.factors

        def of_one(number):
            real, guessed = labels == number, predicted == number
            return a * jnp.sum(mask * real * guessed), jnp.sum(mask * (b * guessed + c * real))

        if self.positive is not None:
            return {self.name: of_one(self.number)}
        return {f"{self.name}_{number}": of_one(number) for number in range(logits.shape[-1])}

    def derive(self, means: Mapping[str, Any]) -> dict[str, float]:
        """Return the mean of all classes."""
        if self.positive is not None:
            return {}
        each = [x for name, x in means.items() if re.fullmatch(rf"{self.name}_\d+", name)]
        return {f"macro_{self.name}": np.mean(each) if each else math.nan}


class Recall(Precision):
    """The share of the examples of class `positive` that are predicted as such: `recall`, as
    `Precision`."""

    name = "recall"
    factors = 1, 0, 1


class F1(Precision):
    """The harmonic mean of precision and recall: `f1`, as `Precision`."""

    name = "f1"
    factors = 2, 1, 1


class AUC(OfClasses):
    """The area under the ROC curve of class `positive` against all others: `auc`, the probability that
    one of its examples has a larger score than another example, where a tie counts half.

    It follows from a histogram of the log-odds of the class, whose bins are narrower than 0.4 % of the
    log-odds, or than 4e-5. Examples in one bin count as ties, which is wrong by at most `auc_error`,
    half the share of such pairs. Both are omitted without examples of the class, or without others.
    """

    name = "auc"

    def __init__(self, positive: int | str = 1):
        self.positive = self.number = positive

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Sums:
        others = jax.nn.logsumexp(jnp.delete(logits, self.number, -1), -1)
        scale = jnp.arcsinh(SHARPNESS * (logits[:, self.number] - others)) / WIDEST
        place = jnp.clip((scale + 1) / 2 * BINS, 0, BINS - 1).astype(int)
        is_label = (labels == self.number).astype(int)
        counts = jnp.zeros((2, BINS), mask.dtype)
        return {f"{SUMS}{self.name}": counts.at[is_label, place].add(mask)}

    def derive(self, means: Mapping[str, Any]) -> dict[str, float]:
        """Return `auc` and `auc_error`."""
        others, examples = np.asarray(means[f"{SUMS}{self.name}"], float)
        pairs = others.sum() * examples.sum()
        if not pairs:
            return {}
        error = others @ examples / pairs / 2
        smaller = np.cumsum(others) - others
        return {self.name: smaller @ examples / pairs + error, f"{self.name}_error": error}


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
        of_one = [x for x in self.metrics if isinstance(x, OfClasses) and x.positive is not None]
        counts = Counter(map(type, of_one))
        for metric in of_one:
            if counts[type(metric)] > 1:
                metric.name = f"{type(metric).name}_{metric.positive}"
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
        raise UsageError(
            f"{KEY}: {metric} returned a {type(more).__name__}; a metric returns {{name: sum or (sum, weight)}}, and "
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
