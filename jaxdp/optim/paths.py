"""Per-parameter settings, selected by regular expressions that match anywhere in a path a/b/c."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxdp.errors import UsageError
from jaxdp.split import path_string


def decay_mask(no_decay: Sequence[str]) -> Callable[[Any], Any]:
    """Return a function from params to a tree of booleans, False for leaves whose path matches an expression."""
    patterns = [re.compile(p) for p in no_decay]

    def mask(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not any(p.search(path_string(path)) for p in patterns), params
        )

    return mask


def scale_by_path(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Scale each update by the factor of the first expression that matches its path, or by 1.

    Chained after an optimizer, it also scales decoupled weight decay, like the lr of a PyTorch parameter group; 0
    freezes a parameter. Raises UsageError for an invalid expression.
    """
    rows = []
    for pattern, factor in factors.items():
        try:
            rows.append((re.compile(pattern), factor))
        except re.error as error:
            raise UsageError(f"lr_scale: {pattern!r} is not a regular expression: {error}") from None

    def scale(path: Any, update: Any) -> Any:
        name = path_string(path)
        return update * next((factor for pattern, factor in rows if pattern.search(name)), 1)

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(scale, updates))
