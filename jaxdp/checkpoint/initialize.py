"""Initialize a run from another run's arrays. Optimizer state and EMA are rebuilt from the loaded parameters."""

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
    """Return the initial state, with the arrays in `pairs` {our name: theirs} loaded, sharded and cast to our dtypes.

    The other arrays are initialized as usual. rows {their name: n}: only the first n rows are loaded, the rest are
    initialized. Optimizer state and running average are computed from the resulting parameters.
    """
    abstract, rows = strategy.abstract(), rows or {}
    state = strategy.export(strategy.init()).replace(opt_state=None, ema=None)
    initial = named(state.params, state.model_state)
    values = {name: x for name, x in initial.items() if pairs.get(name) in {None, *rows}}
    del initial
    state = state.replace(params=None, model_state=None)  # free memory before loading
    like = named(abstract.params, abstract.model_state)
    loaded = read({theirs: like[ours] for ours, theirs in pairs.items()})
    for ours, theirs in pairs.items():
        values[ours] = _merge_rows(rows[theirs], loaded[theirs], values[ours]) if theirs in rows else loaded[theirs]
    fill = lambda tree, prefix="": jax.tree_util.tree_map_with_path(
        lambda path, _: values[prefix + path_string(path)], tree
    )
    params = fill(abstract.params)

    def derive(params: Tree) -> tuple[Tree, Tree]:
        params = jax.tree.map(jnp.copy, params)  # an update donates all of the state, so no two arrays may share memory
        average = None if abstract.ema is None else jax.tree.map(lambda p, e: p.astype(e.dtype), params, abstract.ema)
        return tx.init(trainable(params)), average

    shardings = jax.tree.map(lambda x: x.sharding, (abstract.opt_state, abstract.ema))
    opt_state, ema = jax.jit(derive, out_shardings=shardings)(params)
    return strategy.adopt(
        state.replace(params=params, model_state=fill(abstract.model_state, MODEL_STATE), opt_state=opt_state, ema=ema)
    )


def _merge_rows(rows: int, new: jax.Array, old: jax.Array) -> jax.Array:
    """Return `new` in the first `rows` rows and `old` in the rest, with their common sharding."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        inside = jnp.arange(len(new)).reshape(-1, *(1,) * (new.ndim - 1)) < rows
        return jnp.where(inside, new, old)

    return jax.jit(choose, out_shardings=new.sharding)(new, old)
