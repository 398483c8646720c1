"""An order of examples whose batch size changes."""

import bisect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxdp.data.example_order import ExampleOrder


@dataclass(frozen=True)
class Staged(ExampleOrder):
    """The epochs of another order, cut into batches of other sizes.

    batch_size: the largest. order: has the example at each position of an epoch. batch_sizes: {the
    first step with a batch size: the size}; one of these steps is 0. Each epoch still ends with a
    batch that may be smaller, and the next one begins with a batch of its own.
    """

    order: ExampleOrder
    batch_sizes: Mapping[int, int]

    def place(self, step: int) -> tuple[int, int, int]:
        epoch = first = size = 0
        starts = sorted(start for start in self.batch_sizes if start <= step)
        for start, end in itertools.pairwise([*starts, step]):
            size = self.batch_sizes[start]
            # Count as if all batches had this size, from the end of the epoch that another has
            # begun: `first` is then `shift` positions from where batch `number` would begin.
            per_epoch = -(-self.size // size)
            number = (epoch + 1) * per_epoch + (first - self.size) // size
            begun, shift = epoch, first - number % per_epoch * size
            epoch, batch = divmod(number + end - start, per_epoch)
            first = batch * size + shift * (epoch == begun)
        return size, epoch, first

    def updates(self, epochs: float) -> int:
        """Return the first step before which `epochs` times the examples of an epoch are read."""

        def read(step: int) -> int:
            _, epoch, first = self.place(step)
            return epoch * self.size + first

        examples = math.ceil(epochs * self.size)
        return bisect.bisect_left(range(examples), examples, key=read)

    def _examples(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return self.order._examples(epoch, positions)
