"""Batches are a pure function of (seed, step).

No iterator holds a position, so a resume needs a step number and nothing else, and a changed number of processes
neither skips nor repeats an example: which rows a process reads follows from the microbatches that it holds.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxdp.errors import UsageError

RESET = "reset"  # the entry of a batch [example] that says where what the model carries begins anew, with zeros
_WORD = (1 << 64) - 1
# A Feistel network is a permutation with any number of rounds; ten, as in NIST SP 800-38G (FF1), make small and odd
# domains look uniform too.
_ROUNDS = 10
_SPAN = 4096  # places of an epoch's order that are worked out together


def _mix(words: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer (Steele, Lea & Flood 2014), element by element on uint64 of any shape."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> np.ndarray:
    """One key a round, uint64[_ROUNDS]; seeds and epochs are hashed in turn, so that (1, 2) and (2, 1) differ."""
    key = np.zeros(1, np.uint64)  # an array, since NumPy warns where a scalar wraps around
    for word in (seed, epoch):
        key = _mix((key ^ np.uint64(int(word) & _WORD)) + np.uint64(0x9E3779B97F4A7C15))
    return _mix(key + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A keyed permutation of [0, 2**bits), uint64 of any shape; the halves may differ by one bit."""
    low_bits = np.uint64((bits + 1) // 2)
    high_bits = np.uint64(bits // 2)
    low_mask, high_mask = (np.uint64((1 << int(n)) - 1) for n in (low_bits, high_bits))
    low, high = values & low_mask, values >> low_bits
    for turn, key in enumerate(keys):
        if turn % 2:
            high = high ^ (_mix(low + key) & high_mask)
        else:
            low = low ^ (_mix(high + key) & low_mask)
    return (high << low_bits) | low


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Places in an epoch's order, int64 of any shape in [0, size), to examples: a bijection of [0, size).

    Constant time and memory per position, so no permutation is held and a set of 2**40 examples costs what a small
    one does. A Feistel network on the next power of two, walked until it lands inside: less than two passes
    on average (Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains", https://eprint.iacr.org/2001/012).
    """
    bits = (int(size) - 1).bit_length()
    keys = _round_keys(seed, epoch)
    values = _feistel(positions.astype(np.uint64), bits, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], bits, keys)
    return values.astype(np.int64)


@functools.lru_cache(maxsize=32)
def _dealt(slots: bytes, microbatches: int, places: int, examples: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows of a batch of so many examples, mask), each [slot, place] and not to be written to: the same every step."""
    dealt = np.frombuffer(slots, np.int64).reshape(-1, 1)
    if ((dealt < -1) | (dealt >= microbatches)).any():
        raise ValueError(f"slots: {dealt[:, 0].tolist()} are not all in [-1, {microbatches})")
    row = np.arange(places) * microbatches + dealt
    mask = (dealt >= 0) & (row < examples)
    row = np.where(mask, row, 0)
    for array in (row, mask):
        array.flags.writeable = False
    return row, mask


@functools.lru_cache(maxsize=8)
def _span(number: int, size: int, seed: int, epoch: int) -> np.ndarray:
    """`permute` of places `number` x _SPAN and on: a batch by itself costs ten times as much, in calls of NumPy."""
    return permute(np.arange(number * _SPAN, min((number + 1) * _SPAN, size)), size, seed, epoch)


@dataclass(frozen=True)
class Order:
    """Which examples each microbatch of each step holds.

    sequential: a row of one batch goes on in the same row of the next. size: examples in the set. batch_size: examples
    per update over all devices. microbatches: the pieces that a batch is dealt into, round-robin: row r belongs to
    microbatch `r % microbatches`, at place `r // microbatches`. The last batch of an epoch holds what is left. Raises
    UsageError where one of them is not positive.
    """

    size: int
    batch_size: int
    microbatches: int

    sequential: ClassVar[bool] = False

    def __post_init__(self):
        if self.size < 1:
            raise UsageError("data: the data set is empty; give it at least one example")
        for name in ("batch_size", "microbatches"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: {getattr(self, name)} is not positive; set it to 1 or more")

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.size // self.batch_size)

    @property
    def examples_per_step(self) -> float:
        """The real rows of a batch on average: an epoch's last may hold fewer."""
        return self.size / self.steps_per_epoch

    @property
    def examples_per_microbatch(self) -> int:
        """E, the places of a microbatch: those of the fullest one in a whole batch."""
        return -(-self.batch_size // self.microbatches)

    def examples(self, step: int) -> int:
        """The number of real rows in this step's batch: `batch_size`, or fewer in an epoch's last."""
        return min(self.batch_size, self.size - self._batch(step)[1])

    def begins(self, step: int) -> bool:
        """Whether this step's batch is the first of an epoch."""
        return not self._batch(step)[1]

    def rows(self, step: int, slots: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The examples of some microbatches: (indices[slot, E] int64, mask[slot, E] bool).

        slots: microbatch numbers in [0, microbatches), or -1 for an empty slot. A place without a row repeats the
        example of the batch's first row under mask False, so padding is always a real, finite example.
        """
        wanted = np.asarray(slots, np.int64).tobytes()
        row, mask = _dealt(wanted, self.microbatches, self.examples_per_microbatch, self.examples(step))
        return self._examples(step, row), mask

    def _examples(self, step: int, rows: np.ndarray) -> np.ndarray:
        """The examples of some rows of the step's batch."""
        raise NotImplementedError

    def _batch(self, step: int) -> tuple[int, int]:
        """(epoch, position of the batch's first row in the epoch's order)."""
        if step < 0:
            raise ValueError(f"step: {step} is negative")
        epoch, batch = divmod(step, self.steps_per_epoch)
        return epoch, batch * self.batch_size


@dataclass(frozen=True)
class Cursor(Order):
    """Batches of an order that is drawn anew for each epoch, from the seed; or, not shuffled, of that of the set."""

    seed: int = 0
    shuffle: bool = True

    def _examples(self, step: int, rows: np.ndarray) -> np.ndarray:
        epoch, first = self._batch(step)
        position = first + rows
        if not self.shuffle:
            return position
        if self.batch_size > _SPAN // 4:  # many at once cost no more apart, and other processes have most of them
            return permute(position, self.size, self.seed, epoch)
        at, end = first // _SPAN, (first + self.examples(step) - 1) // _SPAN
        span = _span(at, self.size, self.seed, epoch)
        if end > at:
            span = np.concatenate([span, _span(end, self.size, self.seed, epoch)])
        return span[position - at * _SPAN]


@dataclass(frozen=True)
class Streams(Order):
    """Batches of which row r is always the r-th of `batch_size` consecutive parts of the set, read in order.

    For models that carry state from batch to batch (truncated back-propagation through time). Parts differ by at most
    one example, the longer ones first, so that each epoch reads every example once.
    """

    sequential: ClassVar[bool] = True

    def _examples(self, step: int, rows: np.ndarray) -> np.ndarray:
        length, longer = divmod(self.size, self.batch_size)
        return rows * length + np.minimum(rows, longer) + self._batch(step)[1] // self.batch_size
