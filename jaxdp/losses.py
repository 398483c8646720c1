"""Built-in losses. A loss returns sums and a weight, never a mean; one division over all devices
follows.

    (outputs, batch) -> (loss_sum [], weight [], {metric: sum [] or (sum [], its own weight [])})

`batch["mask"]` is 1.0 for a real example (or token) and 0.0 for padding. 0 times NaN is NaN, so a
loss selects before it multiplies: jnp.where(mask != 0, losses, 0) * mask. A metric that is a sum is
divided by the loss's weight, a pair by its own: the accuracy of a class is (its hits, its
examples). A loss may have attributes:

- `scope`: "example" (the default), or "global" if an example's loss depends on the other examples.
  A global loss gets the full batch of an update, gathered from all devices, and must use the mask
  to exclude padding.
- `reads_logits`: True if the loss accepts lazy `Logits`; otherwise it gets computed logits.
- `derive(means) -> {name: float}`: returns additional numbers to report, from the means over a
  batch or a data set. The mean of a metric whose own weight is 0 is NaN. A metric with sums: in
  its name may be an array, which `derive` gets as it is.
- `check(outputs, batch)`: raises UsageError if examples of the data (NumPy arrays) do not fit
  outputs of these shapes; called on a few examples before a run.

Lazy logits are the largest array of a language model, computed by its loss one chunk at a time.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxdp.cpu import on_cpu
from jaxdp.errors import UsageError
from jaxdp.targets import attribute, bind, call, locate

AT_ONCE = 2**24  # logits in memory at a time on CPU: 64 MB in float32
# 1 GB: larger chunks, since each reads the full kernel and adds to its full gradient
ON_ACCELERATORS = 2**28
TILE = 128  # the number of rows of a chunk is a multiple of this on accelerators


class Logits(struct.PyTreeNode):
    """The lazy product x[..., dim] kernel[row, dim]': the last step of a model, left to its loss to
    compute.

    classes: the size of the vocabulary; kernel rows beyond it are padding that makes the product
    faster."""

    x: jax.Array
    kernel: jax.Array
    classes: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], self.classes)

    def compute(self) -> jax.Array:
        """Compute all logits [..., classes], in at least float32."""
        return wide_einsum("...d,vd->...v", self.x, self.kernel)[..., : self.classes]

    def map(self, f: Callable[..., Any], *more: jax.Array) -> Any:
        """Apply f(logits[row, classes], *more[row]) -> tree of [row] to all rows, in chunks; return
        a tree of [...].

        The backward pass recomputes the logits chunk by chunk.
        """
        rows, lead = self.x.reshape(-1, self.x.shape[-1]), self.x.shape[:-1]
        more = tuple(x.reshape(-1) for x in more)

        def restore_shape(tree):
            return jax.tree.map(lambda x: x.reshape(lead), tree)

        size = rows_at_once(len(self.kernel), on_cpu())
        if len(rows) <= size:
            return restore_shape(f(self.compute().reshape(-1, self.classes), *more))
        # Accumulate its gradient over the chunks in float32.
        kernel = self.kernel.astype(wide(self.kernel.dtype))

        @jax.checkpoint
        def apply_to_chunk(args):
            x, *rest = args
            return f(Logits(x, kernel.astype(self.kernel.dtype), self.classes).compute(), *rest)

        pad = -len(rows) % size

        def chunked(x):
            return jnp.pad(x, ((0, pad), *[(0, 0)] * (x.ndim - 1))).reshape(-1, size, *x.shape[1:])

        results = jax.lax.map(apply_to_chunk, (chunked(rows), *map(chunked, more)))
        return restore_shape(jax.tree.map(lambda x: x.reshape(-1)[: len(rows)], results))


def rows_at_once(classes: int, cpu: bool) -> int:
    """Return the number of rows of logits in one chunk."""
    if cpu:
        return max(1, AT_ONCE // classes)
    rows = max(1, ON_ACCELERATORS // classes)
    return rows - rows % TILE or rows


def is_lazy(outputs: Any) -> bool:
    """Return whether outputs are lazy `Logits`."""
    return isinstance(outputs, Logits)


def compute_logits(outputs: Any) -> Any:
    """Return a model's outputs with every lazy `Logits` computed."""
    return jax.tree.map(lambda x: x.compute() if is_lazy(x) else x, outputs, is_leaf=is_lazy)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def wide_einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return `jnp.einsum` in at least float32. Gradients are products in the dtype of x and y,
    which are faster.
    """
    return jnp.einsum(equation, x, y, preferred_element_type=wide(x.dtype))


@wide_einsum.defjvp
def _(equation, primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    outputs = wide_einsum(equation, x, y)
    tangent = jnp.einsum(equation, dx, y) + jnp.einsum(equation, x, dy)
    return outputs, tangent.astype(outputs.dtype)


def wide(dtype: Any) -> Any:
    """Return float32, or `dtype` if that is wider."""
    return jnp.promote_types(dtype, jnp.float32)


SUMS = "sums:"  # is in the name of a metric that is an array of sums, which `derive` gets
Batch = dict[str, jax.Array]
LossFn = Callable[[Any, Batch], tuple[jax.Array, jax.Array, dict[str, Any]]]


class SoftmaxCrossEntropy:
    """Cross-entropy in nats, with accuracy; label smoothing adds the metric `cross_entropy`, the
    unsmoothed loss.

    outputs: logits [..., classes], or `Logits`; batch["labels"]: integers [...], or probabilities
    [..., classes], as `Mixup` returns (accuracy compares with the largest); batch["mask"]: [...] or
    its leading dims. A label outside [0, classes) makes the loss NaN, except where the mask is 0
    (-100 is a common label for ignored examples). label_smoothing: the share of probability spread
    evenly over all classes (Szegedy et al., arXiv 1512.00567). top_k: each k adds the metric
    top{k}_accuracy, the fraction of labels among the k largest logits."""

    reads_logits = True

    def __init__(self, label_smoothing: float = 0.0, top_k: Sequence[int] = ()):
        if not 0 <= label_smoothing < 1:
            raise UsageError(
                f"loss.args.label_smoothing: {label_smoothing} is not in [0, 1); make it smaller"
            )
        if isinstance(top_k, int) or not all(isinstance(k, int) and k >= 1 for k in top_k):
            raise UsageError(
                f"loss.args.top_k: {top_k!r} is not a list of positive integers, such as [1, 5]"
            )
        self.label_smoothing, self.top_k = label_smoothing, tuple(top_k)

    def __call__(self, outputs: jax.Array | Logits, batch: Batch):
        labels, shape = jnp.asarray(labels_of(batch)), one_array(outputs).shape
        one_each = labels.shape == shape and labels.ndim > 1
        soft = one_each and jnp.issubdtype(labels.dtype, jnp.floating)
        if not soft and shape[:-1] != labels.shape:
            hint = ""
            if one_each:
                hint = ", or one-hot labels must be floats"
            elif labels.shape == shape:
                hint = ", or use MeanSquaredError"
            elif labels.shape == (*shape[:-1], 1):
                hint = ", or the labels drop their last dim"
            raise UsageError(
                f"loss: outputs {shape} do not fit labels {labels.shape}; the model must return logits "
                f"[{', '.join(map(str, labels.shape))}, classes]{hint}"
            )
        if not soft and not jnp.issubdtype(labels.dtype, jnp.integer):
            raise UsageError(
                f"loss: labels are {labels.dtype}, not integers; cast them, or use MeanSquaredError"
            )
        counts = fit_mask(batch["mask"] != 0, labels[..., 0] if soft else labels) != 0
        if soft:
            labels = _where(counts, labels)
        else:
            labels = jnp.where(counts, labels.astype(jnp.int32), 0)
            # a negative index would count from the end
            labels = jnp.where(labels < 0, shape[-1], labels)
        if not isinstance(outputs, Logits):
            terms = self._terms(_select_logits(counts, outputs), labels)
        else:
            outputs = outputs.replace(x=_where(counts, outputs.x))
            terms = (
                self._terms(outputs.compute(), labels) if soft else outputs.map(self._terms, labels)
            )
        mask = fit_mask(batch["mask"], terms["loss"])
        sums = {name: jnp.sum(value * mask) for name, value in terms.items()}
        return sums.pop("loss"), jnp.sum(mask), sums

    def check(self, outputs: Any, batch: Mapping[str, Any]) -> None:
        labels, classes = np.asarray(batch.get("labels", 0.0)), outputs.shape[-1]
        if not np.issubdtype(labels.dtype, np.integer):  # no labels (0.0), or probabilities
            return
        counts = np.asarray(batch.get("mask", np.ones(len(labels)))) != 0
        counts = counts.reshape(counts.shape + (1,) * (labels.ndim - counts.ndim))
        if len(wrong := labels[((labels < 0) | (labels >= classes)) & counts]):
            raise UsageError(
                f"loss: a label is {wrong[0]}, but the model's outputs are for {classes} classes, 0 to {classes - 1}; "
                "number the labels from 0, or give the model more classes; to ignore an example, set its mask to 0"
            )

    def _terms(self, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """Return {"loss", "accuracy", ...}, each [...], from logits [..., classes]."""
        log_sum = jax.nn.logsumexp(logits, axis=-1)
        if labels.shape == logits.shape:
            losses = log_sum - jnp.sum(labels.astype(logits.dtype) * logits, axis=-1)
            labels = jnp.argmax(labels, axis=-1)
        else:
            losses = log_sum - _label_logits(logits, labels)
        right = (jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels) & ~jnp.isnan(log_sum)
        terms = {"loss": losses, "accuracy": right.astype(losses.dtype)}
        if self.label_smoothing:
            uniform = log_sum - jnp.mean(logits, axis=-1)
            terms["loss"] = losses + self.label_smoothing * (uniform - losses)
            terms["cross_entropy"] = losses
        if self.top_k:
            # Of equal logits the first class is ahead, as in argmax. The logit of an invalid label
            # is NaN: no hit.
            target = _label_logits(logits, labels)[..., None]
            first = jnp.arange(logits.shape[-1]) < labels[..., None]
            ahead = jnp.sum(~(logits <= target) | ((logits == target) & first), axis=-1)
            terms |= {f"top{k}_accuracy": (ahead < k).astype(losses.dtype) for k in self.top_k}
        return terms


class CausalLM(SoftmaxCrossEntropy):
    """Next-token cross-entropy in nats per token, with perplexity; labels [example, token]."""

    def derive(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return {"perplexity"}: the exponential of the unsmoothed cross-entropy; infinite where a
        float overflows.
        """
        nats = means.get("cross_entropy", means["loss"])
        return {"perplexity": math.inf if nats >= 709 else math.exp(nats)}


class MeanSquaredError:
    """Squared error, averaged over the dims that the mask lacks: per example, or per token.

    outputs and batch["labels"]: [example, ...]; batch["mask"]: its leading dims.
    """

    def __call__(self, outputs: jax.Array, batch: Batch):
        labels = labels_of(batch).astype(one_array(outputs).dtype)
        if outputs.shape != labels.shape:
            raise UsageError(f"loss: outputs {outputs.shape} do not fit labels {labels.shape}")
        errors, dims = outputs - labels, min(batch["mask"].ndim, outputs.ndim)
        errors = errors.reshape(*errors.shape[:dims], -1)
        mask = fit_mask(batch["mask"], errors[..., 0])
        losses = jnp.mean(jnp.square(_where(mask != 0, errors)), axis=-1)
        return jnp.sum(losses * mask), jnp.sum(mask), {}


class Contrastive:
    """CLIP's contrastive loss: match each example's two embeddings within the full batch (arXiv
    2103.00020).

    outputs: a pair of arrays [example, dim], normalized to unit length; batch["mask"]: [example].
    The loss is the mean of both directions' cross-entropies, in nats, over cosines / temperature;
    accuracy is the fraction of embeddings whose nearest one is their match. The negatives are all
    other examples of the update, on all devices."""

    scope = "global"

    def __init__(self, temperature: float = 0.07):
        if not temperature > 0:
            raise UsageError(
                f"loss.args.temperature: {temperature} must be greater than 0, such as 0.07"
            )
        self.temperature = temperature

    def __call__(self, outputs: tuple[jax.Array, jax.Array], batch: Batch):
        if (
            not isinstance(outputs, tuple | list)
            or len(outputs) != 2
            or outputs[0].shape != outputs[1].shape
        ):
            shapes = jax.tree.map(jnp.shape, outputs)
            raise UsageError(
                f"loss: outputs {shapes} are no pair of embeddings [example, dim]; return two such arrays"
            )
        mask, counts = batch["mask"], batch["mask"] != 0
        first, second = (_direction(_where(counts, x)) for x in outputs)
        cosines = first @ second.T / self.temperature
        losses, hits = jnp.zeros_like(mask), jnp.zeros_like(mask)
        for scores in (cosines, cosines.T):
            scores = jnp.where(counts, scores, -jnp.inf)
            matching = jnp.where(counts, jnp.diagonal(cosines), 0)
            log_sum = jax.nn.logsumexp(scores, axis=-1)  # -inf without any real example
            losses += 0.5 * jnp.where(counts, log_sum - matching, 0)
            right = jnp.argmax(scores, axis=-1) == jnp.arange(len(mask))
            hits += 0.5 * (right & ~jnp.isnan(log_sum))
        return jnp.sum(losses * mask), jnp.sum(mask), {"accuracy": jnp.sum(hits * mask)}


class MultiTask:
    """Weighted sum of several losses of one model.

    tasks: {name: {target, args, weight, outputs, labels}}. A task's loss gets outputs[outputs] of
    the model's output dict, and batch[labels] as labels; both keys default to the task's name, and
    weight defaults to 1. Each task's loss is averaged over its own elements in each microbatch (one
    or several per example; without any, it is 0). This is the average over the batch only if all
    microbatches have the same share of them. Metrics are NAME_loss, NAME_accuracy and so on, each a
    mean over the task's own elements, and what the task's loss derives, such as NAME_perplexity."""

    def __init__(self, tasks: Mapping[str, Mapping[str, Any]]):
        if not tasks:
            raise UsageError("loss.args.tasks: it is empty; give {name: {target: ...}}")
        self.tasks = {}
        for name, task in tasks.items():
            key = f"loss.args.tasks.{name}"
            if not isinstance(task, Mapping) or "target" not in task:
                raise UsageError(
                    f"{key}: {task!r} has no target; give a loss, such as {{target: SoftmaxCrossEntropy}}"
                )
            if unknown := task.keys() - {"target", "args", "weight", "outputs", "labels"}:
                raise UsageError(
                    f"{key}.{min(unknown)}: not known; use target, args, weight, outputs, labels"
                )
            loss = make_loss(task["target"], task.get("args", {}), key)
            if attribute(loss, "scope", "example") == "global":
                raise UsageError(
                    f"{key}.target: {task['target']} couples examples; it cannot be one of several tasks"
                )
            weight = task.get("weight", 1.0)
            if not isinstance(weight, int | float):
                raise UsageError(f"{key}.weight: {weight!r} is not a number")
            self.tasks[name] = (
                loss,
                float(weight),
                task.get("outputs", name),
                task.get("labels", name),
            )

    def __call__(self, outputs: Mapping[str, Any], batch: Batch):
        weight = jnp.sum(batch["mask"])
        total, metrics = jnp.zeros_like(weight), dict[str, Any]()
        for name, (loss, factor, output, labels) in self.tasks.items():
            if not isinstance(outputs, Mapping) or output not in outputs:
                has = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
                raise UsageError(
                    f"loss.args.tasks.{name}: no outputs {output!r}; the model returns {has}"
                )
            if labels not in batch:
                raise UsageError(
                    f"loss.args.tasks.{name}: no labels {labels!r}; the data has {sorted(batch)}"
                )
            entries = {**batch, "labels": batch[labels]}
            loss_sum, elements, more = apply_loss(loss, outputs[output], entries)
            share = weight / jnp.where(elements > 0, elements, 1)
            total += jnp.where(elements != 0, factor * share * loss_sum, 0)
            for key, value in {"loss": loss_sum, **more}.items():
                is_mean = not isinstance(value, tuple | list) and SUMS not in key
                metrics[f"{name}_{key}"] = (value, elements) if is_mean else value
        return total, weight, metrics

    def derive(self, means: Mapping[str, Any]) -> dict[str, float]:
        """Return what each task's loss derives from its own means."""
        derived = dict[str, float]()
        for name, (loss, *_) in self.tasks.items():
            prefix = f"{name}_"
            own = {
                key.removeprefix(prefix): value
                for key, value in means.items()
                if key.startswith(prefix)
            }
            for key, value in derive_of(loss)(own).items():
                derived[prefix + key] = value
        return derived

    def check(self, outputs: Mapping[str, Any], batch: Mapping[str, Any]) -> None:
        for name, (loss, _, output, labels) in self.tasks.items():
            try:
                if labels in batch:
                    check(loss, outputs[output], {**batch, "labels": batch[labels]})
            except UsageError as error:
                raise UsageError(str(error).replace("loss", f"loss.args.tasks.{name}", 1)) from None


def derive_of(loss: LossFn) -> Callable[[Mapping[str, Any]], Mapping[str, float]]:
    """Return the loss's own `derive`, or a function that returns nothing."""
    return attribute(loss, "derive", lambda means: {})


def check(loss: LossFn, outputs: Any, batch: Mapping[str, Any]) -> None:
    """Call the loss's own `check`, which raises UsageError if the examples do not fit outputs of
    these shapes.
    """
    attribute(loss, "check", lambda outputs, batch: None)(outputs, batch)


def apply_loss(loss: LossFn, outputs: Any, batch: Batch) -> Any:
    """Return loss(outputs, batch); compute lazy `Logits` first unless the loss reads them."""
    return loss(
        outputs if attribute(loss, "reads_logits", False) else compute_logits(outputs), batch
    )


def fit_mask(mask: jax.Array, losses: jax.Array) -> jax.Array:
    """Broadcast mask [example] or [example, token] to the shape and dtype of `losses`. Raises
    UsageError.
    """
    if mask.shape != losses.shape[: mask.ndim]:
        raise UsageError(
            f"loss: the data's mask {mask.shape} does not fit the losses {losses.shape}, dim by dim"
        )
    mask = mask.reshape(mask.shape + (1,) * (losses.ndim - mask.ndim))
    return jnp.broadcast_to(mask, losses.shape).astype(losses.dtype)


def _where(counts: jax.Array, x: jax.Array) -> jax.Array:
    """Return x[..., dim] with zeros where `counts` [...] is False: neither the loss nor its
    gradient then depends on what is there."""
    return jnp.where(counts[..., None], x, 0)


_select_logits = jax.custom_vjp(_where)
# The mask has made the gradient of an excluded row 0 already: its logits are 0, so 0 is multiplied
# by finite numbers. Another select there would change how XLA fuses the backward pass, and so how
# it rounds, in runs without any padding.
_select_logits.defvjp(
    lambda counts, logits: (_select_logits(counts, logits), None),
    lambda _, gradient: (None, gradient),
)


def labels_of(batch: Batch) -> jax.Array:
    if "labels" not in batch:
        raise UsageError(
            f"loss: it needs 'labels', and the data has {sorted(batch)}; rename one, or use another loss"
        )
    return batch["labels"]


def one_array(outputs: Any) -> Any:
    """Return the model's outputs. Raises UsageError unless they are one array."""
    if not hasattr(outputs, "shape"):
        shapes: Any = type(outputs).__name__
        if isinstance(outputs, Mapping):
            shapes = {k: jnp.shape(v) for k, v in outputs.items()}
        raise UsageError(
            f"loss: the model returns {shapes}, not one array; return that alone, or use MultiTask"
        )
    return outputs


def _label_logits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]


def _direction(x: jax.Array) -> jax.Array:
    """Return x / |x| along the last dim; zeros stay zeros."""
    squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(squares, jnp.finfo(x.dtype).tiny))


LOSSES: dict[str, Any] = {
    "SoftmaxCrossEntropy": SoftmaxCrossEntropy,
    "CausalLM": CausalLM,
    "MeanSquaredError": MeanSquaredError,
    "Contrastive": Contrastive,
    "MultiTask": MultiTask,
    "Measured": "jaxdp.measures.measured.Measured",
    "PerExample": "jaxdp.sampling.example_losses.PerExample",
    "WeightedCrossEntropy": "jaxdp.sampling.example_losses.WeightedCrossEntropy",
}


def make_loss(
    target: str, args: Mapping[str, Any], key: str = "loss", table: Mapping[str, Any] = LOSSES
) -> LossFn:
    """Return the loss named by `target`: an instance of a class, or a function with `args` bound. A
    function (outputs, labels), such as those of Optax, becomes a `PerExample`. Raises UsageError.
    """
    factory = locate(key, target, table)
    loss = bind(key, factory, args)
    if isinstance(factory, type):
        return call(key, loss)
    if [*inspect.signature(loss).parameters][1:2] in (["labels"], ["targets"]):
        return locate(key, "PerExample", LOSSES)(loss if args else factory)
    return loss
