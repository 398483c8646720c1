"""Recurrent language models: a layer's hidden state is carried from batch to batch, without its
gradient.

A text is read as streams, one per row of a batch; each batch continues where the last one ended:
truncated back-propagation through time (Werbos 1990). A stream starts with a carry of zeros.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdp.errors import check_one_of, check_sizes
from jaxdp.losses import wide
from jaxdp.models.gpt import look_up
from jaxdp.models.layers import make_dropout, require, require_text, require_tokens
from jaxdp.models.nnx import Carry

NONLINEARITIES = {"tanh": nnx.tanh, "relu": nnx.relu}


class Recurrent(nnx.Module):
    """A recurrent language model: tokens[example, token] integers -> logits [example, token,
    vocabulary]. A subclass has layer(width, hidden, rngs), which returns a layer that maps
    x[example, token, width] to [example, token, hidden].

    An embedding, recurrent layers, a linear head. input_shape: (length,) of any length, and
    num_classes, the vocabulary, come from the data. dim: width of the embedding; hidden: width of
    every layer. dropout: rate for the inputs and outputs of the layers, not for the state between
    tokens. tied: compute logits with the embedding matrix (Press and Wolf, arXiv 1608.05859);
    requires hidden = dim. Raises UsageError for inconsistent arguments."""

    layer: Callable[[int, int, nnx.Rngs], nnx.Module]

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        dim: int = 128,
        hidden: int = 128,
        layers: int = 2,
        dropout: float = 0.0,
        tied: bool = False,
        *,
        rngs: nnx.Rngs,
    ):
        check_sizes("model.args", num_classes=num_classes, dim=dim, hidden=hidden, layers=layers)
        require_text(input_shape)
        require(
            not tied or dim == hidden,
            "hidden",
            hidden,
            f"is not dim, {dim}, as tied requires; make them equal",
        )
        self.embed = nnx.Embed(num_classes, dim, rngs=rngs)
        self.layers = nnx.List(
            [self.layer(dim if i == 0 else hidden, hidden, rngs) for i in range(layers)]
        )
        self.dropout = make_dropout(dropout, rngs)
        self.head = None if tied else nnx.Linear(hidden, num_classes, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        require_tokens(type(self).__name__, tokens)
        x = look_up(self.embed.embedding[...], tokens, self.embed.num_embeddings)
        for layer in self.layers:
            x = layer(self.dropout(x))
        x = self.dropout(x)
        return self.embed.attend(x) if self.head is None else self.head(x)


class LSTMLayer(nnx.Module):
    """An LSTM layer with Flax's weights; before the scan, one product computes the gates' input
    part for all tokens.
    """

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs):
        self.weights = nnx.OptimizedLSTMCell(width, hidden, rngs=rngs)
        self.cell, self.hidden = Carry(jnp.zeros(hidden)), Carry(jnp.zeros(hidden))

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(last, gates):
            cell, hidden = last
            i, f, g, o = jnp.split(gates + self.weights.dense_h(hidden), 4, -1)
            forget, update = nnx.sigmoid(f), nnx.sigmoid(i) * nnx.tanh(g)
            cell = forget.astype(cell.dtype) * cell + update.astype(cell.dtype)
            hidden = nnx.sigmoid(o) * nnx.tanh(cell.astype(hidden.dtype))
            return (cell, hidden), hidden

        carries = ((self.cell, wide(x.dtype)), (self.hidden, x.dtype))
        return unroll(step, carries, self.weights.dense_i(x))


class RNNLayer(nnx.Module):
    """A simple recurrent layer with the weights of Flax's `SimpleCell`; see `LSTMLayer`."""

    def __init__(self, width: int, hidden: int, nonlinearity: Callable, rngs: nnx.Rngs):
        self.weights = nnx.SimpleCell(width, hidden, dtype=None, rngs=rngs)
        self.hidden, self.nonlinearity = Carry(jnp.zeros(hidden)), nonlinearity

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(last, inputs):
            hidden = self.nonlinearity(inputs + self.weights.dense_h(last[0]))
            return (hidden,), hidden

        return unroll(step, ((self.hidden, x.dtype),), self.weights.dense_i(x))


def unroll(step: Callable, carries: Sequence[tuple[Carry, Any]], x: jax.Array) -> jax.Array:
    """Scan step(state, x[example, ...]) -> (state, output) over the tokens of x; return the
    outputs.

    carries: [(carry, dtype)], of which the state consists. It starts as the last batch ended,
    without its gradient, or as initialized for one example, and is stored there at the end.
    """

    def begin(carry: Carry, dtype: Any) -> jax.Array:
        last = jax.lax.stop_gradient(carry[...]).astype(dtype)
        return jnp.broadcast_to(last, (x.shape[0], last.shape[-1]))

    start = tuple(begin(carry, dtype) for carry, dtype in carries)
    ends, outputs = jax.lax.scan(step, start, x.swapaxes(0, 1))
    for (carry, _), end in zip(carries, ends, strict=True):
        carry.set_value(end)
    return outputs.swapaxes(0, 1)


class LSTM(Recurrent):
    """An LSTM language model, regularized as in Zaremba et al. (arXiv 1409.2329): the model that
    the Needle course project (CMU 10-414, homework 4) trains on Penn Treebank.
    """

    layer = LSTMLayer


class RNN(Recurrent):
    """An RNN language model: h = tanh or relu of W x + U h + b (Elman 1990, "Finding structure in
    time").
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        dim: int = 128,
        hidden: int = 128,
        layers: int = 2,
        dropout: float = 0.0,
        tied: bool = False,
        nonlinearity: str = "tanh",
        *,
        rngs: nnx.Rngs,
    ):
        check_one_of("model.args.nonlinearity", nonlinearity, NONLINEARITIES)
        self.nonlinearity = nonlinearity
        super().__init__(input_shape, num_classes, dim, hidden, layers, dropout, tied, rngs=rngs)

    def layer(self, width: int, hidden: int, rngs: nnx.Rngs) -> nnx.Module:
        return RNNLayer(width, hidden, NONLINEARITIES[self.nonlinearity], rngs)
