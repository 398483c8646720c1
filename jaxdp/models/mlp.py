"""A multi-layer perceptron over flattened inputs."""

import itertools
import math
from collections.abc import Sequence

import jax
from flax import nnx

from jaxdp.cpu import product
from jaxdp.errors import check_sizes
from jaxdp.models.layers import make_dropout


class MLP(nnx.Module):
    """An MLP: linear, ReLU and dropout per hidden layer, then a linear classifier.

    x[example, ...] -> logits [example, class]. input_shape and num_classes default to those of the
    data."""

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        hidden: Sequence[int] = (128,),
        dropout: float = 0.0,
        *,
        rngs: nnx.Rngs,
    ):
        check_sizes("model.args", hidden=min(hidden, default=1))
        widths = [math.prod(input_shape), *hidden]
        self.layers = nnx.List(
            [
                nnx.Linear(a, b, dot_general=product, rngs=rngs)
                for a, b in itertools.pairwise(widths)
            ]
        )
        self.head = nnx.Linear(widths[-1], num_classes, dot_general=product, rngs=rngs)
        self.dropout = make_dropout(dropout, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        for layer in self.layers:
            x = self.dropout(nnx.relu(layer(x)))
        return self.head(x)
