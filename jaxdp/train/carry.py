"""What a recurrent network carries from batch to batch, as a wrapper of a step.

It belongs to the examples of a microbatch, not to the model, so it is not summed: `TrainState.kept`
has it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.data.example_order import RESET
from jaxdp.models.base import CARRY
from jaxdp.train.state import Batch, Sums, TrainState, expand_to, select

Tree = Any


def with_carry(step: Any) -> Any:
    """Keep the entry "carry" of a model's state, if it has one, for each example; zero it where a
    sequence starts.

    A batch marks these examples in its entry "reset" [local, example]. Without marks, the carry of
    an evaluation starts at zero in every batch.
    """

    def init(seed: Any, microbatches: int, example: Batch) -> TrainState:
        state = step.init(seed, microbatches, example)
        model_state, carry = split_carry(state.model_state)
        if carry is None:
            return state
        for_each = jax.tree.map(lambda x: jnp.broadcast_to(x, (microbatches, *x.shape)), carry)
        return state.replace(model_state=model_state, kept={CARRY: for_each})

    def grads(state: TrainState, batch: Batch, replica: Any) -> Sums:
        if CARRY not in state.kept:
            return step.grads(state, batch, replica)
        reset = batch.get(RESET)
        sums = step.grads(start_sequences(state, reset), batch, replica)
        return sums._replace(kept={**sums.kept, RESET: reset})

    def apply(state: TrainState, sums: Sums, *total: Any) -> Any:
        if CARRY not in state.kept:
            return step.apply(state, sums, *total)

        # A skipped update keeps the carry, but a sequence that starts there still starts at zero.
        after, reset = sums.kept[CARRY], sums.kept[RESET]
        marks = None if reset is None else (reset != 0) & (state.guard.halted == 0)
        before = start_sequences(state, marks).kept[CARRY]
        new, metrics = step.apply(state, sums._replace(kept=None), *total)
        return new.replace(kept={CARRY: select(metrics["skipped"] == 0, after, before)}), metrics

    def evaluate(state: TrainState, batch: Batch, replica: Any) -> Sums:
        if CARRY not in state.kept:
            return step.evaluate(state, batch, replica)
        if RESET not in batch:
            state = state.replace(kept=jax.tree.map(jnp.zeros_like, state.kept))
            return step.evaluate(state, batch, replica)._replace(kept={})
        return step.evaluate(start_sequences(state, batch[RESET]), batch, replica)

    return step._replace(init=init, grads=grads, apply=apply, evaluate=evaluate)


def split_carry(model_state: Tree) -> tuple[Tree, Tree]:
    """Return (the model's own state, its top-level entry 'carry' or None)."""
    if isinstance(model_state, dict) and CARRY in model_state:
        return {k: v for k, v in model_state.items() if k != CARRY}, model_state[CARRY]
    return model_state, None


def start_sequences(state: TrainState, reset: jax.Array | None) -> TrainState:
    """Return the state with zeros in the carry [..., example, ...] where reset[..., example] is
    true; None resets nothing."""
    if reset is None:
        return state

    def zero(x: jax.Array) -> jax.Array:
        return jnp.where(expand_to(reset, x) != 0, jnp.zeros_like(x), x)

    return state.replace(kept=jax.tree.map(zero, state.kept))
