"""What `jaxdp verify` trains: the parts of a run with the smaller arguments of the config's
`verify`, in other configurations; with --exact, the config's own run."""

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.config import Config, Precision
from jaxdp.data.prefetch import read_batch
from jaxdp.errors import UsageError
from jaxdp.extras import door
from jaxdp.parallel.strategy import Strategy
from jaxdp.precision import policy
from jaxdp.process.context import Context
from jaxdp.run.build import prepare_on_all_ranks
from jaxdp.run.components import (
    Parts,
    check_paths,
    choose_accumulate,
    make_parts,
    make_strategy,
    make_the_step,
    make_tx,
    schedule_of,
    set_jax,
    state_maker,
)
from jaxdp.run.elsewhere import other_count, process
from jaxdp.run.preflight import check_optimizer
from jaxdp.targets import attribute
from jaxdp.train.state import Batch, TrainState
from jaxdp.train.step import Replica, Step, UpdateRule
from jaxdp.verify import Configuration, Problem, Report, settings
from jaxdp.verify.configurations import ONE_DEVICE, clip, devices_of
from jaxdp.verify.exact import compare_bits
from jaxdp.verify.facts import Facts, find_facts
from jaxdp.verify.oracle import make_setup
from jaxdp.verify.problem import Other, Trial, in_traceable_precision, make_trial
from jaxdp.verify.trained import run_updates
from jaxdp.verify.verify_checks import Curve, OwnPrecision

ALONE = Context()
FLOAT64 = Precision("float64", "float64", "float64")
QUICK_COMPILATION = "--xla_backend_optimization_level=1"
OWN_UPDATES = 8  # in the run's own precision, at least
SUMMED = 8  # microbatches whose gradients are added, at most


def smaller(config: Config) -> Config:
    """Return the config with the smaller arguments of `verify`; with an outer step after each
    update, if any.
    """
    verify = config.verify
    return dataclasses.replace(
        config,
        outer=dataclasses.replace(config.outer, every=1),
        model=dataclasses.replace(config.model, args={**config.model.args, **verify.model_args}),
        data=dataclasses.replace(config.data, args={**config.data.args, **verify.data_args}),
    )


def make_variant(
    config: Config,
    parts: Parts,
    configuration: Configuration,
    devices: Sequence[jax.Device],
    **parallel: Any,
) -> tuple[Strategy, Step]:
    """Build the run in another configuration; parallel: more of its settings."""
    settings = {**configuration._asdict(), **parallel}
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **settings))
    step = make_the_step(config, parts)
    strategy = make_strategy(
        config, parts, state_maker(config, parts), devices_of(configuration, devices)
    )
    return strategy, step


def make_problem(config: Config, context: Context = ALONE) -> Problem:
    """Return the config's model, data, loss and optimizer, the latter with a constant learning
    rate.

    Raises UsageError on every rank, as a run does, if their programs or data differ.
    """
    whole = config
    if config.outer.replicas > 1:
        raise UsageError(
            "outer.replicas: verify compares with ordinary training; compare bits instead, with --exact"
        )
    config = smaller(config)
    opt = config.optimizer
    own = configuration_of(config)
    parts = make_parts(config) if context.size == 1 else prepare_on_all_ranks(config, context).parts
    if context.size == 1 and not config.verify.model_args:
        with contextlib.suppress(NameError):  # of an axis: verification reports it
            check_paths(config, jax.eval_shape(state_maker(config, parts)).params)

    def rule(factor: float) -> UpdateRule:
        tx = make_tx(
            config, lambda step: factor * opt.lr, parts.forward.model.blocks, roles=parts.roles
        )
        return parts.rule._replace(tx=tx, spike=None, schedule=None)

    def build(
        problem: Problem,
        trial: Trial,
        rule: UpdateRule,
        configuration: Configuration,
        devices: Sequence[jax.Device],
        bucket_mb: float,
    ) -> tuple[Strategy, Step]:
        tried = dataclasses.replace(config, microbatches=trial.microbatches, precision=FLOAT64)
        casts = policy("float64", "float64", "float64")
        forward = problem.forward._replace(policy=casts, loss_scaling=None)
        plain = parts._replace(forward=forward, rule=rule, order=trial.order)
        return make_variant(
            tried, plain, configuration, devices, bucket_mb=bucket_mb, exact_group=1
        )

    return Problem(
        forward=parts.forward,
        rule=rule,
        schedule=lambda: schedule_of(config, parts.steps),
        dataset=parts.dataset,
        eval_sets=parts.eval_sets,
        order=parts.order,
        build=build,
        configuration=own._replace(reduction="exact") if config.parallel.in_groups else own,
        steps=parts.steps,
        tx=parts.rule.tx,
        elsewhere=functools.partial(start_elsewhere, whole),
        own_precision=None
        if config.parallel.in_groups
        else functools.partial(start_in_own_precision, whole),
        narrowest=narrowest(config),
    )


def narrowest(config: Config) -> np.dtype:
    """Return the least precise dtype that a run rounds its passes and gradients to."""
    dtypes = config.precision
    used = [
        jax.numpy.dtype(name) for name in (dtypes.params, dtypes.compute, dtypes.reduce) if name
    ]
    return max(used, key=lambda dtype: float(jax.numpy.finfo(dtype).eps))


def start_elsewhere(config: Config, devices: int, updates: int, changed: bool) -> Other:
    """Start a process that finds the facts about a config's problem. changed: with other
    surroundings.
    """
    count = other_count(jax.device_count()) if changed else jax.device_count()
    return process(facts_of_config, config, devices, updates, devices=count, elsewhere=changed)


def facts_of_config(config: Config, devices: int, updates: int) -> Facts:
    """Find the facts about a config's problem, in a process of one. devices: of the process that
    compares them.
    """
    set_jax(config, sums=False)
    problem = make_problem(config)
    with settings(jax.local_devices()[0]):
        trial = make_trial(problem, devices, updates)
        return find_facts(make_setup(in_traceable_precision(problem, trial), trial))


def start_in_own_precision(config: Config, devices: int, updates: int) -> Other:
    return process(
        train_in_own_precision, config, devices, max(updates, OWN_UPDATES), devices=devices
    )


def train_in_own_precision(config: Config, devices: int, updates: int) -> OwnPrecision:
    """Train a config's first batches as the run does, on one device and on several, with `scan` and
    `vmap`.

    A configuration that is refused, or cannot be mapped, is left out.
    """
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(QUICK_COMPILATION, "")
    config = smaller(config)
    set_jax(config)
    parts = make_parts(config)
    used = jax.devices()
    curves = dict[str, Curve]()
    sums = dict[str, float]()
    own = clip(configuration_of(config), used)
    for number, accumulate in itertools.product(sorted({1, devices}), ("scan", "vmap")):
        configuration = (ONE_DEVICE if number == 1 else own)._replace(accumulate=accumulate)
        try:
            strategy, step = make_variant(config, parts, configuration, used)
            state = strategy.init()
            if number == 1 and attribute(parts.forward.loss, "scope", "example") != "global":
                sums[accumulate] = error_of_sum(parts, step, strategy.export(state))
            read = functools.partial(read_local, parts, strategy)
            curves[configuration.title] = run_updates(
                strategy, step, state, map(read, range(updates))
            )[1]
        except UsageError:
            continue
        except NotImplementedError:
            if accumulate == "scan":
                raise
    return OwnPrecision(curves, sums)


def read_local(parts: Parts, strategy: Strategy, step: int) -> Batch:
    return strategy.shard_batch(
        read_batch(parts.dataset, parts.order, step, strategy.local_microbatches)
    )


def error_of_sum(parts: Parts, step: Step, state: TrainState) -> float:
    """Return how much a device rounds where it adds the gradients of its microbatches, relative to
    these.

    A microbatch's own gradient is that of the same program with the masks of all others set to
    zero. So it does not matter how the model rounds. NaN if a microbatch's own gradient is not
    finite."""
    numbers = np.arange(min(parts.order.microbatches, SUMMED))
    batch = read_batch(parts.dataset, parts.order, 0, numbers)
    kept = jax.tree.map(lambda x: x[: len(numbers)], state.kept)
    state = state.replace(kept=kept, seed=jnp.uint32(parts.forward.seed))

    @jax.jit
    def grads(state: TrainState, batch: Batch) -> Any:
        return step.grads(state, batch, Replica(jnp.asarray(numbers)))

    def gradient(mask: np.ndarray, scale: Any) -> np.ndarray:
        scaled = None if state.loss_scale is None else state.loss_scale.replace(value=scale)
        sums = grads(state.replace(loss_scale=scaled), {**batch, "mask": mask})
        return np.concatenate(
            [np.ravel(x).astype(np.float64) for x in jax.tree.leaves(jax.device_get(sums.grads))]
        )

    def only(i):
        return (
            (numbers == i).reshape(-1, *[1] * (batch["mask"].ndim - 1)).astype(batch["mask"].dtype)
        )

    scale: Any = None if state.loss_scale is None else state.loss_scale.value
    while True:
        each = np.stack([gradient(batch["mask"] * only(i), scale) for i in numbers])
        if np.isfinite(each).all() or scale is None or scale < 1:
            break
        scale = scale / 2  # too large for a single microbatch
    total = gradient(batch["mask"], scale)
    if np.isfinite(each).all() and not np.isfinite(total).all():
        return np.inf
    return float(np.linalg.norm(total - each.sum(0)) / (np.linalg.norm(each) or 1.0))


def configuration_of(config: Config) -> Configuration:
    parallel = config.parallel
    return Configuration(
        devices=parallel.devices or 0,
        backend=parallel.backend,
        zero=parallel.zero,
        reduction="xla" if parallel.reduction == "auto" else parallel.reduction,
        accumulate=choose_accumulate(config),
        gradient_buffer=parallel.gradient_buffer,
        shard_size=parallel.shard_size,
    )


def exactly(config: Config) -> Config:
    """Return the config in exact mode, with the smaller arguments of `verify`. Raises UsageError."""
    door("exact", "--exact")
    from jaxdp.exact import in_exact_mode

    return in_exact_mode(smaller(config))


def verify_exactly(
    config: Config, devices: int, updates: int, progress: Callable[[str], None]
) -> Report:
    """Compare the bits of a config in exact mode, on its first batches and the last of an epoch,
    maybe incomplete.

    devices: the most to use; in a job of several processes all are used.
    """
    set_jax(config)
    parts = make_parts(config)
    used = jax.devices()
    summands = config.microbatches // config.parallel.exact_group
    if jax.process_count() == 1:
        used = used[: min(devices, summands)]

    def make(configuration: Configuration) -> Any:
        strategy, step = make_variant(config, parts, configuration, used)
        check_optimizer(config, strategy, parts.rule.tx, step)
        return strategy, step, functools.partial(read_local, parts, strategy)

    last = parts.order.steps_per_epoch - 1
    batches = [min(i, last) if i < updates - 1 else last for i in range(updates)]
    trained = f"{config.batch_size} examples in {config.microbatches} microbatches, the last one the last of an epoch"
    return compare_bits(
        make, clip(configuration_of(config), used), used, batches, trained, progress
    )
