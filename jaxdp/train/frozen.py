"""Frozen parameters: leaves without gradient and optimizer state."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdp.split import path_string

Tree = Any


def freeze(frozen: Sequence[str]) -> Callable[[Tree], Tree]:
    """Return a function that replaces leaves by None where their path (a/b/c) matches one of the
    expressions.
    """
    patterns = [re.compile(p) for p in frozen]

    def mask(path, x):
        return None if any(p.search(path_string(path)) for p in patterns) else x

    return lambda tree: jax.tree_util.tree_map_with_path(mask, tree) if patterns else tree


def merge(trainable: Tree, full: Tree) -> Tree:
    """Fill the None leaves of `trainable` with those of `full`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, trainable, full, is_leaf=lambda x: x is None
    )
