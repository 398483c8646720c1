"""The adapter for a pair of plain functions; their argument names select the entries of a
microbatch.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from jaxdp.errors import UsageError
from jaxdp.models.base import Model, call_arguments, keep_dtypes, rehearse


def from_functions(init: Callable, apply: Callable) -> Model:
    """Return the `Model` of init(key, inputs, ...) -> params and apply(params, inputs, ...) ->
    outputs.

    The first argument is the key, or the parameters; the second gets "inputs" unless it has another
    entry's name; further arguments get by name an entry of the batch (such as mask), `key`, `train`
    (see `call_arguments`) or `state`. If apply takes `state`, init must return (params, state), and
    apply (outputs, state), with a dict as in `jaxdp.models.base`, whose entry "carry" is [example,
    ...]. Raises UsageError for other return values."""
    stateful = "state" in inspect.signature(apply).parameters

    def as_pair(name: str, result: Any, what: str) -> Any:
        if not stateful:
            return result, {}
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise UsageError(
                f"model: apply takes 'state', so {name} must return ({what}, state), with a dict as state, not "
                f"{type(result).__name__}"
            )
        return result

    def init_(key, batch):
        args, kwargs = call_arguments(functools.partial(init, key), batch, False, key)
        params, state = as_pair("init", init(key, *args, **kwargs), "params")
        rehearse(apply_, params, state, batch, key)
        return params, state

    def apply_(params, model_state, batch, key, train):
        entries = batch | {"state": model_state} if stateful else batch
        args, kwargs = call_arguments(functools.partial(apply, params), entries, train, key)
        outputs, state = as_pair("apply", apply(params, *args, **kwargs), "outputs")
        structure: Any = jax.tree.structure(model_state)
        if jax.tree.structure(state) != structure:
            raise UsageError(
                f"model: init returned the state {sorted(model_state)}, but apply {sorted(state)}; they must match"
            )
        return outputs, keep_dtypes(model_state, state)

    def trained(params, state):
        return functools.partial(apply, params, **({"state": state} if stateful else {}))

    return Model(init_, apply_, module=trained)
