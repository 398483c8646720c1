"""Optimizers that train other parameters than those to evaluate, which follow from their state.

Their states are recognized by the names of their fields, in a run and in a checkpoint, wherever
other transformations contain them. Parameters that such a state does not have, since it is masked,
are evaluated as they are."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.split import fit, is_below, leaves_by_path, path_string

Tree = Any


class Kind(NamedTuple):
    """An optimizer's state. fields: names of its scalars; tree: the name of the tree that mirrors
    the parameters.

    evaluated(a parameter, its counterpart in the tree, the scalars...) -> the parameter to evaluate.
    """

    fields: tuple[str, ...]
    tree: str
    evaluated: Callable[..., Any]


def _schedule_free(y: Any, z: Any, b1: Any, *others: Any) -> Any:
    return (y - (1.0 - b1) * z) / b1


def _sam(x: Any, cache: Any, steps_since_sync: Any) -> Any:
    return jnp.where(steps_since_sync == 0, x, cache)  # x is an adversarial point in between


# Of optax.contrib.schedule_free and optax.contrib.sam.
KINDS = (
    Kind(("b1", "weight_sum", "step_count", "max_lr"), "z", _schedule_free),
    Kind(("steps_since_sync",), "cache", _sam),
)


def sources(paths: Mapping[str, Any]) -> dict[str, tuple[Kind, list[str]]]:
    """Return {name of a parameter: (kind, [path of its counterpart, paths of the scalars])}. paths:
    of the state.
    """
    found: dict[str, tuple[Kind, list[str]]] = {}
    for kind in KINDS:
        first = kind.fields[0]
        starts = [x.removesuffix(first) for x in paths if f"/{x}".endswith(f"/{first}")]
        for start in sorted(starts, key=len):  # the outermost first
            scalars = [f"{start}{field}" for field in kind.fields]
            tree = f"{start}{kind.tree}"
            if {*scalars} <= {*paths}:
                for path in paths:
                    if is_below(path, [tree]):
                        found.setdefault(path[len(tree) + 1 :], (kind, [path, *scalars]))
    return found


def evaluation_arrays(opt_state: Tree) -> dict[str, Any]:
    """Return {path: array} of what `evaluation_params` reads of the optimizer's state; {}: nothing."""
    arrays = leaves_by_path(opt_state)
    return {path: arrays[path] for _, read in sources(arrays).values() for path in read}


def evaluation_params(params: Tree, arrays: Mapping[str, Any]) -> Tree:
    """Return the parameters to evaluate. arrays: from `evaluation_arrays`."""
    found = sources(arrays)

    def one(path: Any, x: Any) -> Any:
        if (name := path_string(path)) not in found:
            return x
        kind, (tree, *scalars) = found[name]
        counterpart = fit(arrays[tree], x.shape)
        values = [arrays[scalar] for scalar in scalars]
        return kind.evaluated(x, counterpart, *values).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(one, params)
