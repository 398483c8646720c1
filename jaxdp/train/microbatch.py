"""Sums over a replica's microbatches: the forward pass of one; gradients of all, at once or one
after the other.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.data.example_order import RESET
from jaxdp.data.transforms import NOT_OF_EXAMPLES
from jaxdp.losses import apply_loss
from jaxdp.models.base import CARRY
from jaxdp.models.scan import block_hooks
from jaxdp.models.scan import remat as rematerialize
from jaxdp.targets import attribute
from jaxdp.train.carry import Carried, carry_of_examples, reset_carry, split_carry
from jaxdp.train.coupled import Coupled, couple, surrogate_loss
from jaxdp.train.frozen import merge
from jaxdp.train.interpreter import inside
from jaxdp.train.metric_sums import at_least_float32, check_result
from jaxdp.train.model_state import weighted_state
from jaxdp.train.options import Forward
from jaxdp.train.state import (
    Batch,
    Gather,
    Join,
    Sums,
    View,
    microbatch_key,
    plain_gather,
    plain_join,
)

Tree = Any
# loss_and_sums(params, carry, batch, number, coupled) -> (the scaled loss [], Sums of one
# microbatch)
Loss = Callable[..., tuple[jax.Array, Sums]]
# differentiate(params) -> ((a loss, Sums without gradients), gradients)
Differentiate = Callable[[Tree], tuple[tuple[Any, Sums], Tree]]


class Microbatch(NamedTuple):
    """The forward pass in one call of a step."""

    options: Forward
    view: View
    gather: Gather
    train: bool = False

    def forward(
        self, params: Tree, carry: Tree, batch: Batch, number: jax.Array
    ) -> tuple[Tree, Batch, Tree]:
        """Return (the model's outputs, the batch for the loss, the new model state).

        A microbatch without examples is computed like any other and has weight 0; if the model saw
        it masked, BatchNorm would divide 0 by 0. A mask that is negative or NaN makes the loss NaN.
        """
        options, mask = self.options, batch["mask"]
        batch = replace_masked(batch)
        key, augment_key = jax.random.split(microbatch_key(self.view.seed, self.view.step, number))
        transform = options.transform if self.train else options.eval_transform
        if transform is not None:
            batch = transform(batch, augment_key, self.train)
        state = self.view.model_state
        if carry is not None:
            state = {**state, CARRY: reset_carry(carry, batch.get(RESET))}
        visible = jnp.logical_or(mask != 0, jnp.logical_not(jnp.any(mask != 0)))
        params, block_gather = self.gather(merge(params, self.view.params), options.policy.compute)
        inputs = options.policy.inputs({**batch, "mask": visible})
        remat = options.remat if self.train else "none"
        apply = rematerialize(
            "none" if options.model.blocks else remat, options.model.apply, static_argnums=(4,)
        )
        with block_hooks(block_gather, remat):
            outputs, new_state = apply(params, state, inputs, key, self.train)
        mask = mask.astype(options.policy.state)
        loss_batch = {**batch, "mask": jnp.where(mask >= 0, mask, jnp.nan)}
        return options.policy.outputs(outputs), loss_batch, new_state

    def loss_and_sums(
        self, params: Tree, carry: Tree, batch: Batch, number: jax.Array, coupled: Coupled | None
    ) -> tuple[jax.Array, Sums]:
        """Return (the scaled loss [], the sums without gradients); both are 0 if the microbatch has
        no example.

        params: those to differentiate by, None for the others, which `view` has.
        """
        real = jnp.any(batch["mask"] != 0)
        outputs, loss_batch, new_state = self.forward(params, carry, batch, number)
        new_state, new_carry = split_carry(new_state)
        if coupled is None:
            total, weight, metrics = check_result(
                apply_loss(self.options.loss, outputs, loss_batch)
            )
            scaled = total
        else:
            total, weight, metrics, cotangents = coupled
            scaled = (
                surrogate_loss(outputs, cotangents).astype(total.dtype) if self.train else total
            )
        dtype = total.dtype
        weight = weight.astype(dtype)
        sums = Sums(
            grads=None,
            loss=total,
            weight=weight,
            metrics=jax.tree.map(lambda x: x.astype(dtype), metrics),
            model_state=weighted_state(self.view.model_state, new_state, weight, real),
        )
        sums, scaled = jax.tree.map(lambda x: jnp.where(real, x, jnp.zeros_like(x)), (sums, scaled))
        new_carry = carry_of_examples(
            batch["mask"], reset_carry(carry, batch.get(RESET)), new_carry
        )
        if self.options.loss_scaling is not None:
            scaled = scaled * self.options.loss_scaling.factor(self.view.loss_scale).astype(dtype)
        return scaled, sums._replace(carry=new_carry)


def replace_masked(batch: Batch) -> Batch:
    """Return the batch with the first real example in the place of each example whose mask is 0.

    The contents of these may be anything, and 0 times NaN is NaN, in the gradient of a weight too.
    If no example is real, numbers that are not finite become 0, and so they do where a mask of
    tokens excludes them."""
    mask = batch["mask"]
    real = jnp.any(mask.reshape(len(mask), -1) != 0, axis=-1)

    def select(x: jax.Array) -> jax.Array:
        if x.shape[:1] != real.shape:
            return x
        finite = jnp.where(jnp.isfinite(x), x, 0) if jnp.issubdtype(x.dtype, jnp.inexact) else x
        if mask.ndim > 1 and x.shape[: mask.ndim] == mask.shape:
            x = jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)) != 0, x, finite)
        example = jnp.where(jnp.any(real), x[jnp.argmax(real)], finite)
        return jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), x, example)

    return {name: x if name in NOT_OF_EXAMPLES else select(x) for name, x in batch.items()}


def at_once(loss_and_sums: Loss, pieces: Tree) -> Differentiate:
    """Differentiate the total over pieces [local, ...]: one product per weight, not per microbatch.

    Floats of 16 bits are left to `one_by_one`. Their products for several microbatches round, and
    overflow, by how many microbatches a device has, and XLA rounds a mapped convolution in other
    places than a single one."""
    first = jax.tree.map(lambda x: x[0], pieces)
    single = len(jax.tree.leaves(pieces)[0]) == 1

    def total(params: Tree) -> tuple[jax.Array, Sums]:
        if single:
            loss, sums = loss_and_sums(params, *first)
            return loss, sums._replace(carry=jax.tree.map(lambda x: x[None], sums.carry))
        losses, sums = jax.vmap(loss_and_sums, in_axes=(None, *[0] * len(pieces)))(params, *pieces)
        summed = jax.tree.map(lambda x: x.sum(0), sums._replace(carry=None))
        return losses.sum(), summed._replace(carry=sums.carry)

    def differentiate(params: Tree) -> tuple[tuple[Any, Sums], Tree]:
        narrow = has_narrow_floats(loss_and_sums, params, *first)
        return (
            one_by_one(loss_and_sums, pieces) if narrow else jax.value_and_grad(total, has_aux=True)
        )(params)

    return differentiate


def has_narrow_floats(f: Callable, *args: Any) -> bool:
    """Return whether f(*args) has a float of less than 32 bits anywhere, from its arguments or of
    its own accord.
    """

    def is_narrow(value: Any) -> bool:
        dtype = getattr(value.aval, "dtype", None)
        return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4

    def anywhere(jaxpr: Any) -> bool:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # an open one is its own
        return any(map(is_narrow, jaxpr.invars)) or any(
            any(map(is_narrow, eqn.outvars)) or any(map(anywhere, inside(eqn)))
            for eqn in jaxpr.eqns
        )

    return anywhere(jax.make_jaxpr(f)(*args))


def one_by_one(loss_and_sums: Loss, pieces: Tree) -> Differentiate:
    """Accumulate gradients microbatch by microbatch, with the activations of one microbatch in
    memory at a time.

    Sums are at least float32: a sum of bfloat16 stops growing after some 256 microbatches.
    """

    def accumulate(params: Tree) -> tuple[tuple[None, Sums], Tree]:
        @functools.partial(jax.jit, inline=True)  # traced once
        def microbatch_sums(piece: Tree) -> Sums:
            (_, sums), grads = jax.value_and_grad(loss_and_sums, has_aux=True)(params, *piece)
            return sums._replace(grads=grads)

        def add(sums: Sums, piece: Tree) -> tuple[Sums, Tree]:
            new = microbatch_sums(piece)
            return jax.tree.map(
                lambda x, y: x + y.astype(x.dtype), sums, new._replace(carry=None)
            ), new.carry

        shapes = jax.eval_shape(microbatch_sums, jax.tree.map(lambda x: x[0], pieces))._replace(
            carry=None
        )
        start = jax.tree.map(lambda x: at_least_float32(jnp.zeros(x.shape, x.dtype)), shapes)
        sums, carry = jax.lax.scan(add, start, pieces)
        return (None, sums._replace(carry=carry, grads=None)), sums.grads

    return accumulate


def map_at_once(f: Callable, pieces: Tree) -> Tree:
    """Return f of all pieces [local, ...] at once, in 16 bits one after the other (see `at_once`);
    a single one is not mapped, since a model may not support it."""
    first = jax.tree.map(lambda x: x[0], pieces)
    if len(jax.tree.leaves(pieces)[0]) == 1:
        return jax.tree.map(lambda x: x[None], f(first))
    return jax.lax.map(f, pieces) if has_narrow_floats(f, first) else jax.vmap(f)(pieces)


ACCUMULATE: dict[str, Callable[[Loss, Tree], Differentiate]] = {"vmap": at_once, "scan": one_by_one}
MAP: dict[str, Callable[[Callable, Tree], Any]] = {"vmap": map_at_once, "scan": jax.lax.map}


def make_grads(
    forward: Forward, trainable: Callable[[Tree], Tree], accumulate: str, padded: bool
) -> Callable:
    """Build `Step.grads`."""

    def grads(
        view: View,
        batch: Batch,
        numbers: jax.Array,
        gather: Gather = plain_gather,
        join: Join = plain_join,
    ) -> Sums:
        mask = batch["mask"]
        if not padded:
            batch = {**batch, "mask": jnp.ones_like(mask)}  # a constant that the compiler can fold
        microbatch = Microbatch(forward, view, gather, train=True)
        coupled = first_pass(microbatch, accumulate, view.carry, batch, numbers, join)
        pieces = (view.carry, batch, numbers, coupled)
        differentiate = ACCUMULATE[accumulate](microbatch.loss_and_sums, pieces)
        (_, sums), gradients = differentiate(trainable(view.params))
        sums = sums._replace(grads=gradients)
        if view.carry is not None:
            sums = sums._replace(carry=Carried(sums.carry, batch.get(RESET)))
        if padded:
            return sums
        # With a constant weight, XLA would fuse the division into every reader of a gradient and
        # compute it each time.
        return sums._replace(weight=sums.weight * jnp.max(mask).astype(sums.weight.dtype))

    return grads


def make_evaluate(forward: Forward, accumulate: str) -> Callable:
    """Build `Step.evaluate`."""

    def evaluate(
        view: View,
        batch: Batch,
        numbers: jax.Array,
        gather: Gather = plain_gather,
        join: Join = plain_join,
    ) -> Sums:
        """Sum without gradients. The carry starts at zero, unless batches mark where sequences
        start.
        """
        keep = RESET in batch
        carry = view.carry if keep else jax.tree.map(jnp.zeros_like, view.carry)
        microbatch = Microbatch(forward, view, gather)

        def microbatch_sums(piece: Any) -> Sums:
            sums = microbatch.loss_and_sums(view.params, *piece)[1]
            return sums._replace(model_state=None, carry=sums.carry if keep else None)

        coupled = first_pass(microbatch, accumulate, carry, batch, numbers, join)
        sums = MAP[accumulate](microbatch_sums, (carry, batch, numbers, coupled))
        return jax.tree.map(lambda x: x.sum(0), sums._replace(carry=None))._replace(
            carry=sums.carry
        )

    return evaluate


def first_pass(
    microbatch: Microbatch,
    accumulate: str,
    carry: Tree,
    batch: Batch,
    numbers: jax.Array,
    join: Join,
) -> Coupled | None:
    """Compute all outputs and couple them in the loss; return None if the loss is a sum over single
    examples.
    """
    if attribute(microbatch.options.loss, "scope", "example") != "global":
        return None

    def microbatch_outputs(piece: Any) -> tuple[Tree, Batch]:
        return microbatch.forward(microbatch.view.params, *piece)[:2]

    outputs, loss_batch = join(MAP[accumulate](microbatch_outputs, (carry, batch, numbers)))
    return couple(microbatch.options.loss, outputs, loss_batch, numbers, microbatch.train)
