"""A data set of uneven classes, drawn in equal shares or in those that are asked for."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdp.data.dataset import Dataset, class_names
from jaxdp.data.example_order import ExampleOrder
from jaxdp.data.mixture import MixedOrder, check_weights, split_by_weight
from jaxdp.errors import UsageError, check_sizes
from jaxdp.recipes.wrapped import Wrapped

KEY = "data.args"
READ = 1024  # examples that are read at once, to know their classes


class Balanced(Wrapped):
    """A data set in which `weights` say how often an epoch has each class: by default all equally.

    data: {target, args}, a target, or data as in `as_dataset`. by: the entry of an example that is its
    class, an integer. weights: {class: a positive number}, by its name or number, in any unit. size:
    the examples of an epoch, by default as many as there are. split: passed to the target; another one
    than train is not balanced.

    An epoch has round(size x weight / sum) examples of each class (largest remainder), in a random
    order. The draws from a class continue over the epochs: it is read to its end, in a random order,
    before any of its examples comes again. The order is a function of the seed and the update, so it
    does not depend on devices or on where a run was resumed. It needs 8 bytes of memory an example. Raises
    UsageError for a weight that is not positive, and for one of a class that no example has.
    """

    def __init__(
        self,
        data: Any,
        by: str = "labels",
        weights: Mapping[Any, float] | None = None,
        size: int | None = None,
        split: str = "train",
    ):
        check_sizes(KEY, size=size)
        super().__init__(data, split)
        if split != "train":
            return
        labels = labels_of(self.dataset, by)
        found, numbers, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        classes = found.tolist()
        self.members = np.argsort(numbers, kind="stable")
        self.sizes = tuple(sizes.tolist())
        names = class_names(self.dataset)
        titles = [names[c] if c < len(names) else f"{c}" for c in classes]
        shares = dict.fromkeys(titles, 1.0)
        if weights is not None:
            shares = {f"{name}": weight for name, weight in weights.items()}
        for number, title in zip(classes, titles):
            if title not in shares and f"{number}" in shares:
                shares[title] = shares.pop(f"{number}")
        check_weights(titles, shares, "class")
        self.counts = tuple(split_by_weight(size or len(labels), [shares[x] for x in titles]))
        if 0 in self.counts:
            raise UsageError(
                f"{KEY}.weights: class {titles[self.counts.index(0)]} has less than one of the {sum(self.counts):,} "
                "examples of an epoch; give it a larger weight, or set a larger data.args.size"
            )

    def example_order(self, batch_size: int, microbatches: int, seed: int) -> ExampleOrder:
        return BalancedOrder(
            sum(self.counts),
            batch_size,
            microbatches,
            seed,
            sizes=self.sizes,
            counts=self.counts,
            members=self.members,
        )


@dataclasses.dataclass(frozen=True)
class BalancedOrder(MixedOrder):
    """Batches of a mixture of classes. members: the indices of the examples, class by class."""

    members: Any = dataclasses.field(default=None, compare=False, repr=False)

    def _examples(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return self.members[super()._examples(epoch, positions)]


def labels_of(dataset: Dataset, by: str) -> np.ndarray:
    """Return the class of every example: from memory if it is there, else the examples are read.

    Raises UsageError if they have no such entry, or it is not one integer of at least 0."""
    stored: Any = getattr(dataset, "arrays", {}).get(by, getattr(dataset, by, None))
    if stored is None or len(stored) != len(dataset):
        parts = []
        for rows in np.array_split(np.arange(len(dataset)), len(dataset) // READ + 1):
            examples = dataset.read(rows)
            if by not in examples:
                raise UsageError(f"{KEY}.by: the examples have no {by!r}, only {sorted(examples)}")
            parts.append(examples[by])
        stored = np.concatenate(parts)
    labels = np.asarray(stored)
    if labels.ndim != 1 or labels.dtype.kind not in "iub" or labels.min() < 0:
        raise UsageError(
            f"{KEY}.by: {by!r} is {labels.dtype}{list(labels.shape[1:])} of an example; a class is one integer of at "
            "least 0"
        )
    return labels
