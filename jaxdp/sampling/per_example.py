"""Losses as others write them: a function of outputs and labels."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.errors import UsageError
from jaxdp.losses import Batch, fit_mask
from jaxdp.targets import locate


class PerExample:
    """The mean of what a function (outputs, labels) returns for each example, over all of an update.

    function: such as those of `optax.losses`, or its dotted path; it returns [example, ...], of several
    numbers an example their mean. Masked examples do not count. Raises UsageError for a function that
    returns one number, such as a mean over a part of the batch: the mean of an update is over all
    devices.
    """

    def __init__(self, function: str | Callable[[Any, Any], Any]):
        key = "loss.args.function"
        self.function: Any = function
        if isinstance(function, str):
            self.function = locate(key, function, {}, key)
        if not callable(self.function):
            raise UsageError(f"{key}: {function!r} is no function of outputs and labels")

    def __call__(self, outputs: jax.Array, batch: Batch):
        losses = jnp.asarray(self.function(outputs, batch["labels"]))
        if losses.ndim == 0:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            raise UsageError(
                f"loss: {name} returns one number; return a loss of each example: the mean of a part of the batch "
                "would depend on how many devices share it"
            )
        mask = fit_mask(batch["mask"], losses)
        return jnp.sum(jnp.where(mask != 0, losses, 0) * mask), jnp.sum(mask), {}
