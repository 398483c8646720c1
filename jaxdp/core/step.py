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
import jax.numpy as jnp
import optax

from jaxdp.core.accumulate import ACCUMULATE, MAP
from jaxdp.core.average import with_average
from jaxdp.core.carry import Carried, with_carry
from jaxdp.core.coupled import Coupled, couple
from jaxdp.core.frozen import freeze, merge
from jaxdp.core.microbatch import Microbatch
from jaxdp.core.skip import Spike
from jaxdp.core.state import (
    Batch,
    Gather,
    Join,
    Sums,
    TrainState,
    Transform,
    View,
    microbatch_key,
    plain_gather,
    plain_join,
)
from jaxdp.core.update import make_apply
from jaxdp.data.cursor import RESET
from jaxdp.losses import LossFn, attribute
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


def make_grads(parts: Microbatch, trainable: Callable[[Tree], Tree], accumulate: str, padded: bool) -> Callable:
    """Build `Step.grads`."""

    def grads(
        view: View, batch: Batch, slots: jax.Array, gather: Gather = plain_gather, join: Join = plain_join
    ) -> Sums:
        def loss_and_sums(params: Tree, *piece: Any) -> tuple[jax.Array, Sums]:
            carry, batch, slot, coupled = piece
            slot_view = view._replace(params=merge(params, view.params), carry=carry)
            return parts.loss_and_sums(slot_view, batch, slot, coupled, True, gather)

        mask = batch["mask"]
        if not padded:
            batch = {**batch, "mask": jnp.ones_like(mask)}  # a constant that the compiler can fold
        coupled = first_pass(parts, accumulate, view, batch, slots, True, gather, join)
        pieces = (view.carry, batch, slots, coupled)
        sums = ACCUMULATE[accumulate](loss_and_sums, trainable(view.params), pieces)
        if view.carry is not None:
            sums = sums._replace(carry=Carried(sums.carry, batch.get(RESET)))
        if padded:
            return sums
        # With a constant weight, XLA would fuse the division into every reader of a gradient and compute it each time.
        return sums._replace(weight=sums.weight * jnp.max(mask).astype(sums.weight.dtype))

    return grads


def make_evaluate(parts: Microbatch, accumulate: str) -> Callable:
    """Build `Step.evaluate`."""

    def evaluate(
        view: View, batch: Batch, slots: jax.Array, gather: Gather = plain_gather, join: Join = plain_join
    ) -> Sums:
        """Sum over the slots without gradients. The carry starts at zero, unless batches mark where sequences start."""
        keep = RESET in batch
        carry = view.carry if keep else jax.tree.map(jnp.zeros_like, view.carry)

        def slot_sums(piece: Any) -> Sums:
            carry, batch, slot, coupled = piece
            sums = parts.loss_and_sums(view._replace(carry=carry), batch, slot, coupled, False, gather)[1]
            return sums._replace(model_state=None, carry=sums.carry if keep else None)

        coupled = first_pass(parts, accumulate, view._replace(carry=carry), batch, slots, False, gather, join)
        sums = MAP[accumulate](slot_sums, (carry, batch, slots, coupled))
        return jax.tree.map(lambda x: x.sum(0), sums._replace(carry=None))._replace(carry=sums.carry)

    return evaluate


def first_pass(
    parts: Microbatch,
    accumulate: str,
    view: View,
    batch: Batch,
    slots: jax.Array,
    train: bool,
    gather: Gather,
    join: Join,
) -> Coupled | None:
    """Compute all outputs and couple them in the loss; return None if the loss is a sum over single examples."""
    if attribute(parts.loss, "scope", "example") != "global":
        return None

    def slot_outputs(piece: Any) -> tuple[Tree, Batch]:
        carry, batch, slot = piece
        return parts.forward(view._replace(carry=carry), batch, slot, train, gather)[:2]

    outputs, loss_batch = join(MAP[accumulate](slot_outputs, (view.carry, batch, slots)))
    return couple(parts.loss, outputs, loss_batch, slots, train)
