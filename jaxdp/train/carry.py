"""State of examples, not of the model: the hidden state that a recurrent network carries from batch
to batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.models.base import CARRY
from jaxdp.train import skip

Tree = Any


class Carried(NamedTuple):
    """after: the carry after the update. reset[local, example]: True where the carry starts at
    zero; None: nowhere.
    """

    after: Tree
    reset: jax.Array | None


def split_carry(model_state: Tree) -> tuple[Tree, Tree]:
    """Return (the model's own state, its top-level entry 'carry' or None)."""
    if isinstance(model_state, dict) and CARRY in model_state:
        return {k: v for k, v in model_state.items() if k != CARRY}, model_state[CARRY]
    return model_state, None


def reset_carry(carry: Tree, reset: jax.Array | None) -> Tree:
    """Zero leaves [..., example, ...] where reset[..., example] is true; None resets nothing."""
    if reset is None:
        return carry

    def wide(x):
        return reset.reshape(*reset.shape, *(1,) * (x.ndim - reset.ndim)) != 0

    return jax.tree.map(lambda x: jnp.where(wide(x), jnp.zeros_like(x), x), carry)


def carry_of_examples(mask: jax.Array, old: Tree, new: Tree) -> Tree:
    """Return the new leaves [example, ...], with the old values for padding examples."""
    real = jnp.any(mask.reshape(mask.shape[0], -1) != 0, axis=-1)

    def select(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(real.reshape(-1, *(1,) * (old.ndim - 1)), new.astype(old.dtype), old)

    return jax.tree.map(select, old, new)


def with_carry(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Step.apply` to store the new carry; a skipped update keeps the old one, but still
    applies its resets.
    """

    def run(state: Any, sums: Any, *total: Any) -> Any:
        new, metrics = apply(state, sums, *total)
        if state.carry is None:
            return new, metrics
        after, reset = sums.carry
        before = reset_carry(
            state.carry, None if reset is None else (reset != 0) & (state.guard.halted == 0)
        )
        return new.replace(carry=skip.where(metrics["skipped"] == 0, after, before)), metrics

    return run
