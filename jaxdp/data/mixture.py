"""A mixture of data sets: in each epoch, a fixed number of examples of each set, in one random
order.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from jaxdp.data.dataset import (
    Batch,
    Dataset,
    as_dataset,
    by_member,
    check_split,
    class_names,
    read_examples,
    tokenizer_spec,
)
from jaxdp.data.example_order import EpochOrder, ExampleOrder, permute_by_turn
from jaxdp.errors import UsageError, check_sizes
from jaxdp.targets import arguments, bind, call, locate, parameters, targets_in

KEY = "data.args.sets"
MEMBER = "set"  # entry [example] int32 of a batch: the number of the example's set


class Mixture:
    """Several sets as one, with `weights`: the share of each in the examples of an epoch.

    sets: {name: {target, args}, a target, or data as in `as_dataset`}. Sets are ordered by name.
    weights: {name: a positive number}, in any unit; default: the sizes, so that an epoch reads each
    example once. size: the examples of an epoch, by default those of all sets. split: passed to the
    targets that accept it; the test split has the sets whose target does, each example once and
    without weights.

    An epoch has round(size x weight / sum) examples of each set (largest remainder), randomly
    interleaved. The draws from a set continue over the epochs: it is read to its end, in a random
    order, before any of its examples comes again. All sets must have the same keys, shapes and
    dtypes, number of classes and tokenizer; each keeps its own transform. Raises UsageError that
    names the set."""

    def __init__(
        self,
        sets: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        size: int | None = None,
        split: str = "train",
    ):
        check_split(split)
        if not isinstance(sets, Mapping) or not sets:
            raise UsageError(f"{KEY}: {sets!r} has no set; give {{name: {{target, args}}, ...}}")
        check_sizes("data.args", size=size)
        check_weights(sets, weights)
        self.names = [
            name
            for name in sorted(sets)
            if split == "train" or takes_split(f"{KEY}.{name}", sets[name])
        ]
        if not self.names:
            raise UsageError(
                f"{KEY}: no set has a {split} split; add one that has, without an argument split"
            )
        self.sets = [make_set(f"{KEY}.{name}", sets[name], split) for name in self.names]
        self._copy_facts()
        self.inventory = " | ".join(
            f"{name}: {text}"
            for name, dataset in zip(self.names, self.sets)
            if (text := getattr(dataset, "inventory", ""))
        )
        self.counts = sizes = [len(dataset) for dataset in self.sets]
        self.starts = np.cumsum([0, *sizes])
        if split == "train" and (weights or size):
            shares = [weights[name] for name in self.names] if weights else sizes
            self.counts = split_by_weight(size or len(self), shares)
            for name, count in zip(self.names, self.counts):
                if not count:
                    raise UsageError(
                        f"data.args.weights.{name}: less than one of the {size or len(self):,} examples of an epoch; "
                        "give it a larger weight, or set a larger data.args.size"
                    )

    @staticmethod
    def has_split(args: Mapping[str, Any]) -> bool:
        sets = args.get("sets")
        return isinstance(sets, Mapping) and any(
            takes_split(f"{KEY}.{name}", entry) for name, entry in sets.items()
        )

    def __len__(self) -> int:
        return int(self.starts[-1])

    def widen(self) -> None:
        for dataset in self.sets:
            getattr(dataset, "widen", lambda: None)()
        self._copy_facts()

    def read(self, indices: np.ndarray) -> Batch:
        batch: Batch = {}
        for member, chosen, numbers in by_member(self.starts, indices):
            examples = dict(self.sets[member].read(numbers))
            if self.transform is not None:
                examples[MEMBER] = np.full(len(numbers), member, np.int32)
            for key, value in examples.items():
                value = np.asarray(value)
                if key not in batch:
                    batch[key] = np.empty((len(indices), *value.shape[1:]), value.dtype)
                batch[key][chosen] = value
        return batch

    def example_order(self, batch_size: int, microbatches: int, seed: int) -> ExampleOrder:
        sizes, counts = tuple(map(len, self.sets)), tuple(self.counts)
        return MixedOrder(sum(counts), batch_size, microbatches, seed, sizes=sizes, counts=counts)

    def _apply_transforms(self, batch: dict[str, Any], key: Any, train: bool) -> dict[str, Any]:
        """Apply the transform of each set to the microbatch, and select each example's by its set."""
        import jax
        import jax.numpy as jnp

        batch = dict(batch)
        if (owner := batch.pop(MEMBER, None)) is None:
            raise UsageError(
                f"{KEY}: the sets have transforms; give {MEMBER!r}, the number of each example's set, too"
            )
        each = [
            batch if transform is None else transform(batch, key, train)
            for transform in self.transforms
        ]
        shapes = [{k: (v.shape, v.dtype) for k, v in out.items()} for out in each]
        for name, shape in zip(self.names, shapes):
            if shape != shapes[0]:
                raise UsageError(
                    f"{KEY}: the transform of {name} gives {shape}, that of {self.names[0]} {shapes[0]}"
                )

        def select(selected, *others):
            owners = owner.reshape(-1, *[1] * (selected.ndim - 1))
            for i, other in enumerate(others, 1):
                selected = jnp.where(owners == i, other, selected)
            return selected

        return jax.tree.map(select, *each)

    def _copy_facts(self) -> None:
        """Copy what all sets must have in common. Raises UsageError that names the first set that
        differs.
        """
        self.class_names = next(filter(None, map(class_names, self.sets)), [])
        self.transforms = [getattr(dataset, "transform", None) for dataset in self.sets]
        one = self.sets[0]
        first = self._facts(one)
        for name, dataset in zip(self.names, self.sets):
            for fact, value in self._facts(dataset).items():
                if value != first[fact]:
                    raise UsageError(
                        f"{KEY}.{name}: {fact} {value!s:.200}, unlike {first[fact]!s:.200} of "
                        f"{self.names[0]}; make them alike"
                    )
        tokenizer = "tokenizer_spec" if hasattr(one, "tokenizer_spec") else "tokenizer"
        for attribute in ("classes", "input_shape", tokenizer):
            if hasattr(one, attribute):
                setattr(self, attribute, getattr(one, attribute))
        transformed = any(transform is not None for transform in self.transforms)
        self.transform = self._apply_transforms if transformed else None
        if transformed and MEMBER in first["examples of"]:
            raise UsageError(
                f"{KEY}: the examples have an entry {MEMBER!r}, which a mixture of sets with transforms adds; rename it"
            )

    def _facts(self, dataset: Dataset) -> dict[str, Any]:
        """Return what is the same for all sets, by its name in an error."""
        examples = read_examples(dataset, np.zeros(1, np.int64))
        return {
            "examples of": {k: (v.shape[1:], v.dtype.name) for k, v in sorted(examples.items())},
            "classes": getattr(dataset, "classes", None),
            "class names": class_names(dataset) or self.class_names,
            "the tokenizer": tokenizer_spec(dataset),
        }


@dataclass(frozen=True)
class MixedOrder(EpochOrder):
    """Batches of a mixture: counts[i] of the examples of an epoch are from set i, which has
    sizes[i].

    Position p of an epoch is a random one of its draws; draw d of a set is example d % size of pass
    d // size over it."""

    sizes: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    def _examples(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        places = super()._examples(epoch, positions)
        sizes, counts = np.array(self.sizes), np.array(self.counts)
        starts, ends = np.cumsum(sizes) - sizes, np.cumsum(counts)
        owners = np.searchsorted(ends, places, side="right")
        passes, positions = np.divmod(
            epoch * counts[owners] + places - (ends - counts)[owners], sizes[owners]
        )
        turns = passes * len(sizes) + owners  # a number for each pass over each set
        # Another key than the epoch's.
        return starts[owners] + permute_by_turn(positions, sizes[owners], ~self.seed, turns)


def make_set(key: str, entry: Any, split: str) -> Dataset:
    """Return the set that a key names. Raises UsageError that names the key."""
    source = entry
    if is_target(entry):
        make, args = locate_target(key, entry)
        source = call(key, bind(key, make, args, {"split": split})) if callable(make) else make
    try:
        dataset = as_dataset(source)
    except UsageError as error:
        raise UsageError(f"{key}: {error}") from None
    if hasattr(dataset, "require"):
        raise UsageError(
            f"{key}: a stream is read in its order, and a mixture reads by index; write files from it"
        )
    return dataset


def is_target(entry: Any) -> bool:
    return isinstance(entry, str) or (
        isinstance(entry, Mapping) and isinstance(entry.get("target"), str)
    )


def locate_target(key: str, entry: Any) -> tuple[Any, dict[str, Any]]:
    from jaxdp.data import SOURCES

    [(target, args)] = targets_in(key, [entry], "data set", "Digits")
    return locate(key, target, SOURCES), args


def takes_split(key: str, entry: Any) -> bool:
    return is_target(entry) and has_test_split(*locate_target(key, entry))


def has_test_split(make: Any, args: Mapping[str, Any]) -> bool:
    """Return whether `make(**args)` can read a test split, too."""
    has_split = getattr(make, "has_split", lambda args: True)
    return (
        callable(make)
        and "split" in parameters(make)
        and "split" not in args
        and has_split(arguments(make, args))
    )


def check_weights(
    sets: Collection[str], weights: Mapping[str, float] | None, kind: str = "set"
) -> None:
    """Raise UsageError unless there is one finite, positive weight for each set.

    kind: what they are, in an error.
    """
    if weights is None:
        return
    for name in [*sets, *weights]:
        if name not in sets:
            raise UsageError(
                f"data.args.weights.{name}: there is no such {kind}; it is one of {', '.join(sets)}"
            )
        weight = weights.get(name)
        if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 < weight < math.inf:
            raise UsageError(
                f"data.args.weights.{name}: {weight!r} is no weight; give this {kind} a positive number, or take it "
                "out of the data"
            )
    if math.isinf(sum(weights.values())):
        raise UsageError(
            f"data.args.weights: the sum of {[*weights.values()]} is not finite; make them smaller"
        )


def split_by_weight(size: int, weights: Sequence[float]) -> list[int]:
    """Split `size` in proportion to weights: the largest remainders are rounded up, so that the
    parts add to size.
    """
    shares = [size * (weight / math.fsum(weights)) for weight in weights]
    counts = [math.floor(x) for x in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[: size - sum(counts)]:
        counts[i] += 1
    return counts
