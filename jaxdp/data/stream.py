"""Streams: examples in the order of an iterable, addressed by their position, so that a run can
resume at any update.

Position p is row p % batch_size of update p // batch_size, whose microbatch and device are those of
any data set. Every process iterates over the records of all; only the process that computes a row
decodes it."""

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxdp.data.dataset import PROBES, UNKNOWN, Batch, Examples, check_split
from jaxdp.data.example_order import EpochOrder, ExampleOrder, permute_by_turn
from jaxdp.errors import UsageError, check_sizes
from jaxdp.targets import bind, call, locate, parameters


class StreamEnded(UsageError):
    """The stream has no example at a position that a batch needs."""


class Stream(Examples):
    """The examples of an iterable of unknown length.

    source: a function, a class or its dotted path; a call with `args` returns an iterable of
    examples (dicts, pairs or arrays), the same ones in each call. If it has an argument `start`, it
    is called with a position and must begin there; otherwise the examples before it are read and
    dropped. decode: a function, or its dotted path, that turns what the iterable yields into an
    example; each process applies it to its own rows only. shuffle: permute each block of this many
    examples; each process has up to two blocks, not decoded, in memory. size: the examples of an
    epoch, after which the stream begins again; None: it is read once. split: passed to the source
    if it accepts it.

    A batch that the stream cannot fill ends the training; it is not used. Raises UsageError for a
    source that is empty, not iterable, or shorter than `size`.
    """

    def __init__(
        self,
        source: Any,
        args: Mapping[str, Any] | None = None,
        size: int | None = None,
        shuffle: int = 1,
        decode: Any = None,
        split: str = "train",
    ):
        check_split(split)
        check_sizes("data.args", size=size, shuffle=shuffle)
        make, decode = located("source", source), located("decode", decode)
        if not callable(make):
            raise UsageError(
                f"data.args.source: {type(make).__name__} is not a function or a class that returns an iterable; a "
                "stream is opened again when a run resumes"
            )
        bound = bind("data.args", make, args or {}, {"split": split})
        self.block = shuffle
        self.records = Records(bound, "start" in parameters(make), decode, size, shuffle)
        self.records.fetch(0, min(PROBES, size or PROBES) - 1)
        self.read_ahead = min(PROBES, len(self.records.buffer))
        if not self.read_ahead:
            raise UsageError("data.args.source: the stream is empty; give it at least one example")
        super().__init__(self.records)

    @staticmethod
    def has_split(args: Mapping[str, Any]) -> bool:
        make = located("source", args.get("source"))
        return callable(make) and "split" in parameters(make)

    def read(self, indices: np.ndarray) -> Batch:
        with self.records.lock:
            if len(indices):
                self.records.fetch(int(indices.min()), int(indices.max()))
            return super().read(indices)

    def require(self, indices: np.ndarray) -> None:
        """Raise StreamEnded if the stream ends before any of the examples of a batch, those of all
        processes.
        """
        with self.records.lock:
            self.records.fetch(int(indices.min()), int(indices.max()))
            self.records.check(int(indices.max()))

    def example_order(self, batch_size: int, microbatches: int, seed: int) -> ExampleOrder:
        return StreamOrder(
            len(self), batch_size, microbatches, seed, shuffle=self.block > 1, block=self.block
        )


@dataclass
class Records:
    """A window of an iterable's records, which moves forward; opens the iterable again to move
    back.

    make(start) or make() returns the iterable. The other arguments are those of `Stream`. first: the
    position of buffer[0]. lock: a reader of an earlier run may not have ended yet."""

    make: Callable[..., Any]
    has_start: bool
    decode: Any
    size: int | None
    block: int
    iterator: Iterator[Any] | None = None
    buffer: list[Any] = field(default_factory=list)
    first: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __len__(self) -> int:
        return UNKNOWN if self.size is None else self.size

    def __getitem__(self, index: int) -> Any:
        if index < self.first:
            self.fetch(index, index)
        self.check(index)
        record = self.buffer[index - self.first]
        return record if self.decode is None else self.decode(record)

    def check(self, index: int) -> None:
        """Raise StreamEnded, or UsageError if a size was set, if the iterable ended before `index`."""
        if index >= (end := self.first + len(self.buffer)):
            if self.size is not None:
                raise UsageError(
                    f"data.args.size: {self.size:,}, but the stream ends after {end:,}; make it smaller"
                )
            raise StreamEnded(f"data: the stream ends after {end:,} examples")

    def fetch(self, first: int, last: int) -> None:
        """Move the window to the blocks of positions first to last; it is shorter if the iterable
        ends before.
        """
        first = first // self.block * self.block
        stop = min((last // self.block + 1) * self.block, len(self))
        # Only the first examples were read so far.
        resumes = self.has_start and not self.first and first > len(self.buffer)
        if self.iterator is None or first < self.first or resumes:
            self.iterator, self.first, self.buffer = self._open(first), first, []
        stale = min(first - self.first, len(self.buffer))
        del self.buffer[:stale]
        self.first += stale
        for _ in itertools.islice(self.iterator, first - self.first):
            self.first += 1
        if self.first == first:
            self.buffer += itertools.islice(self.iterator, max(0, stop - first - len(self.buffer)))

    def _open(self, start: int) -> Iterator[Any]:
        iterable = call(
            "data.args", functools.partial(self.make, start=start) if self.has_start else self.make
        )
        if not isinstance(iterable, Iterable):
            raise UsageError(
                f"data.args.source: it returned a {type(iterable).__name__}, which is not iterable"
            )
        return itertools.islice(iterable, 0 if self.has_start else start, None)

    def __reduce__(self) -> tuple:
        """Drop the open iterable: another process opens its own."""
        return Records, (self.make, self.has_start, self.decode, self.size, self.block)


@dataclass(frozen=True)
class StreamOrder(EpochOrder):
    """Batches in the stream's order, each block of `block` positions permuted."""

    block: int = 1

    def _examples(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        if not self.shuffle:
            return positions
        blocks = positions // self.block
        starts, turns = blocks * self.block, epoch * -(-self.size // self.block) + blocks
        sizes = np.minimum(self.block, self.size - starts)
        return starts + permute_by_turn(positions - starts, sizes, self.seed, turns)


def located(name: str, value: Any) -> Any:
    """Return what the dotted path names in the argument `name`; anything else as it is."""
    key = f"data.args.{name}"
    return locate(key, value, {}, key) if isinstance(value, str) else value
