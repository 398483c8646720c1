"""A run begins with arrays of another's in the place of its own; what follows from the parameters is made from them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp.checkpoint.matching import MODEL_STATE, named
from jaxdp.core.state import TrainState
from jaxdp.parallel.strategy import Strategy
from jaxdp.split import path_string

Tree = Any


def begin_with(
    strategy: Strategy,
    pairs: Mapping[str, str],
    read: Callable[[Mapping[str, Any]], dict[str, Any]],
    tx: optax.GradientTransformation,
    trainable: Callable[[Tree], Tree],
    rows: Mapping[str, int] | None = None,
) -> TrainState:
    """The state before the first update, its arrays `pairs` {our name: theirs} read in their place, in our dtypes.

    The others are initialized as ever, and of those in `rows` {their name: how many} all rows but the first so many.
    Optimizer state and running average are those of the parameters that result.
    """
    places, rows = strategy.abstract(), rows or {}
    state = strategy.export(strategy.init()).replace(opt_state=None, ema=None)
    first = named(state.params, state.model_state)
    values = {name: x for name, x in first.items() if pairs.get(name) in {None, *rows}}
    del first
    state = state.replace(params=None, model_state=None)  # what is not needed goes before anything comes
    like = named(places.params, places.model_state)
    found = read({theirs: like[ours] for ours, theirs in pairs.items()})
    for ours, theirs in pairs.items():
        values[ours] = _below(rows[theirs], found[theirs], values[ours]) if theirs in rows else found[theirs]
    put = lambda tree, prefix="": jax.tree_util.tree_map_with_path(
        lambda path, _: values[prefix + path_string(path)], tree
    )
    params = put(places.params)

    def derive(params: Tree) -> tuple[Tree, Tree]:
        params = jax.tree.map(jnp.copy, params)  # an update donates all of the state, so no two arrays may share memory
        average = None if places.ema is None else jax.tree.map(lambda p, e: p.astype(e.dtype), params, places.ema)
        return tx.init(trainable(params)), average

    where = jax.tree.map(lambda x: x.sharding, (places.opt_state, places.ema))
    opt_state, ema = jax.jit(derive, out_shardings=where)(params)
    return strategy.adopt(
        state.replace(params=params, model_state=put(places.model_state, MODEL_STATE), opt_state=opt_state, ema=ema)
    )


def _below(rows: int, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` in so many first rows, `old` in the rest; placed as both are."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        inside = jnp.arange(len(new)).reshape(-1, *(1,) * (new.ndim - 1)) < rows
        return jnp.where(inside, new, old)

    return jax.jit(choose, out_shardings=new.sharding)(new, old)
