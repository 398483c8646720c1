"""What a step computes: the forward pass of a microbatch, and the rule of an update."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.losses import LossFn
from jaxdp.models.base import Model
from jaxdp.precision import LossScaling, Policy
from jaxdp.split import path_string
from jaxdp.train.skip import Spike
from jaxdp.train.state import Batch

Tree = Any
Transform = Callable[[Batch, jax.Array, bool], Batch]  # (batch, key, train) -> batch


class Forward(NamedTuple):
    """The forward pass of a microbatch, up to its loss.

    Args:
        seed: an int or a uint32 [], the root of all random keys.
        remat: the values that the backward pass recomputes (`jaxdp.models.scan.REMAT`), block by
            block if the model reads its parameters so.
        transform, eval_transform: change the batch before the model, in training and evaluation.
    """

    model: Model
    loss: LossFn
    policy: Policy = Policy()
    seed: Any = 0
    remat: str = "none"
    loss_scaling: LossScaling | None = None
    transform: Transform | None = None
    eval_transform: Transform | None = None


class UpdateRule(NamedTuple):
    """How an update follows from the mean gradients.

    Args:
        frozen: expressions; parameters whose path matches one have no gradient and no optimizer
            state.
        ema_decay: of the running average of the parameters; None: there is none.
        schedule: the learning rate by applied update, to report as `lr` if the optimizer names none
            (`jaxdp.optim.rate`).
        max_nonfinite: halt training after this many consecutive updates with a non-finite loss or
            gradient; each of them is skipped (`jaxdp.train.skip`).
        spike: how to detect and treat a loss that is too large.
    """

    tx: optax.GradientTransformation
    clip_norm: float | None = None
    frozen: Sequence[str] = ()
    ema_decay: float | None = None
    schedule: Callable[[jax.Array], jax.Array] | None = None
    max_nonfinite: int = 10
    spike: Spike | None = None

    def trainable(self, tree: Tree) -> Tree:
        """Return a tree like the parameters with None for those that are frozen."""
        return without_frozen(tree, self.frozen)


def without_frozen(tree: Tree, frozen: Sequence[str]) -> Tree:
    """Return a tree with None for the leaves whose path (a/b/c) matches one of the expressions."""

    def keep(path: Any, x: Any) -> Any:
        name = path_string(path)
        return None if any(re.search(pattern, name) for pattern in frozen) else x

    return jax.tree_util.tree_map_with_path(keep, tree) if frozen else tree


def first_microbatch(example: dict[str, Any], size: int, transform: Transform | None) -> Batch:
    """Return a microbatch of `size` copies of an example [1, ...], transformed as for the model."""
    inputs: Batch = {k: jnp.broadcast_to(v[0], (size, *v.shape[1:])) for k, v in example.items()}
    inputs.setdefault("mask", jnp.ones(size, bool))
    return inputs if transform is None else transform(inputs, jax.random.key(0), True)
