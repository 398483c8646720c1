"""The problem of `jaxdp verify`: the parts of a run, with the smaller arguments of the config's `verify`."""

import contextlib
import dataclasses

import jax

from jaxdp.assemble.components import check_paths, choose_accumulate, choose_remat, make_parts, make_tx, state_maker
from jaxdp.config import Config
from jaxdp.verify import Configuration, Problem

__all__ = ["make_problem", "smaller"]


def smaller(config: Config) -> Config:
    """Return the config with the smaller arguments of `verify`."""
    verify = config.verify
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, args={**config.model.args, **verify.model_args}),
        data=dataclasses.replace(config.data, args={**config.data.args, **verify.data_args}),
    )


def make_problem(config: Config) -> Problem:
    """Return the config's model, data, loss and optimizer, the latter with_stage a constant learning rate."""
    opt, x64 = config.optimizer, jax.config.jax_enable_x64  # type: ignore[attr-defined]
    original, config = config, smaller(config)
    parts, parallel = make_parts(config), config.parallel
    if not config.verify.model_args:
        with contextlib.suppress(NameError):  # of an axis: verification reports it
            check_paths(config, jax.eval_shape(state_maker(config, parts)).params)

    def remake() -> Problem:
        with jax.enable_x64(x64):
            return make_problem(original)

    with_stage = lambda zero: dataclasses.replace(config, parallel=dataclasses.replace(parallel, zero=zero))
    return Problem(
        model=parts.model,
        loss=parts.loss,
        make_tx=lambda factor: make_tx(config, lambda step: factor * opt.lr, parts.model.blocks),
        dataset=parts.dataset,
        transform=parts.transform,
        sequential=parts.sequential,
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
        remat=lambda zero: choose_remat(with_stage(zero), parts.model),
        remake=remake,
    )
