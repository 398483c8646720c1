"""A dataset and the order in which it is read."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdp.data.dataset import first_example
from jaxdp.data.example_order import ExampleOrder
from jaxdp.data.resident import Resident
from jaxdp.data.stream import Stream, StreamEnded
from jaxdp.data.workers import prefetch_in_workers, single_steps
from jaxdp.errors import DistributedError, GenerationEnded, UsageError
from jaxdp.parallel.strategy import Program, Strategy
from jaxdp.process import protocol
from jaxdp.process.context import SLOW, Context
from jaxdp.train.run import Record, Run
from jaxdp.train.state import Batch

SHOWN = 8  # indices of examples in a message
OVERFLOW = (
    "its examples are finite, so the model, a transform or the loss computes such a number from some of them: training "
    "has diverged (lower optimizer.lr, set clip_norm), or precision.compute is too narrow"
)


@dataclasses.dataclass(frozen=True)
class Source:
    """A dataset and its order, read by a thread, by `workers` processes, or from device memory
    (`resident`).

    check(examples): raise UsageError if the loss does not accept them; None: no check. program():
    the programs that evaluate it, if its transform is not that of the run's first evaluation set.
    context: of the processes that read it together.
    """

    dataset: Any
    order: ExampleOrder
    workers: int = 0
    resident: Resident | None = None
    check: Callable[[Mapping[str, Any]], None] | None = None
    program: Callable[[], Program] | None = None
    context: Context = Context()

    def read(self, number: int) -> dict[str, np.ndarray]:
        """Read the examples of batch `number`, of all processes; no other thread may read at the
        same time.
        """
        return self.dataset.read(self.order.batch(number))

    def end(self, number: int) -> str | None:
        """Return why a stream has no batch `number`, or None if there is one."""
        try:
            if isinstance(self.dataset, Stream):
                self.dataset.require(self.order.batch(number))
        except StreamEnded as error:
            return str(error)
        return None

    def examine(self, number: int, name: str) -> None:
        """Raise UsageError, on every rank, if examples of batch `number` explain its non-finite
        loss.
        """
        problem = None
        try:
            if self.check is not None:
                self.check(self.read(number))
        except UsageError as error:
            problem = f"{error} (in {name})"
        self.context.agree(problem)

    def find_not_finite(self) -> str:
        """Return in words which examples have values that are not finite, or that the mask excludes
        all; else "".
        """
        first = first_example(self.dataset)
        if "mask" not in first and not any(
            jnp.issubdtype(x.dtype, jnp.inexact) for x in first.values()
        ):
            return ""  # integers
        rows = dict[str, list[int]]()
        counted = False
        for number in range(self.order.steps_per_epoch):
            examples = {name: np.asarray(x) for name, x in self.read(number).items()}
            indices = self.order.batch(number)
            mask = examples.get("mask", np.ones(len(indices))).reshape(len(indices), -1).any(1)
            counted |= bool(mask.any())
            for name, values in examples.items():
                if jnp.issubdtype(values.dtype, jnp.inexact):
                    wrong = ~np.isfinite(values).reshape(len(values), -1).all(1) & mask
                    rows[name] = rows.get(name, []) + indices[wrong].tolist()
        if not counted:
            return "its mask is 0 in all examples, so none counts; give it some with a mask of 1"
        texts = [f"{name} not finite in {numbered(sorted(x))}" for name, x in rows.items() if x]
        return f"{', '.join(texts)}; correct them, or set their mask to 0" if texts else ""

    @contextlib.contextmanager
    def batches(
        self, start: int, stop: int, strategy: Strategy, groups: Iterable[range] | None = None
    ) -> Iterator["Batches"]:
        """Prefetch batches `start` to `stop - 1`: iterate over (steps, this process's share on its
        devices).

        groups: the same steps in order, in ranges, by default of one each; one of several gives
        batches[step, ...]."""
        groups = single_steps(range(start, stop)) if groups is None else groups

        def then(steps, batch):
            return steps, strategy.shard_batch(batch, len(steps) > 1)

        if self.resident is not None:
            reader = self.resident.batches(self.order, groups)
        else:
            numbers, local = range(start, stop), strategy.local_microbatches
            reader = prefetch_in_workers(
                self.dataset, self.order, local, numbers, self.workers, then, groups
            )
        with reader as items:
            yield Batches(items, self.context)


@dataclasses.dataclass
class Batches:
    """Batches, until a stream ends before one of them on all processes.

    ended: why the stream has no further batch, "" as long as it has.
    """

    items: Iterator[tuple[range, Batch]]
    context: Context
    ended: str = ""

    def __iter__(self) -> Iterator[tuple[range, Batch]]:
        """Raise UsageError if the stream ends on some of the processes only: the others wait for
        them in the batch's update."""
        last = "no batch"
        try:
            for numbers, batch in self.items:
                yield numbers, batch
                last = str(numbers)
        except StreamEnded as error:
            self.ended = str(error)
            self._agree(last)

    def _agree(self, last: str) -> None:
        timeout = protocol.default_timeout(None)
        try:
            every = self.context.exchange("the end of the stream", last, timeout)
        except GenerationEnded:
            raise
        except DistributedError as missing:
            every = [missing.texts.get(rank, "") for rank in range(self.context.size)]
        if others := [str(rank) for rank, text in enumerate(every) if text != last]:
            raise UsageError(
                f"{self.ended}, but continues on rank {', '.join(others)}; let the source yield the "
                "same examples on every rank"
            ) from None


def loss_of(name: str) -> str:
    """Return the name of the loss of an evaluation set in a record."""
    return f"{name}/loss" if name else "loss"


def not_finite(run: Run, record: Record) -> tuple[str, bool] | None:
    """Return, on every rank, why a loss of an evaluation is not finite, and whether its examples
    are the cause; None if all losses are finite. Reads the examples again."""
    names = [name for name in run.data.eval if not math.isfinite(record[loss_of(name)])]
    if not names:
        return None
    context, texts = run.checkpoints.context, []
    for name in names:
        cause = run.data.eval[name].find_not_finite()
        # a process may have read another file
        causes = context.exchange("the evaluation data", cause, SLOW)
        rank = next((rank for rank, text in enumerate(causes) if text), 0)
        cause = f"{context.title(rank)}: {causes[rank]}" if len({*causes}) > 1 else causes[rank]
        where = f"the evaluation set {name!r}" if name else "the evaluation data"
        text = f"the loss of {where} is {record[loss_of(name)]}: {cause or OVERFLOW}"
        texts.append((text, bool(cause)))
    return next((text for text in texts if text[1]), texts[0])


def numbered(indices: list[int]) -> str:
    """Return "examples 3, 5, ..." with the first indices and the number of the others."""
    more = f" and {len(indices) - SHOWN} more" if indices[SHOWN:] else ""
    return f"example{'s' * (len(indices) > 1)} {', '.join(map(str, indices[:SHOWN]))}{more}"


def describe(examples: Mapping[str, Any]) -> str:
    """Describe a batch whose loss is not finite: the range of its integers, and examples with
    non-finite floats.
    """
    words = []
    for name, values in examples.items():
        values = np.asarray(values)
        if name == "mask" and not values.any():
            words.append("mask 0 in all examples")
        elif np.issubdtype(values.dtype, np.integer) and values.size:
            words.append(f"{name} from {values.min()} to {values.max()}")
        elif np.issubdtype(values.dtype, np.floating):
            bad = int((~np.isfinite(values)).reshape(len(values), -1).any(1).sum())
            words.append(f"{name} {f'not finite in {bad} examples' if bad else 'finite'}")
    return ", ".join(words)
