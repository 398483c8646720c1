"""The training step: two pure functions that contain no strategy and no collective.

    grads(view, batch[slot, example, ...], slots[slot], gather, join) -> Sums  one replica's share of the microbatches
    apply(state, sums, total) -> (state, metrics)                              the one division, the optimizer

Everything in `Sums` adds up over microbatches and replicas, and is divided once, by the global weight. A strategy has
only three hooks into the step: `gather` gathers sharded parameters (and shapes gradients as the strategy wants them),
`join` gathers the slots of all replicas for a loss that couples examples, `total` measures gradients that may be
sharded. On one device, a strategy needs none.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

from jaxdp.core.average import with_average
from jaxdp.core.carry import with_carry
from jaxdp.core.frozen import freeze
from jaxdp.core.microbatch import Microbatch, make_evaluate, make_grads
from jaxdp.core.skip import Spike
from jaxdp.core.state import (
    Sums,
    TrainState,
    Transform,
    microbatch_key,
)
from jaxdp.core.update import make_apply
from jaxdp.losses import LossFn
from jaxdp.models.base import Model
from jaxdp.precision import LossScaling, Policy

Tree = Any


class Step(NamedTuple):
    """trainable(tree like the parameters): the tree with None for frozen leaves, which is the structure of gradients.
    key(step, microbatch): the random key of a microbatch."""

    grads: Callable[..., Sums]
    apply: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[..., Sums]
    trainable: Callable[[Tree], Tree]
    key: Callable[[jax.Array, jax.Array], jax.Array]


def make_step(
    model: Model,
    loss: LossFn,
    tx: optax.GradientTransformation,
    *,
    seed: int = 0,
    policy: Policy | None = None,
    clip_norm: float | None = None,
    accumulate: str = "vmap",
    remat: str = "none",
    frozen: Sequence[str] = (),
    ema_decay: float | None = None,
    loss_scaling: LossScaling | None = None,
    transform: Transform | None = None,
    eval_transform: Transform | None = None,
    schedule: Callable[[jax.Array], jax.Array] | None = None,
    max_nonfinite: int = 10,
    spike: Spike | None = None,
    padded: bool = True,
) -> Step:
    """Build the training step from a model, a loss and an Optax transformation.

    Args:
        accumulate: 'vmap' computes a replica's microbatches in one pass, 'scan' one after the other.
        frozen: expressions; parameters whose path matches one have no gradient and no optimizer state.
        ema_decay: of the running average of the parameters.
        schedule: the learning rate, reported as `lr` in the metrics.
        max_nonfinite: halt training after this many consecutive updates with a non-finite loss or gradient; each of
            them is skipped (`jaxdp.core.skip`).
        spike: how to detect and treat a loss that is too large.
        padded: batches may have padding; if False, the program of `grads` contains no mask.
        remat, transform, eval_transform: see `Microbatch`.
    """
    parts = Microbatch(model, loss, policy or Policy(), seed, remat, loss_scaling, transform, eval_transform)
    trainable = freeze(frozen)
    apply = make_apply(
        tx,
        trainable,
        clip_norm=clip_norm,
        max_nonfinite=max_nonfinite,
        spike=spike,
        schedule=schedule,
        loss_scaling=loss_scaling,
    )
    apply = with_average(with_carry(apply), ema_decay)
    grads = make_grads(parts, trainable, accumulate, padded)
    return Step(grads, apply, make_evaluate(parts, accumulate), trainable, functools.partial(microbatch_key, seed))
