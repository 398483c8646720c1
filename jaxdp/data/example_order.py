"""The order of examples: each batch is a pure function of (seed, step).

No iterator stores a position: a resume needs only a step number. Changing the number of processes
neither skips nor repeats an example, because the rows that a process reads depend only on the
microbatches assigned to it."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxdp.errors import UsageError

# Entry [example] bool of a batch: True where the model's carried state is reset to zeros.
RESET = "reset"
_WORD = (1 << 64) - 1
# A Feistel network is a permutation with any number of rounds; ten, as in NIST SP 800-38G (FF1),
# make small and odd domains look uniform too.
_ROUNDS = 10
_SPAN = 4096  # positions of an epoch's order that are computed together and cached


def _mix(words: np.ndarray) -> np.ndarray:
    """Apply splitmix64's finalizer (Steele, Lea & Flood 2014) to each element of uint64 of any
    shape.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> np.ndarray:
    """Return one key per round, uint64[_ROUNDS]; hashes seed, then epoch, so that (1, 2) and (2, 1)
    differ.
    """
    key = np.zeros(1, np.uint64)  # an array, because NumPy warns when a scalar overflows
    for word in (seed, epoch):
        key = _mix((key ^ np.uint64(int(word) & _WORD)) + np.uint64(0x9E3779B97F4A7C15))
    return _mix(key + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """Permute values in [0, 2**bits), uint64 of any shape, by a keyed bijection; the halves may
    differ by one bit.
    """
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
    """Map positions in an epoch's order, int64 of any shape in [0, size), to examples: a bijection
    of [0, size).

    Takes constant time and memory per position, whatever `size` is: no permutation is stored. A
    Feistel network permutes the next power of two and is repeated until the value is below `size`:
    less than two passes on average (Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains",
    https://eprint.iacr.org/2001/012)."""
    bits = (int(size) - 1).bit_length()
    network: Any = functools.partial(_feistel, bits=bits, keys=_round_keys(seed, epoch))

    # Most of the time goes into starting NumPy's operations. So where many positions are asked
    # for, the network is computed once for all values, and looked up from then on.
    if 1 << bits <= 2 * positions.size:
        network = network(np.arange(1 << bits, dtype=np.uint64)).take
    values = network(positions.astype(np.uint64))
    while (outside := values >= size).any():
        values[outside] = network(values[outside])
    return values.astype(np.int64)


def permute_by_turn(
    positions: np.ndarray, sizes: np.ndarray, seed: int, turns: np.ndarray
) -> np.ndarray:
    """Map each position[k] in an order of its own, number turns[k], of sizes[k] examples; see
    `permute`.
    """
    indices = np.empty_like(positions)
    for turn in np.unique(turns).tolist():
        chosen = turns == turn
        indices[chosen] = permute(positions[chosen], int(sizes[chosen][0]), seed, turn)
    return indices


@functools.lru_cache(maxsize=8)
def _span(number: int, size: int, seed: int, epoch: int) -> np.ndarray:
    """Return `permute` of the _SPAN positions from `number` * _SPAN; one batch at a time is ten
    times slower.
    """
    return permute(np.arange(number * _SPAN, min((number + 1) * _SPAN, size)), size, seed, epoch)


@dataclass(frozen=True)
class ExampleOrder:
    """The assignment of examples to the microbatches of each step.

    sequential: row r of a batch continues row r of the batch before. size: examples in the set.
    batch_size: examples per update over all devices. microbatches: a batch is split into this many,
    round-robin: row r becomes row `r // microbatches` of microbatch `r % microbatches`. The last
    batch of an epoch may be smaller. Raises UsageError."""

    size: int
    batch_size: int
    microbatches: int

    sequential: ClassVar[bool] = False

    def __post_init__(self):
        if self.size < 1:
            raise UsageError("data: the data set is empty; give it at least one example")
        for name in ("batch_size", "microbatches"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"{name}: {getattr(self, name)} is not positive; set it to 1 or more"
                )

    @property
    def steps_per_epoch(self) -> int:
        return self.updates(1)

    @property
    def examples_per_microbatch(self) -> int:
        """Return E, the padded size of a microbatch: the size of the largest microbatch of a full
        batch.
        """
        return -(-self.batch_size // self.microbatches)

    def updates(self, epochs: float) -> int:
        """Return the number of updates in so many epochs."""
        return math.ceil(epochs * -(-self.size // self.batch_size))

    def average(self, step: int) -> float:
        """Return the average number of real rows in batches of the step's size: the last batch of an
        epoch may have fewer.
        """
        size, *_ = self.place(step)
        return self.size / -(-self.size // size)

    def place(self, step: int) -> tuple[int, int, int]:
        """Return (batch size, epoch, position of the batch's first row in the epoch's order)."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return self.batch_size, epoch, batch * self.batch_size

    def rows(self, step: int, numbers: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the examples of the local microbatches: (indices[local, E] int64, mask[local, E]
        bool).

        numbers: of the microbatches, in [0, microbatches), or -1 for none. Padding rows repeat the
        example of the batch's first row with mask False, so padding is always a real, finite
        example. A microbatch of padding alone repeats microbatch 0: the gradient of a deviation
        between equal examples would be NaN."""
        size, epoch, start = self.place(step)
        count = min(size, self.size - start)
        number = np.asarray(numbers, np.int64)[:, None]
        first = np.arange(0, size, self.microbatches)
        mask = (number >= 0) & (first + number < count)
        row = first + np.where(mask[:, :1], number, 0)
        return self._examples(epoch, start + np.where(row < count, row, 0)), mask

    def batch(self, step: int) -> np.ndarray:
        """Return the examples of the step's batch, of all microbatches, in the order of its rows."""
        indices, mask = self.rows(step, range(self.microbatches))
        return indices.T[mask.T]

    def _examples(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the examples at some positions in the order of an epoch, those of one batch."""
        raise NotImplementedError


@dataclass(frozen=True)
class EpochOrder(ExampleOrder):
    """Batches in a new random order each epoch, derived from the seed; with shuffle=False in the
    data set's order.
    """

    seed: int = 0
    shuffle: bool = True

    def _examples(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        if not self.shuffle or not positions.size:
            return positions
        # Large batches gain nothing from spans, which cover other processes' rows too.
        if self.batch_size > _SPAN // 4:
            return permute(positions, self.size, self.seed, epoch)
        first, last = positions.min() // _SPAN, positions.max() // _SPAN
        spans = [_span(k, self.size, self.seed, epoch) for k in range(first, last + 1)]
        return np.concatenate(spans)[positions - first * _SPAN]


@dataclass(frozen=True)
class Streams(ExampleOrder):
    """Batches for models with carried state: row r reads part r of `batch_size` consecutive parts
    of the set, in order.

    This is truncated back-propagation through time. The lengths of the parts differ by at most one
    example, longer parts first; each epoch reads every example once.
    """

    sequential: ClassVar[bool] = True

    def _examples(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        length, longer = divmod(self.size, self.batch_size)
        batches, rows = np.divmod(positions, self.batch_size)
        return rows * length + np.minimum(rows, longer) + batches


def order_of(
    dataset: Any, batch_size: int, microbatches: int, seed: int, shuffle: bool = True
) -> ExampleOrder:
    """Return the dataset's `example_order(batch_size, microbatches, seed)` if it has one, else an
    `EpochOrder`. shuffle: False for an evaluation, which reads the examples by index, each once."""
    make = getattr(dataset, "example_order", None)
    if shuffle and make is not None:
        return make(batch_size, microbatches, seed)
    return EpochOrder(len(dataset), batch_size, microbatches, seed if shuffle else 0, shuffle)
