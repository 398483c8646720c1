"""A data set and the order that it is read in."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from jaxdp.core.state import Batch
from jaxdp.data.cursor import Order
from jaxdp.data.resident import Resident
from jaxdp.data.workers import Steps, prefetch_in_workers
from jaxdp.distributed.context import Context
from jaxdp.errors import UsageError
from jaxdp.parallel.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class Source:
    """A dataset and the order it is read in, by a thread, or by so many processes; or from the devices' own memory.

    check(examples): raises UsageError where the loss cannot take them; None where it has nothing to say.
    """

    dataset: Any
    cursor: Order
    workers: int = 0
    resident: Resident | None = None
    check: Callable[[Mapping[str, Any]], None] | None = None

    def read(self, number: int) -> dict[str, np.ndarray]:
        """Return the examples of batch `number`, of all processes; only while nothing else reads."""
        return self.dataset.read(self.indices(number))

    def indices(self, number: int) -> np.ndarray:
        """Return the indices of the examples of batch `number`, of all processes."""
        indices, rows = self.cursor.rows(number, np.arange(self.cursor.microbatches))
        return indices[rows]

    def examine(self, number: int, name: str, context: Context) -> None:
        """Raise UsageError, on every rank, where examples of batch `number` are why its loss is not finite."""
        problem = None
        try:
            if self.check is not None:
                self.check(self.read(number))
        except UsageError as error:
            problem = f"{error} (in {name})"
        context.agree(problem)

    def batches(
        self, start: int, stop: int, strategy: Strategy, groups: Iterable[Steps] | None = None
    ) -> AbstractContextManager[Iterator[tuple[Steps, Batch]]]:
        """This process's share of batches `start` to `stop - 1`, on its devices, read ahead: (step, batch).

        groups: these steps, in order, each by itself or several as a range; those are (range, batches[step, ...]).
        """
        if self.resident is not None:
            return self.resident.batches(self.cursor, range(start, stop) if groups is None else groups)

        def then(steps: Steps, batch: Any) -> tuple[Steps, Batch]:
            return steps, strategy.shard_batch(batch, isinstance(steps, range))

        return prefetch_in_workers(
            self.dataset, self.cursor, strategy.local_slots, start, stop, self.workers, then=then, groups=groups
        )


def describe(examples: Mapping[str, Any]) -> str:
    """Return what may explain a loss that is not finite: the range of integers, and where floats are not finite."""
    words = []
    for name, values in examples.items():
        values = np.asarray(values)
        if np.issubdtype(values.dtype, np.integer) and values.size:
            words.append(f"{name} from {values.min()} to {values.max()}")
        elif np.issubdtype(values.dtype, np.floating):
            bad = int((~np.isfinite(values)).reshape(len(values), -1).any(1).sum())
            words.append(f"{name} {f'not finite in {bad} examples' if bad else 'finite'}")
    return ", ".join(words)
