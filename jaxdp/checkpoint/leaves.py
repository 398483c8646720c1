"""The leaves of a saved state: their paths, dtypes and shapes."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.core.state import TrainState
from jaxdp.errors import UsageError
from jaxdp.split import path_string

ADDED = ("ema_state",)  # fields that a checkpoint of version 0.1 does not have


def fields_of(state: TrainState) -> dict[str, Any]:
    """Return {name: tree} of the fields that are in use and that every checkpoint with such a state has."""
    return {name: tree for name, tree in all_fields_of(state).items() if name not in ADDED}


def all_fields_of(state: TrainState) -> dict[str, Any]:
    """Return {name: tree} of the fields that are in use."""
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    return {name: tree for name, tree in fields.items() if tree is not None}


def leaves_of(tree: Any) -> dict[str, Any]:
    """Return {path: [dtype, shape]}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_string(path): [str(x.dtype), list(x.shape)] for path, x in leaves}


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def copy(old_copies: Any, tree: Any) -> Any:
    """Copy a tree. old_copies: donated, so that their memory is reused; None allocates new memory."""
    return jax.tree.map(jnp.copy, tree)


def check_same_leaves(step: int, saved: Mapping[str, Any], ours: Mapping[str, Any], rank: int) -> None:
    """Raise UsageError, printed by `rank`, for the first leaf that differs; exponents of exact sums may differ."""
    describe = lambda path, leaves: f"{path} {leaves[path][0]}{leaves[path][1]}" if path in leaves else f"no {path}"
    for path in sorted({**saved, **ours}.keys() - {"exponents"}):
        if saved.get(path) != ours.get(path):
            raise UsageError(
                f"run_dir: checkpoint {step} has {describe(path, saved)}, but this config makes {describe(path, ours)};"
                " resume with the config and code that it was saved with, or choose another --run_dir",
                rank=rank,
            )
