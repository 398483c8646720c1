"""A loss with more metrics, by name or dotted path."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.errors import UsageError, one_line
from jaxdp.losses import Batch, SoftmaxCrossEntropy, apply_loss, check, compute_logits, make_loss
from jaxdp.measures import of_classes
from jaxdp.measures.of_classes import KEY, Sums
from jaxdp.targets import attribute, locate, targets_in
from jaxdp.train.state import SUMS

_BUILT_IN = ["Accuracy", "Precision", "Recall", "F1", "TopK", "AUC", "ConfusionMatrix"]
METRICS = {name: getattr(of_classes, name) for name in _BUILT_IN}
MERGES = "from_model_output"  # the method of a metric whose states merge


class Measured:
    """A loss with more metrics, in training and evaluation.

    loss: a name, {target, args}, or a loss. metrics: names, {target, args}, or objects, each

    - a function (outputs, batch) -> {name: sum, (sum, weight) or, of "sums:name", an array}, as the
      metrics of a loss, perhaps an object with a `derive`;
    - or a class like `clu.metrics.Metric`: `from_model_output(logits=, labels=, mask=)` is called for
      each example alone, the states of the examples that count are added up, and `compute` returns
      the number, whose name is that of the class in small letters.

    So each is a function of sums over all examples, on any number of devices, and no mean over
    batches. One with the name of a metric of the loss takes its place. Raises UsageError for a metric
    that does not fit the outputs, or whose states do not merge by addition.
    """

    reads_logits = True

    def __init__(self, loss: Any = "SoftmaxCrossEntropy", metrics: Sequence[Any] = ()):
        key = "loss.args.loss"
        self.loss = loss
        if not callable(loss):
            [(target, args)] = targets_in(key, [loss], "loss", "SoftmaxCrossEntropy")
            self.loss = make_loss(target, args, key)
        if attribute(self.loss, "scope", "example") == "global":
            raise UsageError(f"{key}: {loss} couples examples; metrics cannot be added to it")
        self.metrics = [make_metric(entry) for entry in metrics]
        self.check = functools.partial(check, self.loss)

    def __call__(self, outputs: Any, batch: Batch):
        total, weight, metrics = apply_loss(self.loss, outputs, batch)
        scores, sums = compute_logits(outputs), Sums()
        is_softmax = isinstance(self.loss, SoftmaxCrossEntropy)
        if is_softmax and batch["labels"].ndim == scores.ndim:  # probabilities
            batch = {**batch, "labels": jnp.argmax(batch["labels"], -1)}
        for each in self.metrics:
            more = each(scores, batch)
            if both := sums.keys() & more.keys():
                raise UsageError(f"{KEY}: two of them return {min(both)!r}; leave one out")
            sums |= more
        return total, weight, {**metrics, **sums}

    def derive(self, means: Mapping[str, Any]) -> dict[str, float]:
        """Return what the loss and the metrics derive."""
        derived = dict[str, float]()
        for each in (self.loss, *self.metrics):
            derived |= attribute(each, "derive", lambda means: {})(means)
        return derived


def make_metric(entry: Any) -> Any:
    """Return the metric of an entry: see `Measured`. Raises UsageError."""
    if not callable(entry):
        [(target, args)] = targets_in(KEY, [entry], "metric", "F1")
        entry = locate(KEY, target, METRICS, KEY)
        if args or not hasattr(entry, MERGES):
            entry = make_loss(target, args, KEY, METRICS)
    return States(entry) if hasattr(entry, MERGES) else entry


class States:
    """A metric whose states merge, such as one of clu; see `Measured`. Their arrays are the sums."""

    structure: Any  # of a state, known after the first call

    def __init__(self, metric: Any):
        self.metric, self.name = metric, metric.__name__.lower()

    def __call__(self, outputs: Any, batch: Batch) -> Sums:
        def of_one(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
            rows = {"logits": logits[None], "labels": labels[None], "mask": mask[None] != 0}
            real = jnp.any(mask != 0)
            state = self.metric.from_model_output(**rows)
            return jax.tree.map(lambda x: jnp.where(real, x, 0), state)

        try:
            states = jax.vmap(of_one)(outputs, batch["labels"], batch["mask"])
            arrays, self.structure = jax.tree.flatten(states)
            self.check_addition([x.shape[1:] for x in arrays])
        except Exception as error:
            raise UsageError(
                f"{KEY}: {self.name} is no number from sums of logits, labels and mask over examples; "
                f"leave it out ({one_line(error)})"
            ) from error
        return {f"{SUMS}{self.name}/{i}": x.sum(0) for i, x in enumerate(arrays)}

    def check_addition(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Raise an error unless two states merge by addition, and compute one number."""
        rng = np.random.default_rng(0)
        one, two = ([rng.integers(1, 9, shape) for shape in shapes] for _ in "12")
        with jax.ensure_compile_time_eval():
            states = map(self.structure.unflatten, (one, two))
            merged = jax.tree.leaves(next(states).merge(next(states)))
            if not all(map(np.allclose, merged, map(np.add, one, two))):
                raise ValueError("its states do not merge by addition")
            float(self.structure.unflatten(one).compute())

    def derive(self, means: Mapping[str, Any]) -> dict[str, float]:
        count = self.structure.num_leaves
        state = self.structure.unflatten(means[f"{SUMS}{self.name}/{i}"] for i in range(count))
        return {self.name: float(state.compute())}
