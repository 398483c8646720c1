"""Frozen parameters: leaves without gradient and optimizer state."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdp.split import path_string

Tree = Any


def freeze(frozen: Sequence[str]) -> Callable[[Tree], Tree]:
    """Return a function that replaces each leaf whose path (a/b/c) matches one of the expressions by None."""
    patterns = [re.compile(p) for p in frozen]
    keep = lambda path, x: None if any(p.search(path_string(path)) for p in patterns) else x
    return lambda tree: jax.tree_util.tree_map_with_path(keep, tree) if patterns else tree


def merge(trainable: Tree, full: Tree) -> Tree:
    """Return `trainable` with the leaves of `full` where it has None."""
    return jax.tree.map(lambda a, b: b if a is None else a, trainable, full, is_leaf=lambda x: x is None)
