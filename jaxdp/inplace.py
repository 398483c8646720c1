"""An update that may turn out not to be taken, and that overwrites the old state in place all the same.

Chosen at the end, between the new and the old of a leaf, the new one has two readers: the choice, and what else is made
of it. A compiler computes it twice then, and copies the old one to compute the second from. So the choice is made where
a leaf is, and all that follows reads what was chosen. The interpreter follows "Writing custom interpreters in JAX" (JAX
documentation).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Var

Tree = Any


def where(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    """One tree or the other, as a whole; a leaf that is one array in both is left alone."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), yes, no)


def update(
    tx: optax.GradientTransformation, taken: jax.Array, grads: Tree, state: Tree, params: Tree
) -> tuple[Tree, Tree]:
    """tx.update(grads, state, params), with the old state where not `taken` []; the updates mean nothing then."""
    closed, shapes = jax.make_jaxpr(tx.update, return_shape=True)(grads, state, params)
    jaxpr, old = closed.jaxpr, jax.tree.leaves(state)
    out = jaxpr.outvars[len(jaxpr.outvars) - len(old) :]
    before = {x: y for x, y in zip(out, old, strict=True) if isinstance(x, Var)}
    arguments = [*closed.consts, *jax.tree.leaves((grads, state, params))]
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))
    read = lambda x: values[x] if isinstance(x, Var) else x.val
    chosen = set()
    for eqn in jaxpr.eqns:
        found = eqn.primitive.bind(*map(read, eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
        for x, value in zip(eqn.outvars, found if eqn.primitive.multiple_results else [found], strict=True):
            values[x] = jnp.where(taken, value, before[x]) if x in before else value
            chosen.add(x)
    done = [isinstance(x, Var) and x in chosen and before[x] is y for x, y in zip(out, old, strict=True)]
    updates, new = jax.tree.unflatten(jax.tree.structure(shapes), [read(x) for x in jaxpr.outvars])
    keep = lambda done, a, b: a if done else where(taken, a, b)  # what is one of the arguments, or two leaves at once
    return updates, jax.tree.map(keep, jax.tree.unflatten(jax.tree.structure(state), done), new, state)
