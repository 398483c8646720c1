"""An error is relative, of one leaf, in the L2 norm; a leaf that rounding alone moves as far is not judged."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.split import path_string
from jaxdp.verify.oracle import Trained

Tree = Any
Errors = dict[str, float]  # by path: part/of/the/state
RATES = (1.0, 0.1, 0.01, 0.001)  # of the peak learning rate
NOISE = 1e-2  # a gradient that a change in the last digit changes by this much is rounding
ROUNDS = 3


class Worst(NamedTuple):
    error: float
    leaf: str


class Reference(NamedTuple):
    """What the oracle trained, with tx, which has `rate` of the peak learning rate.

    frozen: expressions of what neither it nor a strategy may train. noise: leaves of the parameters that are, because
    their gradient is nothing but rounding. shaky: other leaves that rounding moves too far to be judged. Both with how
    far a change in the last digit moved them.
    """

    trained: Trained
    tx: optax.GradientTransformation
    rate: float
    frozen: list[str]
    noise: Errors
    shaky: Errors


def leaf_errors(got: Tree, want: Tree) -> Errors:
    """{path: |got - want| / |want|} of every leaf; infinite where only one is finite, or anything else differs."""
    flat = lambda tree: {path_string(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(tree)}
    one, other = flat(got), flat(want)
    return {path: difference(one.get(path), other.get(path)) for path in {**other, **one}}


def difference(got: np.ndarray | None, want: np.ndarray | None) -> float:
    if got is None or want is None or got.shape != want.shape:
        return np.inf
    if not (jnp.issubdtype(want.dtype, jnp.floating) and jnp.issubdtype(got.dtype, jnp.floating)):
        return 0.0 if np.array_equal(got, want) else np.inf
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(np.isfinite(got), finite):
        return np.inf
    got, want = got[finite], want[finite]
    top = max(np.abs(got).max(initial=0.0), np.abs(want).max(initial=0.0)) or 1.0  # or their squares may overflow
    size, apart = np.linalg.norm(want / top), np.linalg.norm(got / top - want / top)
    return float(apart / size) if size else np.inf if apart else 0.0


def parts(trained: Any, curve: Mapping[str, Any]) -> dict[str, Tree]:
    """What is compared of a state (the oracle's, or a strategy's): its trees by name, and the curve."""
    names = ("params", "model_state", "opt_state", "ema", "carry")
    return {**{name: getattr(trained, name) for name in names}, "curve": dict(curve)}


def group(path: str) -> str:
    """params/layers of params/layers/0/kernel: parameters by their first key; the other parts as wholes."""
    return "/".join(path.split("/")[: 2 if path.startswith("params/") else 1])


def worst(errors: Errors) -> Worst:
    return Worst(*max(((error, leaf) for leaf, error in errors.items()), default=(0.0, "")))


def by_group(errors: Errors) -> dict[str, Worst]:
    groups = dict.fromkeys(map(group, errors))
    return {name: worst({leaf: e for leaf, e in errors.items() if group(leaf) == name}) for name in groups}


def find_reference(
    train: Callable[[Tree, optax.GradientTransformation, list[str]], Trained],
    make_tx: Callable[[float], optax.GradientTransformation],
    params: Tree,
    frozen: list[str],
    epsilon: float,
    tolerance: float,
) -> Reference:
    """Trains twice, the second time from parameters changed in their last digit: what comes out different is rounding.

    A gradient that does so altogether (of a bias in front of a BatchNorm, of the keys' bias in an attention) would be
    made into whole steps by Adam: its leaf is frozen. Where training itself makes more of rounding, update by update,
    than could be told from a fault, the learning rate is lowered.

    train(params, tx, frozen): the oracle. epsilon: the last digit.
    """
    rng = np.random.default_rng(0)
    shaken = jax.tree.map(lambda x: x * (1 + epsilon * rng.choice([-1.0, 1.0], x.shape)), params)
    noise = Errors()
    for rate in RATES:
        tx = make_tx(rate)
        for _ in range(ROUNDS):
            own = [*frozen, *(f"^{re.escape(path)}$" for path in noise)]
            one, other = train(params, tx, own), train(shaken, tx, own)
            moved = [leaf_errors(b, a) for a, b in zip(one.grads, other.grads)]
            new = {path: e for path in moved[0] if (e := max(m[path] for m in moved)) > NOISE}
            if not new or len(new) == len(moved[0]):
                break
            noise |= new
        floor = leaf_errors(parts(other, other.curve), parts(one, one.curve))
        if np.median(list(floor.values())) <= max(tolerance / 100, 8 * epsilon):
            break
    return Reference(one, tx, rate, own, noise, {path: e for path, e in floor.items() if e > tolerance / 10})
