"""Built-in models by name, and `as_model`, which converts modules and functions of several
libraries to a `Model`.
"""

import sys
from typing import Any

from jaxdp.errors import UsageError, import_optional

MODELS = {
    "MLP": "jaxdp.models.mlp.MLP",
    "CNN": "jaxdp.models.cnn.CNN",
    "GPT": "jaxdp.models.gpt.GPT",
    "HuggingFace": "jaxdp.folders.pretrained.HuggingFace",
    "LSTM": "jaxdp.models.recurrent.LSTM",
    "RNN": "jaxdp.models.recurrent.RNN",
    "ResNet9": "jaxdp.models.resnet9.ResNet9",
    "ViT": "jaxdp.models.vit.ViT",
}
USABLE = (
    "give a Flax NNX class or a function of rngs, a Flax Linen module, an Equinox class or a function of key, a pair "
    "of functions (init, apply), or a jaxdp.models.base.Model"
)


def as_model(target: Any) -> Any:
    """Convert a Flax Linen module, a pair of functions (init, apply), an Equinox class or factory
    with an argument `key`, or a Flax NNX class or factory with an argument `rngs` to a `Model`;
    return a `Model` unchanged.

    Raises UsageError for anything else.
    """
    from flax import linen

    from jaxdp.models.base import Model, bind_axes
    from jaxdp.models.functions import from_functions
    from jaxdp.models.linen import from_linen
    from jaxdp.models.nnx import from_nnx
    from jaxdp.targets import parameters

    name = getattr(target, "__name__", type(target).__name__)
    if isinstance(target, Model):
        return target
    if isinstance(target, type) and issubclass(target, linen.Module):
        target = target()
    if isinstance(target, linen.Module):
        return bind_axes(from_linen(target))
    if is_pair(target):
        return bind_axes(from_functions(*target))
    if is_module(target):
        raise UsageError(
            f"model: got an initialized {name}; pass the class (or a factory that takes rngs: nnx.Rngs, or key with "
            "Equinox), so that its weights follow `seed`"
        )
    if not callable(target):
        raise UsageError(f"model: {name} is not a model; {USABLE}")
    if "key" in parameters(target) and "rngs" not in parameters(target):
        import_optional("equinox", f"model: {name}, which takes a key,", "equinox")
        from jaxdp.models.equinox import from_equinox

        return from_equinox(target)
    return bind_axes(from_nnx(target))


def is_given(target: Any) -> bool:
    """Return True if a target is a model itself rather than a class or factory."""
    from flax import linen

    from jaxdp.models.base import Model

    return isinstance(target, Model | linen.Module) or is_pair(target) or is_module(target)


def is_pair(target: Any) -> bool:
    return isinstance(target, tuple) and len(target) == 2 and all(map(callable, target))


def is_module(target: Any) -> bool:
    """Return True for an initialized Flax NNX or Equinox module."""
    from flax import nnx

    if isinstance(target, nnx.Module):
        return True
    # If it was never imported, `target` is none of its modules.
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(target, equinox.Module)
