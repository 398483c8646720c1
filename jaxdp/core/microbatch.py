"""The forward pass of one microbatch: from its batch to the sums of its loss, weight and metrics."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.core.carry import carry_of_examples, reset_carry, split_carry
from jaxdp.core.coupled import Coupled, surrogate_loss
from jaxdp.core.model_state import weighted_state
from jaxdp.core.state import Batch, Gather, Sums, Transform, View, microbatch_key
from jaxdp.data.cursor import RESET
from jaxdp.losses import LossFn, apply_loss
from jaxdp.metrics.sums import check_result
from jaxdp.models.base import CARRY, Model
from jaxdp.models.scan import block_hooks
from jaxdp.models.scan import remat as rematerialize
from jaxdp.precision import LossScaling, Policy

Tree = Any


class Microbatch(NamedTuple):
    """A forward pass. remat: which values the backward pass recomputes (`jaxdp.models.scan.REMAT`), block by block if
    the model has blocks. transform, eval_transform: change the batch before the model, in training and evaluation."""

    model: Model
    loss: LossFn
    policy: Policy
    seed: int
    remat: str = "none"
    loss_scaling: LossScaling | None = None
    transform: Transform | None = None
    eval_transform: Transform | None = None

    def forward(
        self, view: View, batch: Batch, slot: jax.Array, train: bool, gather: Gather
    ) -> tuple[Tree, Batch, Tree]:
        """Return (the model's outputs, the batch for the loss, the new model state).

        Padding repeats a real example. A microbatch without examples is computed like any other and has weight 0; if
        the model saw it masked, BatchNorm would divide 0 by 0.
        """
        key, augment_key = jax.random.split(microbatch_key(self.seed, view.step, slot))
        mask = batch["mask"]
        transform = self.transform if train else self.eval_transform
        if transform is not None:
            batch = transform(batch, augment_key, train)
        state = view.model_state
        if view.carry is not None:
            state = {**state, CARRY: reset_carry(view.carry, batch.get(RESET))}
        visible = jnp.logical_or(mask != 0, jnp.logical_not(jnp.any(mask != 0)))
        params, block_gather = gather(view.params, self.policy.compute)
        inputs = self.policy.inputs({**batch, "mask": visible})
        remat = self.remat if train else "none"
        apply = rematerialize(
            "none" if self.model.blocks else remat, functools.partial(_apply, self.model.apply, train)
        )
        with block_hooks(block_gather, remat):
            outputs, new_state = apply(params, state, inputs, key)
        return self.policy.outputs(outputs), {**batch, "mask": mask.astype(self.policy.state)}, new_state

    def loss_and_sums(
        self, view: View, batch: Batch, slot: jax.Array, coupled: Coupled | None, train: bool, gather: Gather
    ) -> tuple[jax.Array, Sums]:
        """Return (the scaled loss [], the sums without gradients); both are 0 if the microbatch has no example."""
        real = jnp.any(batch["mask"] != 0)
        outputs, loss_batch, new_state = self.forward(view, batch, slot, train, gather)
        new_state, carry = split_carry(new_state)
        if coupled is None:
            total, weight, metrics = check_result(apply_loss(self.loss, outputs, loss_batch))
            scaled = total
        else:
            total, weight, metrics, cotangents = coupled
            scaled = surrogate_loss(outputs, cotangents).astype(total.dtype) if train else total
        dtype = total.dtype
        weight = weight.astype(dtype)
        sums = Sums(
            grads=None,
            loss=total,
            weight=weight,
            metrics=jax.tree.map(lambda x: x.astype(dtype), metrics),
            model_state=weighted_state(view.model_state, new_state, weight, real),
        )
        sums, scaled = jax.tree.map(lambda x: jnp.where(real, x, jnp.zeros_like(x)), (sums, scaled))
        carry = carry_of_examples(batch["mask"], reset_carry(view.carry, batch.get(RESET)), carry)
        if self.loss_scaling is not None:
            scaled = scaled * self.loss_scaling.factor(view.loss_scale).astype(dtype)
        return scaled, sums._replace(carry=carry)


def _apply(apply: Callable[..., Any], train: bool, *args: Any) -> Any:
    return apply(*args, train)
