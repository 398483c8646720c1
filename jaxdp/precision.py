"""A precision policy names the dtype of parameters, of the computation and of reductions, and casts between them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def cast_floats(tree: Any, dtype: Any) -> Any:
    """The tree with its floating leaves as `dtype`; integers, booleans and keys as they are."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


class Policy(NamedTuple):
    """params: parameters and optimizer state; compute: forward and backward pass; reduce: gradients on the wire."""

    params: Any = jnp.float32
    compute: Any = jnp.float32
    reduce: Any = jnp.float32

    @property
    def state(self) -> Any:
        """Of running averages, losses and sums: never below float32."""
        return max(jnp.dtype(self.params), jnp.dtype(jnp.float32), key=lambda d: d.itemsize)

    def inputs(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return cast_floats(batch, self.compute)

    def outputs(self, outputs: Any) -> Any:
        return cast_floats(outputs, self.state)


def policy(params: str, compute: str, reduce: str) -> Policy:
    """The policy of three dtype names."""
    return Policy(jnp.dtype(params), jnp.dtype(compute), jnp.dtype(reduce))
