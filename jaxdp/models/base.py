"""A model is two pure functions; adapters make them from modules of Flax and Equinox, and from functions by hand.

    init(key, batch) -> (params, model_state)
    apply(params, model_state, batch, key, train) -> (outputs, model_state)

batch: one microbatch, {name: [example, ...]}; "inputs" goes to the module's first argument, and "mask" [example]
(True for real examples) or any other entry to an argument of that name. model_state is a nested dict; floats in it are
averaged over microbatches by weight, integers must agree, and what stands under its top-level key "carry"
([example, ...]) belongs to the examples and stays with them. A module declares carry for one example; its adapter makes
one for each. Zeros begin it: a step sets it to zero where examples begin anew.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.errors import UsageError

CARRY = "carry"


class Model(NamedTuple):
    """blocks: paths (a/b) of parameters that `scan_blocks` runs, every leaf stacked [block, ...]."""

    init: Callable[..., tuple[Any, Any]]
    apply: Callable[..., tuple[Any, Any]]
    blocks: tuple[str, ...] = ()


def call_arguments(call: Callable, batch: dict[str, Any], train: bool) -> tuple[tuple, dict[str, Any]]:
    """(positional, keyword) arguments of a bound `__call__(x, mask, train, ...)` out of a batch, by name.

    The first argument takes the entry of its own name, else "inputs". `train`/`training` get the mode,
    `deterministic`/`inference` its opposite, unless the batch has such entries. Raises UsageError where one has no
    source.
    """
    modes = {"train": train, "training": train, "deterministic": not train, "inference": not train}
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for i, p in enumerate(inspect.signature(call).parameters.values()):
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            if i == 0 and "inputs" in batch:  # a Sequential's __call__(*args)
                positional.append(batch["inputs"])
            continue
        source = p.name if p.name in batch else "inputs" if i == 0 and p.name not in modes else None
        if source is not None and source not in batch:
            raise UsageError(
                f"model: its first argument {p.name!r} finds neither {p.name!r} nor 'inputs' among the data's "
                f"{sorted(batch)}"
            )
        if source is not None:
            value = batch[source]
        elif p.name in modes:
            value = modes[p.name]
        elif p.default is not p.empty:
            continue
        else:
            raise UsageError(f"model: nothing to give to its argument {p.name!r}; the data has {sorted(batch)}")
        if p.kind is p.KEYWORD_ONLY:
            keywords[p.name] = value
        elif i == len(positional):
            positional.append(value)
        else:
            keywords[p.name] = value
    return tuple(positional), keywords


def for_each_example(carry: Any, batch: dict[str, Any]) -> Any:
    """Carry declared for one example [...], as that of a batch's [example, ...]."""
    examples = len(next(iter(batch.values())))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (examples, *x.shape)), carry)


def nest(pairs: Iterable[tuple[Sequence[Any], Any]]) -> dict[str, Any]:
    """(path, value) pairs as nested dicts."""
    tree: dict[str, Any] = {}
    for path, value in pairs:
        node = tree
        for part in path[:-1]:
            node = node.setdefault(str(part), {})
        node[str(path[-1])] = value
    return tree


def at(tree: dict[str, Any], path: Sequence[Any]) -> Any:
    """What stands at a path of nested dicts."""
    for part in path:
        tree = tree[str(part)]
    return tree


def keep_dtypes(old: Any, new: Any) -> Any:
    """`new` in the dtypes of `old`: running averages keep the dtype that they are stored in, whatever a model
    computes in."""
    return jax.tree.map(lambda old, new: new.astype(old.dtype), old, new)
