"""Config -> what `jaxdp verify` verifies: the parts of a run, made smaller where the config says so."""

import contextlib
import dataclasses

import jax

from jaxdp.build.parts import check_paths, choose_accumulate, choose_remat, make_parts, make_tx, state_maker
from jaxdp.config import Config
from jaxdp.verify import Row, Subject

__all__ = ["make_subject", "smaller"]


def smaller(config: Config) -> Config:
    """The config with the arguments that are for its verification."""
    own = config.verify
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, args={**config.model.args, **own.model_args}),
        data=dataclasses.replace(config.data, args={**config.data.args, **own.data_args}),
    )


def make_subject(config: Config) -> Subject:
    """The config's own model, data, loss and optimizer, the latter at a constant learning rate."""
    own, opt = config.verify, config.optimizer
    config = smaller(config)
    parts, parallel = make_parts(config), config.parallel
    if not own.model_args:
        with contextlib.suppress(NameError):  # of an axis, which is what verification finds
            check_paths(config, jax.eval_shape(state_maker(config, parts)).params)
    at = lambda zero: dataclasses.replace(config, parallel=dataclasses.replace(parallel, zero=zero))
    return Subject(
        model=parts.model,
        loss=parts.loss,
        make_tx=lambda factor: make_tx(config, lambda step: factor * opt.lr, parts.model.blocks),
        dataset=parts.dataset,
        transform=parts.transform,
        sequential=parts.sequential,
        own=Row(
            devices=parallel.devices or 0,
            backend=parallel.backend,
            zero=parallel.zero,
            reduction="xla" if parallel.reduction == "auto" else parallel.reduction,
            accumulate=choose_accumulate(config),
            accumulator=parallel.accumulator,
            shard_size=parallel.shard_size,
        ),
        seed=config.seed,
        batch_size=config.batch_size,
        microbatches=config.microbatches,
        clip_norm=opt.clip_norm,
        frozen=opt.frozen,
        ema_decay=opt.ema,
        remat=lambda zero: choose_remat(at(zero), parts.model),
    )
