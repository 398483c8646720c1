"""The leaves of a saved state: their paths, dtypes and shapes, and one SHA-256 over the parameters,
to compare two runs by a string.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import SequenceKey

from jaxdp.checkpoint.manifest import Meta
from jaxdp.errors import UsageError
from jaxdp.precision import is_key
from jaxdp.split import leaves_by_path, path_string
from jaxdp.train.state import TrainState

ADDED = ("ema_state",)  # fields that a checkpoint of version 0.1 does not have
FIELDS = ("step", "params", "model_state", "opt_state", "loss_scale", "guard")
PLAIN = re.compile(r"[A-Za-z0-9_-]{1,100}")


def all_fields_of(state: TrainState) -> dict[str, Any]:
    """Return {name: tree} of what is saved of a state: the fields in use, and the entries of `extra`
    and `kept` by their own names, as in checkpoints of version 0.1. The seed is the config's."""
    fields = {name: getattr(state, name) for name in FIELDS}
    fields["opt_state"] = jax.tree.map(
        lambda x: all_fields_of(x) if is_state(x) else x, fields["opt_state"], is_leaf=is_state
    )
    fields |= {**state.extra, **state.kept}
    return {name: tree for name, tree in fields.items() if tree is not None}


def state_of(fields: Mapping[str, Any], like: TrainState) -> TrainState:
    """Return the state of saved fields, with the structure of `like`: the inverse of
    `all_fields_of`."""

    def nested(like, saved):
        return state_of(saved, like) if is_state(like) else saved

    opt_state = jax.tree.map(nested, like.opt_state, fields["opt_state"], is_leaf=is_state)
    return like.replace(
        **{name: fields[name] for name in FIELDS if name in fields and name != "opt_state"},
        opt_state=opt_state,
        extra={name: fields[name] for name in like.extra},
        kept={name: fields[name] for name in like.kept},
        seed=None,
    )


def is_state(x: Any) -> bool:
    return isinstance(x, TrainState)


def leaves_of(tree: Any) -> dict[str, Any]:
    """Return {path: [dtype, shape]}."""
    return {path: [str(x.dtype), list(x.shape)] for path, x in leaves_by_path(tree).items()}


def is_plain(tree: Any) -> bool:
    """Return whether Orbax can name each leaf by the keys of its path, which it turns into texts
    and joins by dots.
    """

    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        for key in path:
            name = getattr(key, "key", getattr(key, "name", None))
            is_name = isinstance(name, str) and PLAIN.fullmatch(name)
            if not is_name and not isinstance(key, SequenceKey):
                return False
    return True


def by_number(tree: Any, paths: Sequence[str]) -> dict[str, Any]:
    """Return {number of its path: leaf}, as a checkpoint stores leaves with other keys."""
    leaves = leaves_by_path(tree)
    return {str(number): leaves[path] for number, path in enumerate(paths) if path in leaves}


def path_in(meta: Meta, key: Any) -> str:
    """Return the path in the state of a leaf with the path `key` in Orbax. meta: of the
    checkpoint.
    """
    path = path_string(key)
    return meta["numbered"][int(path)] if "numbered" in meta else path


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def copy(old_copies: Any, tree: Any) -> Any:
    """Copy a tree. old_copies: donated, so that their memory is reused; None allocates new memory."""
    return jax.tree.map(jnp.copy, tree)


def check_same_leaves(step: int, saved: Meta, ours: Mapping[str, Any], rank: int) -> None:
    """Raise UsageError, printed by `rank`, for the first leaf that differs; exponents of integer sums
    may differ.
    """

    def describe(path, leaves):
        return f"{path} {leaves[path][0]}{leaves[path][1]}" if path in leaves else f"no {path}"

    for path in sorted({**saved, **ours}.keys() - {"exponents"}):
        if saved.get(path) != ours.get(path):
            raise UsageError(
                f"run_dir: checkpoint {step} has {describe(path, saved)}, but this config makes {describe(path, ours)};"
                " resume with the config and code that it was saved with, or choose another --run_dir",
                rank=rank,
            )


def params_sha256(params: Any) -> str:
    """Return the SHA-256 over the leaves in path order, each as path, dtype, shape and
    little-endian bytes.

    params: global arrays, replicated or split, or NumPy arrays. Every process must call this.
    """
    digest = hashlib.sha256()
    for path, leaf in sorted(leaves_by_path(params).items()):
        value = host(leaf)
        digest.update(json.dumps([path, str(value.dtype), list(value.shape)]).encode())
        digest.update(
            np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"), copy=False)).tobytes()
        )
    return digest.hexdigest()


def host(leaf: Any) -> np.ndarray:
    """Return the full array on the host (the data of a PRNG key); all processes gather one that is
    split over them.
    """
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_data(0))
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
