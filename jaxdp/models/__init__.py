"""Built-in models, by name; `as_model` makes a `Model` of whatever a target gives."""

from typing import Any

MODELS = {
    "MLP": "jaxdp.models.mlp.MLP",
    "CNN": "jaxdp.models.cnn.CNN",
    "GPT": "jaxdp.models.gpt.GPT",
    "ResNet9": "jaxdp.models.resnet9.ResNet9",
}


def as_model(made: Any) -> Any:
    """A `Model` from a `Model`, a Flax Linen module, or a function of `nnx.Rngs` that makes a Flax NNX module."""
    from flax import linen, nnx

    from jaxdp.models.base import Model
    from jaxdp.models.linen import from_linen
    from jaxdp.models.nnx import from_nnx

    if isinstance(made, Model):
        return made
    if isinstance(made, linen.Module):
        return from_linen(made)
    if isinstance(made, nnx.Module):
        raise ValueError(f"{type(made).__name__} is made already; name its class, or a function that takes rngs")
    if callable(made):
        return from_nnx(made)
    raise ValueError(f"{type(made).__name__} is neither a Flax module nor a jaxdp.models.base.Model")
