"""Learning-rate schedules of your own, for `optimizer.schedule`: the folder of this file must be on
PYTHONPATH.

    optimizer: {target: adamw, lr: 1.0e-3, warmup_steps: 100, schedule: {target: schedules.wsd, args: {decay: 0.1}}}

Each returns an Optax schedule. lr, steps (after the warm-up) and final_lr (a fraction of lr) come
from the config."""

import jax.numpy as jnp
import optax


def wsd(lr, steps, final_lr, decay=0.2):
    """Warm-up, stable, decay: constant, then linear over the last part `decay` (MiniCPM, arXiv
    2404.06395).
    """
    falls = max(1, round(decay * steps))
    parts = [optax.constant_schedule(lr), optax.linear_schedule(lr, lr * final_lr, falls)]
    return optax.join_schedules(parts, [steps - falls])


def inverse_sqrt(lr, timescale=1000):
    """Falls as 1 / sqrt(update), after `timescale` updates (T5, arXiv 1910.10683)."""
    return lambda step: lr * jnp.sqrt(timescale / jnp.maximum(step, timescale))


def restarts(lr, steps, final_lr, cycles=4):
    """Several cosines in turn (SGDR, arXiv 1608.03983)."""
    length = max(1, steps // cycles)
    parts = [optax.cosine_decay_schedule(lr, length, final_lr) for _ in range(cycles)]
    return optax.join_schedules(parts, [length * i for i in range(1, cycles)])
