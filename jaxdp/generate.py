"""Text generation: continue a prompt token by token, each sampled from the model's predicted distribution."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.logits import Logits
from jaxdp.models.base import CARRY, Model

Tree = Any
Draw = Callable[[jax.Array, jax.Array], jax.Array]  # (logits [vocabulary], key) -> token []


def generate(
    model: Model,
    params: Tree,
    model_state: Tree,
    prompt: Sequence[int],
    count: int,
    context: int,
    draw: Draw,
    seed: int,
) -> list[int]:
    """Return `count` generated tokens that continue the prompt, which has at least one token.

    A model with carried state reads one token at a time. Any other model rereads the last `context` tokens for each new
    one: its outputs [example, token, vocabulary] must be causal. Both are compiled once.
    """
    key = jax.random.key(seed)
    carry = model_state.get(CARRY) if isinstance(model_state, dict) else None

    @jax.jit
    def next_token(params: Tree, state: Tree, tokens: jax.Array, position: int, i: int) -> tuple[jax.Array, Tree]:
        batch = {"inputs": tokens[None], "mask": jnp.ones(1, bool)}
        outputs, state = model.apply(params, state, batch, key, False)
        return draw(at(outputs, position), jax.random.fold_in(key, i)), state

    params, sequence = jax.device_put(params), list(map(int, prompt))
    if carry is not None:
        state = {**model_state, CARRY: jax.tree.map(jnp.zeros_like, carry)}
        for i in range(len(sequence) + count - 1):
            last, state = next_token(params, state, np.asarray(sequence[i : i + 1], np.int32), 0, i)
            if i >= len(prompt) - 1:
                sequence.append(int(last))
        return sequence[len(prompt) :]
    for i in range(count):
        window = sequence[-context:]
        tokens = np.zeros(context, np.int32)
        tokens[: len(window)] = window
        last, _ = next_token(params, model_state, tokens, len(window) - 1, i)
        sequence.append(int(last))
    return sequence[len(prompt) :]


def at(outputs: Any, position: int) -> jax.Array:
    """Return the logits [vocabulary] at one token position of outputs [1, token, vocabulary]."""
    if isinstance(outputs, Logits):
        return outputs.replace(x=outputs.x[0, position]).whole()
    return outputs[0, position].astype(jnp.float32)


def drawing(temperature: float = 1.0, top_k: int | None = None) -> Draw:
    """Return a sampler from softmax(logits / temperature) over the `top_k` largest or all; 0 selects the largest."""

    def draw(logits: jax.Array, key: jax.Array) -> jax.Array:
        if not temperature:
            return jnp.argmax(logits)
        if top_k is not None and top_k < len(logits):
            logits = jnp.where(logits < jax.lax.top_k(logits, top_k)[0][-1], -jnp.inf, logits)
        return jax.random.categorical(key, logits / temperature)

    return draw
