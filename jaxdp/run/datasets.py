"""The data of a config: datasets, the transform, the order of examples, and the source that reads
them in this order. `jaxdp data check` lists what cannot be read."""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.config import Config
from jaxdp.config.training import Target
from jaxdp.config.values import Epochs
from jaxdp.data import SOURCES
from jaxdp.data.check import Finding, check_dataset
from jaxdp.data.dataset import (
    PROBES,
    UNKNOWN,
    Arrays,
    Dataset,
    as_dataset,
    check_dtypes,
    check_labels,
    class_names,
    first_example,
    tokenizer_spec,
)
from jaxdp.data.example_order import ExampleOrder, Streams, order_of
from jaxdp.data.mixture import Mixture, has_test_split, is_target
from jaxdp.data.prefetch import read_ahead, read_noted
from jaxdp.data.resident import Resident
from jaxdp.data.stream import Stream, StreamEnded
from jaxdp.data.windows import Windows
from jaxdp.data.workers import prefetch_in_workers, single_steps
from jaxdp.errors import DistributedError, GenerationEnded, UsageError, one_line
from jaxdp.parallel.strategy import Program, Strategy
from jaxdp.process import protocol
from jaxdp.process.context import SLOW, Context
from jaxdp.targets import Table, bind, call, locate, targets_in
from jaxdp.train.run import Record, Run
from jaxdp.train.state import Batch
from jaxdp.train.step import Forward, first_microbatch


def make_data(
    config: Config, sources: Table = SOURCES, eval_sources: Table = SOURCES
) -> tuple[Dataset, dict[str, Dataset]]:
    """Return (the training set, the evaluation sets by name; "" is that of `eval.data`, or of the
    training data).
    """
    x64 = config.precision.params == "float64"
    dataset = read_set("data", config.data, "train", x64, sources)
    sets: dict[str, Dataset] = {}
    if config.eval.data is not None:
        sets[""] = read_set("eval.data", config.eval.data, "test", x64, eval_sources)
    elif has_test_split(locate("data", config.data.target, sources), config.data.args):
        sets[""] = read_set("data", config.data, "test", x64, sources)
    for name, target in named_sets(config).items():
        sets[name] = read_set(f"eval.also.{name}", target, "test", x64, SOURCES)
    for name, other in sets.items():
        check_meaning(eval_key(name), dataset, other)
    return dataset, sets


def eval_key(name: str) -> str:
    """Return the key of the config of an evaluation set."""
    return f"eval.also.{name}" if name else "eval.data"


def check_meaning(key: str, dataset: Dataset, other: Dataset) -> None:
    """Raise UsageError if an evaluation set has other ids for the same text, or labels for the same
    classes.
    """
    names, others = map(class_names, (dataset, other))
    for label, its in enumerate(others if names else []):
        if (name := names[label] if label < len(names) else None) != its:
            raise UsageError(
                f"{key}: label {label} is {its!r}, but {name!r} in the training data; make them alike"
            )
    if getattr(dataset, "encoding", None) != getattr(other, "encoding", None):
        raise UsageError(
            f"{key}: it encodes or standardizes its inputs by values of its own, not by those of the training data, so "
            "the model would read something else; leave it out, and set data.args.table: {train: TABLE, test: TABLE}, "
            "or put all rows into one table"
        )
    one, two = ({**(tokenizer_spec(x) or {}), "path": None} for x in (dataset, other))
    if one != two and len(one) > 1 < len(two):
        raise UsageError(
            f"{key}: its tokenizer ({two.get('kind')}) differs from that of the training data ({one.get('kind')}), so "
            "the same text has other token ids; use the same file, byte, or a spec with the alphabet of both"
        )


def named_sets(config: Config) -> dict[str, Target]:
    """Return the targets of `eval.also`. Raises UsageError if an entry or its name is malformed."""
    for name in config.eval.also:
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
            raise UsageError(
                f"eval.also: {name!r} is not a name; use letters, digits, - and _, such as valid"
            )
    sets = dict[str, Target]()
    for name, entry in config.eval.also.items():
        [parts] = targets_in(f"eval.also.{name}", [entry], "data set", "Digits")
        sets[name] = Target(*parts)
    return sets


def read_set(key: str, target: Target, split: str, x64: bool, sources: Table) -> Dataset:
    """Return the dataset of a target: a callable that returns one, or a sized sequence of examples."""
    source = locate(key, target.target, sources)
    if not callable(source) and not hasattr(source, "__len__"):
        raise UsageError(
            f"{key}.target: {target.target!r} is {type(source).__name__}, neither examples nor a function that "
            "returns them"
        )
    make = bind(key, source, target.args, {"split": split}) if callable(source) else None
    args = getattr(make, "keywords", {})
    stored = args.get("path", args.get("root"))
    path = f" in {stored!r}" if isinstance(stored, str) else ""
    name = f"the {args.get('split', split)} split of {target.target}{path}"
    try:
        made = source if make is None else call(key, make)
        if made is None:
            raise UsageError(f"data: {name} is None; return the examples")
        check_dtypes(dataset := as_dataset(made), x64)
        if len(dataset) < UNKNOWN:
            check_labels(
                lambda rows: dataset.read(rows).get("labels", ()), len(dataset), f"data: {name}"
            )
    except UsageError as error:  # sources name the key of the training data
        text = re.sub(r"^data\b", key, str(error))
        raise UsageError(f"{text} ({name})") from error.__cause__
    if split == "test" and len(dataset) >= UNKNOWN:
        raise UsageError(
            f"{key}.args.size: a stream needs it to be evaluated; set it to a number of examples"
        )
    return dataset


def facts_of(dataset: Dataset) -> dict[str, Any]:
    """Return facts about the data that a model may need, as JSON: input_shape, num_classes, the
    tokenizer's spec.
    """
    first = first_example(dataset)
    shape = first.get("inputs", next(iter(first.values()))).shape[1:]
    spec = tokenizer_spec(dataset)
    if spec and "path" in spec:
        spec = {**spec, "path": os.path.abspath(spec["path"])}
    return {
        "input_shape": list(getattr(dataset, "input_shape", shape)),
        "num_classes": int(getattr(dataset, "classes", 0)),
        "tokenizer": spec,
    }


def shapes_of_model(forward: Forward, dataset: Dataset, size: int) -> tuple[Any, Any]:
    """Return the shapes of a model's parameters and of its state, made from `size` examples.

    Its `init` is called as in `init_state`, so that JAX traces it once for both.
    """
    example = first_example(dataset)

    def init():
        inputs = first_microbatch(example, size, forward.transform)
        return forward.model.init(jax.random.key(forward.seed), forward.policy.inputs(inputs))

    return jax.eval_shape(init)


def make_order(
    config: Config, dataset: Dataset, sequential: bool, shuffle: bool = True
) -> ExampleOrder:
    """Return the order: which examples each microbatch of each step contains."""
    if len(dataset) >= UNKNOWN and config.epochs is not None:
        raise UsageError(
            f"epochs: {config.epochs}, but the stream's length is unknown; set steps, or data.args.size"
        )
    if not sequential:
        return order_of(dataset, config.largest_batch, config.microbatches, config.seed, shuffle)
    return sequential_order(config, dataset, shuffle)


def in_updates(key: str, every: int | Epochs | None, order: ExampleOrder) -> int | None:
    """Return the value of a key, such as `eval.every`, in updates. order: of the training data.

    Raises UsageError for epochs of a stream of unknown length, or of batches whose size changes."""
    if not isinstance(every, str):
        return every
    if cause := (
        "the stream's length is unknown; give a number of updates, such as 1000, or set data.args.size"
        * (order.size >= UNKNOWN)
        or "batch_size changes; give a number of updates, such as 1000"
        * hasattr(order, "batch_sizes")
    ):
        raise UsageError(
            f"{key}: {every}, but {cause}",
            rank=0,
        )
    return int(every.split()[0]) * order.steps_per_epoch


def sequential_order(config: Config, dataset: Dataset, shuffle: bool) -> Streams:
    """Return the order in which rows continue from batch to batch. shuffle: it is for training."""
    if len(dataset) >= UNKNOWN or (shuffle and hasattr(dataset, "example_order")):
        raise UsageError(
            f"data.order: {config.data.target} defines its own order, not the sequential one that the model's "
            "carried state needs; set it to shuffled, and give the examples a true 'reset' to begin at zero"
        )
    chosen = config.data.order is not None
    if not chosen and isinstance(dataset, Windows) and dataset.stride != dataset.length:
        fix = f"for a model with carried state, set it to length: {dataset.length}"
        raise UsageError(
            f"data.args.stride: {dataset.stride}: windows do not follow one another in the text; {fix}"
        )
    return Streams(len(dataset), config.largest_batch, config.microbatches)


def shapes_of(dataset: Dataset) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return {name: (shape [1, ...], dtype)} of an example."""
    return {k: (v.shape, v.dtype) for k, v in first_example(dataset).items()}


SHOWN = 8  # indices of examples in a message
OVERFLOW = (
    "its examples are finite, so the model, a transform or the loss computes such a number from some of them: training "
    "has diverged (lower optimizer.lr, set clip_norm), or precision.compute is too narrow"
)


@dataclasses.dataclass(frozen=True)
class Source:
    """A dataset and its order, read by this process, by `workers` processes, or from device
    memory (`resident`).

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

    def find_not_finite(self, numbers: Iterable[int] | None = None) -> str:
        """Return in words which examples of these batches, by default of all, have values that are not
        finite, or that the mask excludes all; else "".
        """
        first = first_example(self.dataset)
        if "mask" not in first and not any(
            jnp.issubdtype(x.dtype, jnp.inexact) for x in first.values()
        ):
            return ""  # integers
        # Of a file. Other data sets may call anything `rows`.
        stored = self.dataset.rows if isinstance(self.dataset, Arrays) else None
        rows = dict[str, list[int]]()
        counted = False
        for number in numbers or range(self.order.steps_per_epoch):
            examples = {name: np.asarray(x) for name, x in self.read(number).items()}
            indices = self.order.batch(number)
            if stored is not None:
                indices = stored[indices]
            mask = examples.get("mask", np.ones(len(indices))).reshape(len(indices), -1).any(1)
            counted |= bool(mask.any())
            for name, values in examples.items():
                if jnp.issubdtype(values.dtype, jnp.inexact):
                    wrong = ~np.isfinite(values).reshape(len(values), -1).all(1) & mask
                    rows[name] = rows.get(name, []) + indices[wrong].tolist()
        if not counted:
            return "its mask is 0 in all examples, so none counts; give it some with a mask of 1"
        texts = [
            f"{name} not finite in {numbered(sorted({*x}), 'example' if stored is None else 'row')}"
            for name, x in rows.items()
            if x
        ]
        return f"{', '.join(texts)} (counted from 0); correct them, or set their mask to 0" * bool(
            texts
        )

    @contextlib.contextmanager
    def batches(
        self, start: int, stop: int, strategy: Strategy, groups: Iterable[range] | None = None
    ) -> Iterator["Batches"]:
        """Prefetch batches `start` to `stop - 1`: iterate over (steps, this process's share on its
        devices).

        groups: the same steps in order, in ranges, by default of one each; one of several gives
        batches[step, ...]."""
        steps = range(start, stop)

        def then(steps, batch):
            return steps, strategy.shard_batch(batch, len(steps) > 1)

        groups = groups or single_steps(steps)
        local = strategy.local_microbatches
        if self.resident is not None:
            reader = self.resident.batches(self.order, groups)
        elif self.workers:
            reader = prefetch_in_workers(
                self.dataset, self.order, local, steps, self.workers, then, groups
            )
        else:

            def read(steps):
                return then(steps, read_noted(self.dataset, self.order, local, steps))

            reader = contextlib.closing(read_ahead(read, groups))
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


def numbered(indices: list[int], word: str) -> str:
    """Return "rows 3, 5, ..." with the first indices and the number of the others."""
    more = f" and {len(indices) - SHOWN} more" if indices[SHOWN:] else ""
    return f"{word}{'s' * (len(indices) > 1)} {', '.join(map(str, indices[:SHOWN]))}{more}"


def check_config(config: Config) -> Iterator[Finding]:
    """Yield the findings about the training set, and the evaluation sets, of a config."""
    yield from check_target("data", config.data, "train")
    if config.eval.data is not None:
        yield from check_target("eval.data", config.eval.data, "test")
    elif has_test_split(locate("data", config.data.target, SOURCES), config.data.args):
        yield from check_target("data, split test", config.data, "test")
    for name, target in named_sets(config).items():
        yield from check_target(f"eval.also.{name}", target, "test")


def check_target(key: str, target: Target, split: str) -> Iterator[Finding]:
    """Yield the findings about a data set; of a mixture, about each of its sets."""
    try:
        source = locate(key, target.target, SOURCES)
        sets = target.args.get("sets") if source is Mixture else None
        if not isinstance(sets, dict):
            examples = (
                call(key, bind(key, source, target.args, {"split": split}))
                if callable(source)
                else source
            )
            dataset = as_dataset(examples)
            findings = [*check_dataset(dataset, key)]
            yield from findings
            if not any(finding.problem for finding in findings) and len(dataset) < UNKNOWN:
                read = Source(dataset, order_of(dataset, PROBES, 1, 0, False))
                if text := read.find_not_finite():
                    yield Finding(f"{key}: {text}")
            return
        for name, entry in sets.items():
            if not is_target(entry):
                raise UsageError(f"{key}.args.sets.{name}: {entry!r} is no target")
            [parts] = targets_in(f"{key}.args.sets.{name}", [entry], "data set", "Digits")
            yield from check_target(f"{key}.args.sets.{name}", Target(*parts), split)
    except Exception as error:
        text = (
            one_line(error)
            if isinstance(error, UsageError)
            else f"{type(error).__name__}: {one_line(error)}"
        )
        yield Finding(f"{key}: {text.removeprefix('data: ')}")
