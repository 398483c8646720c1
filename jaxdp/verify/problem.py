"""What is verified: the parts of a run, and the small batches that they are tried on."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.data.dataset import Dataset
from jaxdp.data.example_order import ExampleOrder
from jaxdp.data.prefetch import read_batch
from jaxdp.errors import UsageError
from jaxdp.parallel.strategy import Strategy
from jaxdp.precision import cast_floats
from jaxdp.process import hosts
from jaxdp.targets import attribute
from jaxdp.train.step import Forward, Step, UpdateRule, first_microbatch
from jaxdp.verify.configurations import Configuration

OK, FAILED, NOTE, SKIPPED, REFUSED = "ok", "FAILED", "note", "skipped", "refused"
Tree = Any
Arrays = dict[str, np.ndarray]
# a process that computes something: () -> the result, or a text that tells why it failed
Other = AbstractContextManager[Callable[[], Any]]
# per microbatch; with two, a BatchNorm without pixels to average over has no gradient to compare
MOST_EXAMPLES = 4


class Check(NamedTuple):
    """verdict: OK, FAILED, NOTE or SKIPPED; FAILED alone means that the problem is not verified."""

    name: str
    verdict: str
    text: str


@dataclasses.dataclass(frozen=True)
class Problem:
    """The parts of a run.

    Args:
        rule: factor -> how to update at that factor of the peak learning rate, from the first
            update on.
        schedule: () -> the run's learning rate, step -> value.
        eval_sets: the evaluation sets by name.
        order: in which the run reads its data.
        configuration: the configuration of the run itself.
        build: (problem, trial, rule, configuration, devices, MB of a bucket) -> a run's strategy
            and step.
        steps: the number of updates of the run. tx: its optimizer, with its schedule.
        elsewhere: (devices, updates, with other surroundings) -> a process that finds the facts;
            None for objects that only this process has.
        own_precision: (devices, updates) -> a process that trains in the run's own precision;
            narrowest: the least precise dtype of that, apart from what the model chooses.
    """

    forward: Forward
    rule: Callable[[float], UpdateRule]
    schedule: Callable[[], Callable[[int], Any]]
    dataset: Dataset
    eval_sets: Mapping[str, Dataset]
    order: ExampleOrder
    configuration: Configuration
    build: Callable[..., tuple[Strategy, Step]]
    steps: int = 100
    tx: optax.GradientTransformation | None = None
    elsewhere: Callable[[int, int, bool], Other] | None = None
    own_precision: Callable[[int, int], Other] | None = None
    narrowest: np.dtype = np.dtype(np.float32)

    @property
    def couples(self) -> bool:
        return attribute(self.forward.loss, "scope", "example") == "global"


class Trial(NamedTuple):
    """batches: one per update, {name: [microbatch, example, ...]}, without padding.

    example: {name: [example, ...]}, a microbatch as the model gets it, to initialize with. order:
    of all microbatches."""

    batches: list[Arrays]
    example: dict[str, jax.Array]
    order: ExampleOrder

    @property
    def microbatches(self) -> int:
        return len(self.batches[0]["mask"])

    @property
    def microbatch_size(self) -> int:
        return self.batches[0]["mask"].shape[1]

    def microbatch(self, update: int, number: int) -> Arrays:
        return {k: v[number] for k, v in self.batches[update].items()}


def make_trial(problem: Problem, devices: int, updates: int) -> Trial:
    """Read as many microbatches and examples as the run has, up to a few. Raises UsageError for too
    few examples.
    """
    order, dataset = problem.order, problem.dataset
    size = min(order.size, getattr(dataset, "read_ahead", len(dataset)))
    microbatches = min(order.microbatches, max(2 * devices, 4))
    if size < microbatches:
        raise UsageError(
            f"data: {size} examples cannot be split into {microbatches} microbatches; give it more"
        )
    examples = min(order.examples_per_microbatch, MOST_EXAMPLES, size // microbatches)
    batch_size = microbatches * examples
    full = size - size % batch_size
    order = dataclasses.replace(order, size=full, batch_size=batch_size, microbatches=microbatches)
    batches = [read_batch(dataset, order, i, np.arange(microbatches)) for i in range(updates)]
    if not all((batch["mask"] != 0).any() for batch in batches):
        raise UsageError(
            "data: the mask is 0 in all examples of a batch; give verify data with other examples first"
        )
    first = dataset.read(np.zeros(1, np.int64))
    return Trial(batches, first_microbatch(first, examples, problem.forward.transform), order)


def in_traceable_precision(problem: Problem, trial: Trial) -> Problem:
    """Return the problem; with a model that computes in float32 if the model cannot be traced in
    float64.

    Some models fix the dtype of a loop's state, such as an LSTM's carry.
    """
    model, key = problem.forward.model, jax.random.key(0)
    narrow, wide = (
        lambda tree, to=dtype: cast_floats(tree, to) for dtype in (jnp.float32, jnp.float64)
    )

    def apply(params, state, batch, key, train):
        return wide(model.apply(*narrow((params, state, batch)), key, train))

    try:
        jax.eval_shape(
            lambda x: model.apply(*wide(model.init(key, wide(x))), wide(x), key, True),
            trial.example,
        )
    except TypeError:
        model32 = model._replace(
            init=lambda key, batch: model.init(key, narrow(batch)), apply=apply
        )
        return dataclasses.replace(problem, forward=problem.forward._replace(model=model32))
    except Exception:  # reported where the oracle is traced
        pass
    return problem


def check_memory(problem: Problem, trial: Trial, devices: Sequence[jax.Device]) -> None:
    """Raise UsageError if the states that exist at once do not fit into memory."""
    params, model_state = jax.eval_shape(
        problem.forward.model.init, jax.random.key(0), trial.example
    )

    def size(*trees):
        return sum(math.prod(x.shape) * 8 for x in jax.tree.leaves(trees))

    state = size(params, model_state, jax.eval_shape(problem.rule(1.0).tx.init, params), params)
    number, limit = len(devices), hosts.free_memory()
    if devices[0].platform != "cpu":
        number, limit = 1, (devices[0].memory_stats() or {}).get("bytes_limit", math.inf)
    needed = (
        number * (state + 2 * size(params)) + 4 * state
    )  # beside the state: gradients and their sum
    if needed > limit:
        raise UsageError(
            f"verify.model_args: {size(params) // 8:,} parameters need {needed / 1e9:.0f} GB in float64 on "
            f"{len(devices)} devices, and there are {limit / 1e9:.0f}; make the model smaller while it is verified, "
            "e.g. --verify.model_args.layers 2, or use fewer --devices"
        )
