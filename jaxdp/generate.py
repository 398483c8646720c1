"""A language model goes on with a text: one token after the other, each drawn from what the model expects."""

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
    """`count` tokens after those of the prompt, at least one.

    A model that carries state reads one token at a time. Any other reads the last `context` tokens anew for each: its
    outputs [example, token, vocabulary] must not depend on later tokens. Both are compiled once.
    """
    key = jax.random.key(seed)
    carry = model_state.get(CARRY) if isinstance(model_state, dict) else None

    @jax.jit
    def next_token(params: Tree, state: Tree, tokens: jax.Array, place: int, i: int) -> tuple[jax.Array, Tree]:
        batch = {"inputs": tokens[None], "mask": jnp.ones(1, bool)}
        outputs, state = model.apply(params, state, batch, key, False)
        return draw(at(outputs, place), jax.random.fold_in(key, i)), state

    params, found = jax.device_put(params), list(map(int, prompt))
    if carry is not None:
        state = {**model_state, CARRY: jax.tree.map(jnp.zeros_like, carry)}
        for i in range(len(found) + count - 1):
            last, state = next_token(params, state, np.asarray(found[i : i + 1], np.int32), 0, i)
            if i >= len(prompt) - 1:
                found.append(int(last))
        return found[len(prompt) :]
    for i in range(count):
        window = found[-context:]
        tokens = np.zeros(context, np.int32)
        tokens[: len(window)] = window
        last, _ = next_token(params, model_state, tokens, len(window) - 1, i)
        found.append(int(last))
    return found[len(prompt) :]


def at(outputs: Any, place: int) -> jax.Array:
    """The logits [vocabulary] at one place of outputs [1, token, vocabulary]."""
    if isinstance(outputs, Logits):
        return outputs.replace(x=outputs.x[0, place]).whole()
    return outputs[0, place].astype(jnp.float32)


def drawing(temperature: float = 1.0, top_k: int | None = None) -> Draw:
    """Draws from softmax(logits / temperature) over the `top_k` largest, or all; at 0 takes the largest."""

    def draw(logits: jax.Array, key: jax.Array) -> jax.Array:
        if not temperature:
            return jnp.argmax(logits)
        if top_k is not None and top_k < len(logits):
            logits = jnp.where(logits < jax.lax.top_k(logits, top_k)[0][-1], -jnp.inf, logits)
        return jax.random.categorical(key, logits / temperature)

    return draw
