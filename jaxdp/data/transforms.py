"""What is done to examples on the device: per example, with a key of its own, or to a microbatch at once.

A key follows from the microbatch and the place in it, so that the numbers do not depend on the devices.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.data.cursor import RESET
from jaxdp.errors import UsageError

Batch = dict[str, jax.Array]
Transform = Callable[[Batch, jax.Array, bool], Batch]  # (batch, key, train) -> batch
NOT_OF_EXAMPLES = ("mask", RESET)


class Mixup:
    """Every example is mixed with the one before it, images and labels alike (Zhang et al., arXiv 1710.09412).

    inputs <- a inputs + (1 - a) inputs of the other, a from Beta(alpha, alpha), one for a microbatch; labels become
    probabilities [example, classes]. classes: the number of labels. Padding is mixed with nothing.
    """

    batched = True

    def __init__(self, classes: int, alpha: float = 0.2):
        if not alpha > 0:
            raise UsageError(f"data.transform.args.alpha: {alpha} must be greater than 0, such as 0.2")
        if classes < 1:
            raise UsageError(f"data.transform.args.classes: {classes} must be the number of labels, at least 1")
        self.classes, self.alpha = classes, alpha

    def __call__(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        if not train:
            return batch
        inputs = batch["inputs"]
        if not jnp.issubdtype(inputs.dtype, jnp.floating):
            raise UsageError(f"data.transform: Mixup mixes floats, not {inputs.dtype}; scale the inputs before")
        share = jax.random.beta(key, self.alpha, self.alpha, dtype=jnp.promote_types(inputs.dtype, jnp.float32))
        # Real examples stand before padding; the first is mixed with the last of them.
        real = jnp.sum(batch["mask"].reshape(len(inputs), -1).any(-1))
        places = jnp.arange(len(inputs))
        other = jnp.where(places < real, (places - 1) % jnp.maximum(real, 1), places)
        mix = lambda x: share.astype(x.dtype) * x + (1 - share).astype(x.dtype) * x[other]
        labels = jax.nn.one_hot(batch["labels"], self.classes, dtype=inputs.dtype)
        return {**batch, "inputs": mix(inputs), "labels": mix(labels)}


def as_transform(f: Callable[..., Any]) -> Transform:
    """A function of one example as one of a microbatch; what has a true attribute `batched` is one already.

    f(example, key) -> example is run on training examples alone, f(example, key, train) on all; example: {name: array}
    without "mask". Raises UsageError for another signature.
    """
    if getattr(f, "batched", False):
        return f
    left = [p for p in inspect.signature(f).parameters.values() if p.default is p.empty]
    if len(left) not in (2, 3):
        name = getattr(getattr(f, "func", f), "__name__", type(f).__name__)
        raise UsageError(
            f"data.transform.target: {name} takes {len(left)} arguments; it must be (example, key) -> example, or "
            "(example, key, train) -> example"
        )
    always = len(left) == 3

    def transform(batch: Batch, key: jax.Array, train: bool) -> Batch:
        if not train and not always:
            return batch
        apart = {name: batch[name] for name in NOT_OF_EXAMPLES if name in batch}
        examples = {name: x for name, x in batch.items() if name not in apart}
        count = len(next(iter(examples.values())))
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))
        run = (lambda example, key: f(example, key, train)) if always else f
        made = jax.vmap(run)(examples, keys)
        if not isinstance(made, dict):
            raise UsageError(f"data.transform: it returned {type(made).__name__}; return the example, a dict of arrays")
        return {**made, **apart}

    return transform


def both(first: Transform | None, second: Transform | None) -> Transform | None:
    """One after the other, each with a key of its own."""
    if first is None or second is None:
        return first or second

    def transform(batch: Batch, key: jax.Array, train: bool) -> Batch:
        return second(first(batch, key, train), jax.random.fold_in(key, 1), train)

    return transform


TRANSFORMS: dict[str, Any] = {"Mixup": Mixup}
