"""Built-in models, by name; `as_model` makes a `Model` of whatever a target gives."""

import sys
from typing import Any

from jaxdp.errors import UsageError

MODELS = {
    "MLP": "jaxdp.models.mlp.MLP",
    "CNN": "jaxdp.models.cnn.CNN",
    "GPT": "jaxdp.models.gpt.GPT",
    "LSTM": "jaxdp.models.recurrent.LSTM",
    "RNN": "jaxdp.models.recurrent.RNN",
    "ResNet9": "jaxdp.models.resnet9.ResNet9",
    "ViT": "jaxdp.models.vit.ViT",
}
USABLE = (
    "give a Flax NNX class or a function of rngs, a Flax Linen module, an Equinox class or a function of key, a pair "
    "of functions (init, apply), or a jaxdp.models.base.Model"
)


def as_model(made: Any) -> Any:
    """A `Model` from a `Model`, a Flax Linen module, a pair of functions (init, apply), an Equinox class or function of
    `key` that makes an Equinox module, or a function of `nnx.Rngs` that makes a Flax NNX module.

    Raises UsageError for anything else.
    """
    from flax import linen

    from jaxdp.models.base import Model, bind_axes
    from jaxdp.models.functions import from_functions
    from jaxdp.models.linen import from_linen
    from jaxdp.models.nnx import from_nnx
    from jaxdp.targets import parameters

    name = getattr(made, "__name__", type(made).__name__)
    if isinstance(made, Model):
        return made
    if isinstance(made, linen.Module):
        return bind_axes(from_linen(made))
    if is_pair(made):
        return bind_axes(from_functions(*made))
    if is_module(made):
        raise UsageError(
            f"model: {name} is made already, of numbers that no seed decides; name what makes it "
            "(a class or function that takes rngs: nnx.Rngs, or key with Equinox)"
        )
    if isinstance(made, type) and issubclass(made, linen.Module):
        return bind_axes(from_linen(made()))
    if not callable(made):
        raise UsageError(f"model: {name} is no model; {USABLE}")
    if "key" in parameters(made) and "rngs" not in parameters(made):
        return _from_equinox(made)
    return bind_axes(from_nnx(made))


def is_given(target: Any) -> bool:
    """Whether a target is a model itself, and not what makes one."""
    from flax import linen

    from jaxdp.models.base import Model

    return isinstance(target, Model | linen.Module) or is_pair(target) or is_module(target)


def is_pair(target: Any) -> bool:
    return isinstance(target, tuple) and len(target) == 2 and all(map(callable, target))


def is_module(target: Any) -> bool:
    """Whether it is a Flax NNX or Equinox module, made already."""
    from flax import nnx

    equinox = sys.modules.get("equinox")  # without it, nothing is a module of it
    return isinstance(target, (nnx.Module, equinox.Module) if equinox else nnx.Module)


def _from_equinox(make: Any) -> Any:
    try:
        from jaxdp.models.equinox import from_equinox
    except ModuleNotFoundError as error:
        name = getattr(make, "__name__", type(make).__name__)
        fix = "pip install 'jaxdp-trainer[equinox]'"
        raise UsageError(f"model: {name} takes a key, as Equinox has it; {fix}") from error
    return from_equinox(make)
