"""Config -> what `jaxdp verify` verifies: the parts of a run, made smaller where the config says so."""

import contextlib
import dataclasses

import jax

from jaxdp.assemble.components import check_paths, choose_accumulate, choose_remat, make_parts, make_tx, state_maker
from jaxdp.config import Config
from jaxdp.verify import Configuration, Problem

__all__ = ["make_problem", "smaller"]


def smaller(config: Config) -> Config:
    """Return the config with the smaller arguments that `verify` names."""
    own = config.verify
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, args={**config.model.args, **own.model_args}),
        data=dataclasses.replace(config.data, args={**config.data.args, **own.data_args}),
    )


def make_problem(config: Config) -> Problem:
    """Return the config's model, data, loss and optimizer, the latter at a constant learning rate."""
    own, opt, x64 = config.verify, config.optimizer, jax.config.jax_enable_x64  # type: ignore[attr-defined]
    as_given, config = config, smaller(config)
    parts, parallel = make_parts(config), config.parallel
    if not own.model_args:
        with contextlib.suppress(NameError):  # of an axis, which is what verification finds
            check_paths(config, jax.eval_shape(state_maker(config, parts)).params)

    def remake() -> Problem:
        with jax.enable_x64(x64):
            return make_problem(as_given)

    at = lambda zero: dataclasses.replace(config, parallel=dataclasses.replace(parallel, zero=zero))
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
        remat=lambda zero: choose_remat(at(zero), parts.model),
        remake=remake,
    )
