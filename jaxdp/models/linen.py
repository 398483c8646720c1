"""Flax Linen modules as pure functions: the "params" collection, and the rest as model state."""

from typing import Any

import jax
from flax import linen

from jaxdp.models.base import Model, call_arguments, keep_dtypes


def from_linen(module: linen.Module) -> Model:
    """The model of a Linen module; its collections other than "params" (batch_stats, carry, ...) are model state.

    The collection "carry" belongs to the examples ([example, ...]). Every RNG collection that the module asks for is
    derived from the microbatch's key.
    """

    def init(key: jax.Array, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        args, kwargs = call_arguments(module.__call__, batch, False)
        variables = dict(module.init({"params": key, "dropout": jax.random.fold_in(key, 1)}, *args, **kwargs))
        variables.pop("intermediates", None)
        return variables.pop("params", {}), variables

    def apply(params: Any, model_state: Any, batch: dict[str, jax.Array], key: jax.Array, train: bool):
        args, kwargs = call_arguments(module.__call__, batch, train)
        rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        mutable = list(model_state) if model_state and (train or "carry" in model_state) else False
        variables = {"params": params, **model_state}
        if not mutable:
            return module.apply(variables, *args, rngs=rngs, **kwargs), model_state
        outputs, new_state = module.apply(variables, *args, rngs=rngs, mutable=mutable, **kwargs)
        return outputs, keep_dtypes(model_state, {**model_state, **new_state})

    return Model(init, apply)
