"""What `jaxdp verify` trains: the parts of a run with the smaller arguments of the config's `verify`, in other
configurations; with --exact, the config's own run."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdp.assemble.components import (
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
from jaxdp.assemble.preflight import check_optimizer
from jaxdp.assemble.run import prepare_on_all_ranks
from jaxdp.config import Config, Precision
from jaxdp.config.check import check_exact
from jaxdp.core.options import UpdateRule
from jaxdp.core.step import Step
from jaxdp.data.prefetch import read_batch
from jaxdp.distributed.context import Context
from jaxdp.errors import UsageError
from jaxdp.parallel import Strategy
from jaxdp.precision import policy
from jaxdp.verify import Configuration, Problem, Report
from jaxdp.verify.configurations import clip, devices_of
from jaxdp.verify.exact import compare_bits
from jaxdp.verify.problem import Trial

ALONE, FLOAT64 = Context(), Precision("float64", "float64", "float64")


def smaller(config: Config) -> Config:
    """Return the config with the smaller arguments of `verify`; with an outer step after each update, if any."""
    verify = config.verify
    return dataclasses.replace(
        config,
        outer=dataclasses.replace(config.outer, every=1),
        model=dataclasses.replace(config.model, args={**config.model.args, **verify.model_args}),
        data=dataclasses.replace(config.data, args={**config.data.args, **verify.data_args}),
    )


def make_variant(
    config: Config, parts: Parts, configuration: Configuration, devices: Sequence[jax.Device], **parallel: Any
) -> tuple[Strategy, Step]:
    """Build the run in another configuration; parallel: more of its settings."""
    settings = {**configuration._asdict(), **parallel}
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **settings))
    step = make_the_step(config, parts)
    strategy = make_strategy(config, parts, state_maker(config, parts), devices_of(configuration, devices))
    return strategy, step


def make_problem(config: Config, context: Context = ALONE) -> Problem:
    """Return the config's model, data, loss and optimizer, the latter with a constant learning rate.

    Raises UsageError on every rank, as a run does, if their programs or data differ.
    """
    if config.outer.replicas > 1:
        raise UsageError("outer.replicas: verify compares with ordinary training; compare bits instead, with --exact")
    config = smaller(config)
    opt, own = config.optimizer, configuration_of(config)
    parts = make_parts(config) if context.size == 1 else prepare_on_all_ranks(config, context).parts
    if context.size == 1 and not config.verify.model_args:
        with contextlib.suppress(NameError):  # of an axis: verification reports it
            check_paths(config, jax.eval_shape(state_maker(config, parts)).params)

    def rule(factor: float) -> UpdateRule:
        tx = make_tx(config, lambda step: factor * opt.lr, parts.forward.model.blocks, roles=parts.roles)
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
        return make_variant(tried, plain, configuration, devices, bucket_mb=bucket_mb, exact_group=1)

    return Problem(
        forward=parts.forward,
        rule=rule,
        schedule=lambda: schedule_of(config, parts.steps),
        dataset=parts.dataset,
        eval_sets=parts.eval_sets,
        order=parts.order,
        build=build,
        configuration=own._replace(reduction="exact") if config.parallel.exact else own,
    )


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
    parallel = dataclasses.replace(config.parallel, reduction=config.parallel.exact_reduction, accumulate="auto")
    config = dataclasses.replace(smaller(config), parallel=parallel)
    check_exact(config)
    return config


def verify_exactly(config: Config, devices: int, updates: int, progress: Callable[[str], None]) -> Report:
    """Compare the bits of a config in exact mode, on its first batches and the last of an epoch, maybe incomplete.

    devices: the most to use; in a job of several processes all are used.
    """
    set_jax(config)
    parts = make_parts(config)
    used, summands = jax.devices(), config.microbatches // config.parallel.exact_group
    if jax.process_count() == 1:
        used = used[: min(devices, summands)]

    def make(configuration: Configuration) -> Any:
        strategy, step = make_variant(config, parts, configuration, used)
        check_optimizer(config, strategy, parts.rule.tx, step)
        read = lambda i: read_batch(parts.dataset, parts.order, i, strategy.local_microbatches)
        return strategy, step, lambda i: strategy.shard_batch(read(i))

    last = parts.order.steps_per_epoch - 1
    batches = [min(i, last) if i < updates - 1 else last for i in range(updates)]
    trained = f"{config.batch_size} examples in {config.microbatches} microbatches, the last one the last of an epoch"
    return compare_bits(make, clip(configuration_of(config), used), used, batches, trained, progress)
