"""Read a first checkpoint back before it is reported: what Orbax stores must be what it was given."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxdp.checkpoint.digest import host
from jaxdp.checkpoint.leaves import path_in
from jaxdp.checkpoint.orbax import described, load_alone, orbax
from jaxdp.precision import is_key
from jaxdp.split import path_string

LARGEST = 1 << 22  # bytes of the array that is compared


def sample(tree: Any) -> tuple[str, np.ndarray]:
    """Return (path, values) of the largest array up to `LARGEST` that this process has, if possible
    of a parameter.
    """
    leaves = {path_string(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}

    def whole(x):
        return not is_key(x) and (x.is_fully_replicated or x.is_fully_addressable)

    sizes = {path: x.nbytes for path, x in leaves.items() if x.nbytes <= LARGEST and whole(x)}
    path = max(sizes, key=lambda path: (path.startswith("params"), sizes[path]))
    return path, np.array(host(leaves[path]))


def read_back(
    folder: pathlib.Path, meta: Mapping[str, Any], sample: tuple[str, np.ndarray]
) -> None:
    """Read the names and shapes of a checkpoint, and one array. Raises ValueError if they are not
    what was saved.

    Only this process reads. meta: of the checkpoint. sample: see there.
    """
    path, values = sample
    tree, path_of = described(folder), path_in(meta)
    stored = {path_of(key): list(x.shape) for key, x in jax.tree_util.tree_leaves_with_path(tree)}
    saved = {name: shape for name, (_, shape) in meta["state"].items()}
    for name in sorted({**saved, **stored}):
        if saved.get(name) != stored.get(name):
            raise ValueError(
                f"read back, {name!r} has shape {stored.get(name)} instead of {saved.get(name)}"
            )

    def target(key, _):
        return values if path_of(key) == path else orbax().PLACEHOLDER

    loaded = load_alone(folder, jax.tree_util.tree_map_with_path(target, tree))
    arrays = {path_of(key): x for key, x in jax.tree_util.tree_leaves_with_path(loaded)}
    if np.asarray(arrays[path]).tobytes() != values.tobytes():
        raise ValueError(f"read back, {path!r} has other values")
