"""The update from sums over all devices: the one division, clipping, the decision to skip, the
optimizer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp.precision import LossScale, LossScaling
from jaxdp.train import skip
from jaxdp.train.frozen import merge
from jaxdp.train.master import master_copy
from jaxdp.train.metric_sums import divide
from jaxdp.train.model_state import mean_state
from jaxdp.train.norm import clip, plain_total
from jaxdp.train.options import UpdateRule
from jaxdp.train.rate import rate_of
from jaxdp.train.state import Sums, Total, TrainState

Tree = Any
Metrics = dict[str, jax.Array]


def make_apply(
    rule: UpdateRule, loss_scaling: LossScaling | None
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Build `Step.apply`: apply(state, sums, total) -> (state, metrics)."""
    tx = rule.tx._replace(
        update=jax.jit(rule.tx.update, inline=True)
    )  # traced once, for the update and its rate

    def apply(
        state: TrainState, sums: Sums, total: Total = plain_total
    ) -> tuple[TrainState, Metrics]:
        params = rule.trainable(state.params)
        weight = jnp.where(sums.weight > 0, sums.weight, jnp.ones_like(sums.weight))
        divisor = scaled(weight, state.loss_scale, loss_scaling)
        grads = mean_gradients(sums.grads, master_copy(params, state.opt_state), divisor)
        squares, nonfinite = total(grads)
        norm = jnp.sqrt(squares)
        if rule.clip_norm is not None:
            grads = clip(grads, norm, rule.clip_norm)
        model_state, disagreeing = mean_state(state.model_state, sums.model_state, sums.weight)
        real_weight = jnp.where(
            sums.weight > 0, sums.weight, jnp.nan
        )  # without any, there is no mean and no update
        loss = sums.loss / real_weight
        finite = (nonfinite == 0) & jnp.isfinite(loss)
        overflow: Any = (
            False  # True where non-finite gradients may come from a loss scale that is too large
        )
        if loss_scaling is not None and state.loss_scale is not None:
            overflow = jnp.isfinite(loss) & loss_scaling.can_fall(state.loss_scale)
        number = state.step + 1
        apply_update, guard = skip.decide(
            state.guard, number, loss, finite, overflow, rule.max_nonfinite, rule.spike
        )
        if disagreeing is not None:
            apply_update, guard = skip.halt_if_disagreeing(guard, number, apply_update, disagreeing)
        grads = skip.where(apply_update, grads, jax.tree.map(jnp.zeros_like, grads))
        updates, opt_state = skip.update(tx, apply_update, grads, state.opt_state, params)
        params = skip.where(apply_update, optax.apply_updates(params, updates), params)
        running = state.guard.halted == 0
        metrics = {
            "loss": loss,
            **divide(sums.metrics, real_weight),
            "grad_norm": norm,
            "nonfinite_grads": nonfinite,
        }
        metrics |= {"weight": sums.weight, "skipped": (~apply_update).astype(jnp.int32)}
        metrics |= {"skipped_updates": guard.skipped, "halted": guard.halted}
        if disagreeing is not None:
            metrics["disagreeing_state"] = disagreeing
        rate = rate_of(tx, grads, state.opt_state, params, opt_state)
        if rate is None and rule.schedule is not None:
            rate = rule.schedule(state.step - state.guard.skipped)
        if rate is not None:
            metrics["lr"] = jnp.asarray(rate, float)
        new = state.replace(
            step=state.step + running.astype(state.step.dtype),
            params=merge(params, state.params),
            opt_state=opt_state,
            model_state=skip.where(apply_update, model_state, state.model_state),
            guard=guard,
        )
        if loss_scaling is not None and state.loss_scale is not None:
            metrics["loss_scale"] = state.loss_scale.value
            adjusted = loss_scaling.adjust(state.loss_scale, nonfinite == 0)
            new = new.replace(loss_scale=skip.where(running, adjusted, state.loss_scale))
        return new, metrics

    return apply


def scaled(weight: jax.Array, scale: LossScale | None, scaling: LossScaling | None) -> jax.Array:
    """Multiply the weight by the factor by which the loss was scaled."""
    if scaling is None or scale is None:
        return weight
    return weight * scaling.factor(scale.value).astype(weight.dtype)


def mean_gradients(sums: Tree, params: Tree, divisor: jax.Array) -> Tree:
    """Divide in at least float32 (bfloat16 would round the weight itself), then cast to the dtypes
    of `params`.
    """

    def mean(g: jax.Array, p: jax.Array) -> jax.Array:
        wide = g.astype(jnp.promote_types(g.dtype, jnp.float32))
        return (wide / divisor.astype(wide.dtype)).astype(p.dtype)

    return jax.tree.map(mean, sums, params)
