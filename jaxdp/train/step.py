"""The training step: two pure functions that contain no strategy and no collective.

    grads(view, batch[local, example, ...], numbers[local], gather, join) -> Sums  a replica's share of the microbatches
    apply(state, sums, total) -> (state, metrics)                                  the one division, the optimizer

`local` counts the microbatches of a replica; `numbers` are their numbers among all, -1 for none.

Everything in `Sums` adds up over microbatches and replicas, and is divided once, by the global
weight. A strategy has only three hooks into the step: `gather` gathers sharded parameters (and
shapes gradients as the strategy wants them), `join` gathers the microbatches of all replicas for a
loss that couples examples, `total` measures gradients that may be sharded. On one device, a
strategy needs none."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.train.average import with_average
from jaxdp.train.carry import with_carry
from jaxdp.train.microbatch import make_evaluate, make_grads
from jaxdp.train.options import Forward, UpdateRule
from jaxdp.train.state import Sums, TrainState
from jaxdp.train.update import make_apply

Tree = Any


class Step(NamedTuple):
    """trainable(tree like the parameters): the tree with None for frozen leaves, which is the
    structure of gradients. seed: the root of all random keys. It is an argument of a strategy's
    programs, and reaches `grads` in the view."""

    grads: Callable[..., Sums]
    apply: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[..., Sums]
    trainable: Callable[[Tree], Tree]
    seed: np.uint32


def make_step(
    forward: Forward, rule: UpdateRule, accumulate: str = "vmap", padded: bool = True
) -> Step:
    """Build the training step from a model and a loss, and an Optax transformation.

    Args:
        accumulate: 'vmap' computes a replica's microbatches in one pass, 'scan' one after the
            other.
        padded: batches may have padding; if False, the program of `grads` contains no mask.
    """
    apply = with_average(with_carry(make_apply(rule, forward.loss_scaling)), rule.ema_decay)
    grads = make_grads(forward, rule.trainable, accumulate, padded)
    return Step(
        grads, apply, make_evaluate(forward, accumulate), rule.trainable, np.uint32(forward.seed)
    )
