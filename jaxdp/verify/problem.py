"""What is verified: a config with the parts of its run, the small batches that they are tried on, and
the configurations to compare: a small set in which every two values of two settings occur together."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.config import Config, Precision
from jaxdp.data.example_order import ExampleOrder
from jaxdp.data.prefetch import read_batches
from jaxdp.errors import UsageError
from jaxdp.parallel.layout import ZERO
from jaxdp.parallel.strategy import Strategy
from jaxdp.process import hosts
from jaxdp.process.context import Context
from jaxdp.run.build import prepare_on_all_ranks
from jaxdp.run.components import (
    EXACT,
    REDUCTIONS,
    STAGES,
    Parts,
    check_paths,
    choose_accumulate,
    jax_settings,
    make_parts,
    make_strategy,
    make_the_step,
    state_maker,
)
from jaxdp.train.step import Step

Tree = Any
Arrays = dict[str, np.ndarray]
Devices = Sequence[jax.Device]
ALONE = Context()
QUICK_COMPILATION = "--xla_backend_optimization_level=1"
FLOAT64 = Precision("float64", "float64", "float64", matmul="highest")
# the largest relative error of a leaf, by the dtype of the computation
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
ODD = 3  # a number of devices that divides neither the microbatches nor most dims
# per microbatch; with two, a BatchNorm without pixels to average over has no gradient to compare
MOST_EXAMPLES = 4


class Configuration(NamedTuple):
    """One way to spread training over devices. gradient_buffer matters from ZeRO stage 2,
    shard_size from stage 1.
    """

    devices: int
    backend: str
    zero: int = 0
    reduction: str = "xla"
    accumulate: str = "vmap"
    gradient_buffer: str = "sharded"
    shard_size: int | None = None

    @property
    def title(self) -> str:
        """Return the settings with their values."""
        return " ".join(f"{k} {v}" for k, v in self._asdict().items() if v is not None)


# With the backend that has most stages, the only one that splits a state within groups of devices.
ONE_DEVICE = Configuration(1, max(STAGES, key=STAGES.__getitem__))


def own_configuration(config: Config, parts: Parts, devices: Devices) -> Configuration:
    """Return the run's configuration on at most these devices. Raises UsageError if it does not work
    on them."""
    parallel = config.parallel
    own = Configuration(*(getattr(parallel, name) for name in Configuration._fields))
    own = own._replace(
        devices=len(devices[: parallel.devices]),
        reduction="xla" if parallel.reduction == "auto" else parallel.reduction,
        accumulate=choose_accumulate(config),
    )
    make_variant(config, parts, own, devices)  # raises what its strategy does
    return own


def choose_configurations(
    first: Configuration, devices: Devices, exact: bool = False
) -> list[Configuration]:
    """Return one device, `first`, and what pairs of values remain, in a fixed order.

    A job of several processes uses all its devices, or one of each process. exact: with the
    reduction of `first` only."""
    number, others = len(devices), set() if exact else REDUCTIONS.keys() - EXACT.keys()
    fewer = [n for n in ((ODD, 2) if exact else (ODD,)) if n < number and jax.process_count() == 1]
    every: Any = itertools.product(
        [number, *fewer],
        [(name, zero) for name, stages in STAGES.items() for zero in stages],
        sorted({first.reduction, *others}),
        ("vmap", "scan"),
        ("sharded", "replicated"),
        (None, number // 2),
    )
    possible = [c for n, stage, *x in every if is_meaningful(c := Configuration(n, *stage, *x))]
    chosen = [ONE_DEVICE._replace(reduction=first.reduction), first]
    missing = set().union(*map(pairs, possible)).difference(*map(pairs, chosen))
    while missing:
        best = max(possible, key=lambda c: len(pairs(c) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def pairs(configuration: Configuration) -> set[tuple[Any, ...]]:
    """Return every two settings with their values; backend and stage together are one, too."""
    stage = configuration.backend, configuration.zero
    settings = {"stage": stage, **configuration._asdict()}
    return set(itertools.combinations(settings.items(), 2))


def is_meaningful(configuration: Configuration) -> bool:
    """Return whether every setting that differs from its default has an effect, and is possible."""
    devices, backend, zero, reduction, accumulate, gradient_buffer, shard_size = configuration
    if accumulate == "scan" and reduction in EXACT:
        return False
    if gradient_buffer == "replicated" and not ZERO[zero].grads:
        return False
    if shard_size is None:
        return True
    splits = ZERO[zero].opt_state and backend == ONE_DEVICE.backend
    return splits and 1 < shard_size < devices and devices % shard_size == 0


class Problem(NamedTuple):
    """A config with the smaller arguments of its `verify`, and the parts of its run."""

    config: Config
    parts: Parts


def make_problem(config: Config, context: Context = ALONE) -> Problem:
    """Build the parts of a config. Raises UsageError on every rank, as a run does, if their
    programs or data differ."""
    if config.outer.replicas > 1:
        raise UsageError(
            "outer.replicas: verify compares with ordinary training; compare bits instead, with --exact"
        )
    config = smaller(config)
    if context.size > 1:
        return Problem(config, prepare_on_all_ranks(config, context).parts)
    parts = make_parts(config)
    if not config.verify.model_args:
        check_paths(config, jax.eval_shape(state_maker(config, parts)).params)
    return Problem(config, parts)


def smaller(config: Config) -> Config:
    """Return the config with the smaller arguments of `verify`; with an outer step after each
    update, if any.
    """

    def changed(section, args):
        return dataclasses.replace(section, args={**section.args, **args})

    return dataclasses.replace(
        config,
        batch_size=config.largest_batch,
        outer=dataclasses.replace(config.outer, every=1),
        model=changed(config.model, config.verify.model_args),
        data=changed(config.data, config.verify.data_args),
    )


def make_variant(
    config: Config,
    parts: Parts,
    configuration: Configuration,
    devices: Devices,
) -> tuple[Strategy, Step]:
    """Build the run in another configuration; one device is one of this process. Raises UsageError."""
    parallel = dataclasses.replace(config.parallel, **configuration._asdict())
    config = dataclasses.replace(config, parallel=parallel)
    if configuration.devices == 1:
        devices = [device for device in devices if device.process_index == jax.process_index()]
    used = devices[: configuration.devices]
    step = make_the_step(config, parts)
    return make_strategy(config, parts, state_maker(config, parts), used), step


@contextlib.contextmanager
def settings(device: jax.Device) -> Iterator[None]:
    """Compute in float64 (in the threads of callbacks, too) with exact products, on this device by
    default.
    """
    with jax_settings(Config(precision=FLOAT64)), jax.default_device(device):
        yield


class Trial(NamedTuple):
    """batches: one per update, {name: [microbatch, example, ...]}, without padding. order: of all
    microbatches."""

    batches: list[Arrays]
    order: ExampleOrder


def make_trial(problem: Problem, devices: int, updates: int) -> Trial:
    """Read as many microbatches and examples as the run has, up to a few. Raises UsageError for too
    few examples.
    """
    order, dataset = problem.parts.order, problem.parts.dataset
    size = min(order.size, getattr(dataset, "read_ahead", len(dataset)))
    microbatches = min(order.microbatches, max(2 * devices, 4))
    examples = min(order.examples_per_microbatch, MOST_EXAMPLES, size // microbatches)
    if not examples:
        raise UsageError(
            f"data: {size} examples cannot be split into {microbatches} microbatches; give it more"
        )
    batch_size = microbatches * examples
    size -= size % batch_size
    order = dataclasses.replace(order, size=size, batch_size=batch_size, microbatches=microbatches)
    batches = [read_batches(dataset, order, [i], np.arange(microbatches)) for i in range(updates)]
    if not all(batch["mask"].any() for batch in batches):
        raise UsageError(
            "data: the mask is 0 in all examples of a batch; give verify data with other examples first"
        )
    return Trial(batches, order)


def check_memory(problem: Problem, devices: Devices) -> None:
    """Raise UsageError if the states that exist at once do not fit into the host's memory; an
    accelerator reports that by itself. devices: of this process.
    """
    state = jax.tree.leaves(jax.eval_shape(state_maker(*problem)))
    # The oracle has four states; beside each, gradients and their sum take about as much.
    needed, limit = 16 * (len(devices) + 4) * sum(x.size for x in state), hosts.free_memory()
    if devices[0].platform == "cpu" and needed > limit:
        raise UsageError(
            f"verify.model_args: the model and its optimizer need {needed / 1e9:.0f} GB in float64 on "
            f"{len(devices)} devices, and there are {limit / 1e9:.0f}; make the model smaller while it is verified, "
            "e.g. --verify.model_args.layers 2, or use fewer --devices"
        )
