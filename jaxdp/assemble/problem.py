"""The problem of `jaxdp verify`: the parts of a run, with the smaller arguments of the config's `verify`."""

import contextlib
import dataclasses
from collections.abc import Sequence
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
    state_maker,
)
from jaxdp.config import Config, Precision
from jaxdp.core.step import Step
from jaxdp.parallel import Strategy
from jaxdp.precision import policy
from jaxdp.verify import Configuration, Problem
from jaxdp.verify.configurations import devices_of
from jaxdp.verify.problem import Trial

__all__ = ["make_problem", "make_variant", "smaller"]
FLOAT64 = Precision("float64", "float64", "float64")


def smaller(config: Config) -> Config:
    """Return the config with the smaller arguments of `verify`."""
    verify = config.verify
    return dataclasses.replace(
        config,
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


def make_problem(config: Config) -> Problem:
    """Return the config's model, data, loss and optimizer, the latter with a constant learning rate."""
    opt, x64 = config.optimizer, jax.config.jax_enable_x64  # type: ignore[attr-defined]
    original, config = config, smaller(config)
    parts, parallel = make_parts(config), config.parallel
    if not config.verify.model_args:
        with contextlib.suppress(NameError):  # of an axis: verification reports it
            check_paths(config, jax.eval_shape(state_maker(config, parts)).params)

    def remake() -> Problem:
        with jax.enable_x64(x64):
            return make_problem(original)

    def build(
        problem: Problem,
        trial: Trial,
        tx: Any,
        configuration: Configuration,
        devices: Sequence[jax.Device],
        bucket_mb: float,
    ) -> tuple[Strategy, Step]:
        tried = dataclasses.replace(config, microbatches=trial.microbatches, precision=FLOAT64)
        casts = policy("float64", "float64", "float64")
        forward = parts.forward._replace(model=problem.model, policy=casts, loss_scaling=None)
        rule = parts.rule._replace(tx=tx, spike=None, schedule=None)
        plain = parts._replace(forward=forward, rule=rule, cursor=trial.order)
        return make_variant(tried, plain, configuration, devices, bucket_mb=bucket_mb, exact_group=1)

    return Problem(
        model=parts.forward.model,
        loss=parts.forward.loss,
        make_tx=lambda factor: make_tx(config, lambda step: factor * opt.lr, parts.forward.model.blocks),
        dataset=parts.dataset,
        transform=parts.forward.transform,
        sequential=parts.sequential,
        build=build,
        configuration=Configuration(
            devices=parallel.devices or 0,
            backend=parallel.backend,
            zero=parallel.zero,
            reduction="exact" if parallel.exact else "xla" if parallel.reduction == "auto" else parallel.reduction,
            accumulate=choose_accumulate(config),
            gradient_buffer=parallel.gradient_buffer,
            shard_size=parallel.shard_size,
        ),
        seed=config.seed,
        batch_size=config.batch_size,
        microbatches=config.microbatches,
        clip_norm=opt.clip_norm,
        frozen=opt.frozen,
        ema_decay=opt.ema,
        remake=remake,
    )
