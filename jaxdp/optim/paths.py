"""What differs between parameters goes by path: regular expressions found anywhere in a/b/c."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxdp.errors import UsageError
from jaxdp.split import path_string


def decay_mask(no_decay: Sequence[str]) -> Callable[[Any], Any]:
    """params -> the same tree of booleans: False where a leaf's path (a/b/c) matches one of the expressions."""
    patterns = [re.compile(p) for p in no_decay]

    def mask(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not any(p.search(path_string(path)) for p in patterns), params
        )

    return mask


def scale_by_path(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Learning rates by group: each update times the factor of the first expression found in its path, or times 1.

    After an optimizer, it scales the decoupled weight decay too, as a PyTorch parameter group's lr does; 0 freezes.
    An expression that is found nowhere does nothing: ask `unmatched`. Raises UsageError for what is no expression.
    """
    rows = []
    for pattern, factor in factors.items():
        try:
            rows.append((re.compile(pattern), factor))
        except re.error as error:
            raise UsageError(f"lr_scale: {pattern!r} is not a regular expression: {error}") from None

    def scale(path: Any, update: Any) -> Any:
        own = path_string(path)
        return update * next((factor for pattern, factor in rows if pattern.search(own)), 1)

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(scale, updates))


def unmatched(patterns: Iterable[str], params: Any) -> list[str]:
    """Those of the expressions that are found in no parameter's path."""
    paths = [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return [p for p in patterns if not any(re.search(p, path) for path in paths)]
