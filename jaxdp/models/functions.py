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
    ...]. Raises UsageError for other return values.

    The pairs of Haiku, `hk.transform` and `hk.transform_with_state`, are such functions: their
    signatures name the arguments of the function that was transformed."""
    names = [*inspect.signature(apply).parameters, ""]

    def as_pair(name: str, result: Any, what: str) -> Any:
        if "state" not in names:
            return result, {}
        match result:
            case tuple((_, dict())):
                return result
        raise UsageError(
            f"model: apply takes 'state', so {name} must return ({what}, state), with a dict as state, not "
            f"{type(result).__name__}"
        )

    def init_(key, batch):
        # In training for Haiku, whose BatchNorm makes its averages there.
        train = names[1] in ("rng", "state")
        args, kwargs = call_arguments(functools.partial(init, key), batch, train, key)
        params, state = as_pair("init", init(key, *args, **kwargs), "params")
        rehearse(apply_, params, state, batch, key)
        return params, state

    def bound(params, state):
        if names[1] == "state":
            return functools.partial(apply, params, state)
        return functools.partial(apply, params, **({"state": state} if "state" in names else {}))

    def apply_(params, model_state, batch, key, train):
        remaining, entries = bound(params, model_state), {**batch, "state": model_state}
        args, kwargs = call_arguments(remaining, entries, train, key)
        outputs, state = as_pair("apply", remaining(*args, **kwargs), "outputs")
        structure: Any = jax.tree.structure(model_state)
        if jax.tree.structure(state) != structure:
            raise UsageError(
                f"model: init returned the state {sorted(model_state)}, but apply {sorted(state)}; they must match"
            )
        return outputs, keep_dtypes(model_state, state)

    return Model(init_, apply_, module=bound)
