"""The digest of a run: one SHA-256 over its parameters, to compare two runs by a string."""

import hashlib
import json
from typing import Any

import jax
import numpy as np

from jaxdp.precision import is_key
from jaxdp.split import path_string


def params_sha256(params: Any) -> str:
    """Return the SHA-256 over the leaves in path order, each as path, dtype, shape and
    little-endian bytes.

    params: global arrays, replicated or split, or NumPy arrays. Every process must call this.
    """
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    digest = hashlib.sha256()
    for path, leaf in sorted((path_string(path), leaf) for path, leaf in leaves):
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
