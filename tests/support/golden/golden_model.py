"""A model that has everything a checkpoint may hold: parameters, running averages, a counter, a
carry, dropout.
"""

import jax
import jax.numpy as jnp

from jaxdp.models.base import Model

WIDTH = 16


def golden(input_shape, num_classes) -> Model:
    """A hidden layer, its running mean, and a trace of what each place of the batch has seen."""
    size = 1
    for n in input_shape:
        size *= n

    def init(key, batch):
        first, second = jax.random.split(key)
        params = {
            "hidden": {
                "kernel": 0.1 * jax.random.normal(first, (size, WIDTH)),
                "bias": jnp.zeros(WIDTH),
            },
            "head": {
                "kernel": 0.1 * jax.random.normal(second, (WIDTH, num_classes)),
                "bias": jnp.zeros(num_classes),
            },
        }
        carry = {"trace": jnp.zeros((len(batch["inputs"]), WIDTH))}
        return params, {"mean": jnp.zeros(WIDTH), "calls": jnp.zeros((), jnp.int32), "carry": carry}

    def apply(params, state, batch, key, train):
        x = batch["inputs"].reshape(len(batch["inputs"]), -1)
        hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        trace = 0.5 * state["carry"]["trace"] + 0.1 * jax.lax.stop_gradient(hidden)
        mean = 0.9 * state["mean"] + 0.1 * jax.lax.stop_gradient(hidden).mean(0)
        new = {"mean": mean, "calls": state["calls"] + 1, "carry": {"trace": trace}}
        if train:
            hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden / 0.9, 0.0)
        else:
            new = state
        return (hidden - state["mean"] + trace) @ params["head"]["kernel"] + params["head"][
            "bias"
        ], new

    return Model(init, apply)
