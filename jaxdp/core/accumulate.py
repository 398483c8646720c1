"""Gradients of a replica's microbatches: all at once, or one after the other to save memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any
# loss_and_sums(params, carry, batch, slot, coupled) -> (the scaled loss [], Sums of one microbatch)
Loss = Callable[..., tuple[jax.Array, Any]]


def at_once(loss_and_sums: Loss, params: Tree, pieces: Tree) -> Any:
    """Return the Sums of pieces [slot, ...], differentiating their total: one product per weight, not per slot."""
    if len(jax.tree.leaves(pieces)[0]) == 1:
        return _single(loss_and_sums, params, pieces)

    def total(params: Tree) -> tuple[jax.Array, Any]:
        loss, sums = jax.vmap(lambda *piece: loss_and_sums(params, *piece))(*pieces)
        summed = jax.tree.map(lambda x: x.sum(0), sums._replace(carry=None))
        return loss.sum(), summed._replace(carry=sums.carry)

    (_, sums), grads = jax.value_and_grad(total, has_aux=True)(params)
    return sums._replace(grads=grads)


def one_by_one(loss_and_sums: Loss, params: Tree, pieces: Tree) -> Any:
    """Accumulate gradients slot by slot, with the activations of one slot in memory at a time; return the same Sums."""

    def slot_sums(piece: Tree) -> Any:
        (_, sums), grads = jax.value_and_grad(loss_and_sums, has_aux=True)(params, *piece)
        return sums._replace(grads=grads)

    def add(sums: Any, piece: Tree) -> tuple[Any, Tree]:
        new = slot_sums(piece)
        return jax.tree.map(jnp.add, sums, new._replace(carry=None)), new.carry

    shapes = jax.eval_shape(slot_sums, _first(pieces))._replace(carry=None)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums, carry = jax.lax.scan(add, zero, pieces)
    return sums._replace(carry=carry)


def _single(loss_and_sums: Loss, params: Tree, pieces: Tree) -> Any:
    (_, sums), grads = jax.value_and_grad(loss_and_sums, has_aux=True)(params, *_first(pieces))
    return sums._replace(grads=grads, carry=jax.tree.map(lambda x: x[None], sums.carry))


def _first(pieces: Tree) -> Tree:
    return jax.tree.map(lambda x: x[0], pieces)


ACCUMULATE: dict[str, Callable[[Loss, Tree, Tree], Any]] = {"vmap": at_once, "scan": one_by_one}
MAP: dict[str, Callable[[Callable, Tree], Any]] = {"vmap": lambda f, pieces: jax.vmap(f)(pieces), "scan": jax.lax.map}
