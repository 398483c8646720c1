"""Transforms of examples on the device: per example, each with its own key, or per microbatch.

Keys depend only on the microbatch and the row in it, so that results do not depend on the number of
devices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.data.example_order import RESET
from jaxdp.errors import UsageError
from jaxdp.losses import Batch, fit_mask, wide
from jaxdp.precision import is_float
from jaxdp.targets import attribute, parameters, require

Transform = Callable[[Batch, jax.Array, bool], Batch]  # (batch, key, train) -> batch
NOT_OF_EXAMPLES = ("mask", RESET)


class Mixup:
    """Mixup: blend every example's inputs and labels with those of the example before it (arXiv
    1710.09412).

    inputs <- a inputs + (1 - a) other inputs, with one a ~ Beta(alpha, alpha) per microbatch;
    labels become probabilities [example, classes], NaN for a label outside [0, classes). classes:
    the number of labels. Padding is not mixed.
    """

    batched = True

    def __init__(self, classes: int, alpha: float = 0.2):
        if not alpha > 0:
            raise UsageError(
                f"data.transform.args.alpha: {alpha} must be greater than 0, such as 0.2"
            )
        if classes < 1:
            raise UsageError(
                f"data.transform.args.classes: {classes} must be the number of labels, at least 1"
            )
        self.classes, self.alpha = classes, alpha

    def __call__(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        if not train:
            return batch
        inputs = batch["inputs"]
        if not is_float(inputs):
            raise UsageError(
                f"data.transform: {type(self).__name__} mixes floats, not {inputs.dtype}; scale the inputs before"
            )
        of_inputs, of_labels = self.shares(inputs, key)
        # Each real example is mixed with the real one before it, the first with the last.
        real = batch["mask"].reshape(len(inputs), -1).any(-1)
        before = (jnp.cumsum(real) - 2) % jnp.maximum(real.sum(), 1)
        other = jnp.where(real, jnp.argsort(~real)[before], jnp.arange(len(inputs)))

        def mix(x, share):
            return share.astype(x.dtype) * x + (1 - share).astype(x.dtype) * x[other]

        labels = batch["labels"]
        counts = fit_mask(batch["mask"] != 0, labels) != 0
        wrong = ((labels < 0) | (labels >= self.classes)) & counts
        shares = jnp.where(
            wrong[..., None], jnp.nan, jax.nn.one_hot(labels, self.classes, dtype=inputs.dtype)
        )
        return {**batch, "inputs": mix(inputs, of_inputs), "labels": mix(shares, of_labels)}

    def shares(self, inputs: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the share that an example keeps of its inputs, broadcast to [example, ...], and of its
        labels [].
        """
        share = jax.random.beta(key, self.alpha, self.alpha, dtype=wide(inputs.dtype))
        return share, share


class Scale:
    """Divide an entry of the examples, such as uint8 pixels, by a number, also in evaluation; the
    result is floats.
    """

    batched = True

    def __init__(self, divisor: float = 255.0, name: str = "inputs"):
        if not divisor > 0:
            raise UsageError(
                f"data.transform.args.divisor: {divisor} must be greater than 0, such as 255"
            )
        self.divisor, self.name = divisor, name

    def __call__(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        if (x := batch.get(self.name)) is None:
            raise UsageError(
                f"data.transform.args.name: no {self.name!r}; the data has {sorted(batch)}; name another"
            )
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)
        return {**batch, self.name: x.astype(dtype) * (1 / self.divisor)}


def as_transform(f: Callable[..., Any]) -> Transform:
    """Map a function of one example over a microbatch; return `f` unchanged if its attribute
    `batched` is true.

    f(example, key) -> example runs on training examples only, f with an argument `train` on all; example: {name: array}
    without "mask". Raises UsageError for another signature.
    """
    batched, names = attribute(f, "batched", False), [*parameters(f)]
    require("data.transform", f, *names[: 3 if batched else 2], "train")
    if batched:
        return f
    required = [p for p in parameters(f).values() if p.default is p.empty]
    if len(required) < 2:
        name = getattr(getattr(f, "func", f), "__name__", type(f).__name__)
        raise UsageError(
            f"data.transform.target: {name} takes {len(required)} arguments; it must be (example, key) -> example, or "
            "(example, key, train) -> example"
        )
    named = "train" in names

    def transform(batch, key, train):
        if not train and not named:
            return batch
        untouched = {name: batch[name] for name in NOT_OF_EXAMPLES if name in batch}
        examples = {name: x for name, x in batch.items() if name not in untouched}
        count = next(iter(examples.values())).shape[0]
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))
        one = functools.partial(f, train=train) if named else f
        result = jax.vmap(one)(examples, keys)
        if not isinstance(result, dict):
            raise UsageError(
                f"data.transform: it returned {type(result).__name__}; return a dict of arrays"
            )
        if "mask" in result:
            raise UsageError(
                "data.transform: it returned 'mask', which only the data can set; add it to the examples"
            )
        return {**result, **untouched}

    return transform


def both(first: Transform | None, second: Transform | None) -> Transform | None:
    """Return the composition of two transforms, each with its own key."""
    if first is None or second is None:
        return first or second

    def transform(batch, key, train):
        # Rows and the parts of a split key have smaller numbers.
        second_key = jax.random.fold_in(key, 1 << 31)
        return second(first(batch, key, train), second_key, train)

    return transform


TRANSFORMS: dict[str, Any] = {
    "CutMix": "jaxdp.recipes.cutmix.CutMix",
    "Mixup": Mixup,
    "Scale": Scale,
}
