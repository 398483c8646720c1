"""What the loops written by hand share: the user's model, and an optimizer, a loss and batches of
their own.

Of jaxdp there is the model's class, which here is the user's, and nothing else.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import contender
from benchmarks.material import Material
from jaxdp.models import MODELS
from jaxdp.targets import locate

Batch = tuple[Any, Any]  # (inputs, labels)


def make_model(material: Material) -> nnx.Module:
    """The model of a case, with its weights."""
    case = material.case
    make, args = locate("model", case["model"]["target"], MODELS), case["model"]["args"]
    known = {"input_shape": tuple(case["input_shape"]), "num_classes": case["classes"]}
    model = make(**{**known, **args}, rngs=nnx.Rngs(0))
    model.train()
    state = nnx.state(model)
    flat = dict(nnx.to_flat_state(state))
    named = {"/".join(map(str, path)): path for path in flat}
    for name, array in material.weights.items():
        path = named[name.removeprefix("model_state/")]
        flat[path] = flat[path].replace(jnp.asarray(array))
    nnx.update(model, nnx.from_flat_state(list(flat.items())))
    return model


def make_optimizer(material: Material) -> optax.GradientTransformation:
    own = material.case["optimizer"]
    schedule = make_schedule(*material.case["schedule"])
    if own["target"] == "sgd":
        decay = optax.add_decayed_weights(own["weight_decay"], decayed)
        tx = optax.chain(decay, optax.sgd(schedule, **own["args"]))
    else:
        tx = optax.adamw(schedule, weight_decay=own["weight_decay"], mask=decayed, **own["args"])
    return (
        tx
        if own["clip_norm"] is None
        else optax.chain(optax.clip_by_global_norm(own["clip_norm"]), tx)
    )


def make_schedule(name: str, lr: float, steps: int, warmup: int, final: float) -> Callable:
    left = max(steps - warmup, 1)
    main = {
        "constant": lambda: optax.constant_schedule(lr),
        "cosine": lambda: optax.cosine_decay_schedule(lr, left, final),
        "linear": lambda: optax.linear_schedule(lr, lr * final, left),
        "one_cycle": lambda: optax.linear_onecycle_schedule(left, lr),
    }[name]()
    return (
        optax.join_schedules([optax.linear_schedule(0.0, lr, warmup), main], [warmup])
        if warmup
        else main
    )


def decayed(params: Any) -> Any:
    """True for what is neither a bias nor a norm's scale."""

    def kept(path, _):
        return not {"bias", "scale"} & {getattr(key, "key", None) for key in path}

    return jax.tree_util.tree_map_with_path(kept, params)


def make_loss(case: dict[str, Any]) -> Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]:
    """(outputs, labels) -> (mean loss, accuracy)."""
    smoothing = case["label_smoothing"]

    def of(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        if smoothing:
            soft = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
            losses = optax.softmax_cross_entropy(logits, soft)
        else:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses, jnp.argmax(logits, -1) == labels

    def loss(outputs: Any, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        labels = labels.astype(jnp.int32)
        mapped = outputs.map(of, labels) if hasattr(outputs, "map") else of(outputs, labels)
        return jnp.mean(mapped[0]), jnp.mean(mapped[1])

    return loss


def make_inputs(case: dict[str, Any]) -> Callable[[jax.Array], jax.Array]:
    """What a batch's inputs are to the model: pixels scaled in float32, or tokens."""
    compute = jnp.dtype(case["compute"])
    if case["pixels"] is None:
        return lambda tokens: tokens.astype(jnp.int32)
    mean, deviation, top = (np.asarray(x, np.float32) for x in case["pixels"])
    return lambda images: ((images.astype(jnp.float32) - top * mean) / (top * deviation)).astype(
        compute
    )


def as_computed(params: Any, case: dict[str, Any]) -> Any:
    """Parameters in the dtype that the model computes in."""
    return jax.tree.map(lambda x: x.astype(case["compute"]), params)


def serve(update: Callable[[int], tuple[Any, ...]]) -> None:
    """update(i) -> (loss, accuracy, state) of update i, which may still be computed when it
    returns.
    """
    at = 0

    def run(updates: int) -> Any:
        nonlocal at
        for _ in range(updates):
            last = update(at)
            at += 1
        return jax.block_until_ready(last)

    def memory() -> dict[str, float]:
        return {
            "peak_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
        }

    contender.serve(lambda updates: [float(run(1)[0]) for _ in range(updates)], run, memory)
    os._exit(0)
