"""One microbatch, computed by every device alike: a fingerprint of each gradient, and of each leaf
of the state.

A fingerprint is 32 bits, made on the device. Each word of a leaf is mixed with its position by a
bijection (the finalizer of MurmurHash3), and the results are summed, so every flipped bit changes
it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.tree_util import tree_leaves_with_path

from jaxdp.audit.product_sums import visit_products
from jaxdp.exact.products import WINDOW
from jaxdp.parallel.padding import converter
from jaxdp.parallel.placement import of_device
from jaxdp.parallel.reduction import order_of
from jaxdp.parallel.strategy import Strategy
from jaxdp.precision import is_key
from jaxdp.split import fit, path_string
from jaxdp.train.state import Batch, TrainState
from jaxdp.train.step import Replica, Step


class Probe:
    """The program of a strategy's devices. ndim: {entry of a batch: its number of dims in one
    microbatch}.
    """

    def __init__(self, strategy: Strategy, step: Step, ndim: dict[str, int]):
        self.strategy, self.step, self.ndim = strategy, step, ndim
        self.names: list[str] = []  # of the fingerprints: first those of the state
        self.axes = strategy.mesh.axis_names
        stored = strategy.abstract(padded=True).replace(kept={})
        self.specs = jax.tree.map(lambda x: x.sharding.spec, stored).replace(kept=P())
        self._compute = jax.jit(self._fingerprints, static_argnums=(0, 1, 2))

    def inputs(self, state: TrainState) -> tuple[TrainState, Any]:
        """Return the exported state, and its parameters in full."""
        exported = self.strategy.export(state, padded=True)

        def full(x: jax.Array, like: Any) -> jax.Array:
            if x.is_fully_replicated:
                return x
            return converter(fit, self.strategy.replicated, like.shape)(x)

        return exported, jax.tree.map(full, exported.params, self.strategy.shapes.params)

    def fingerprints(
        self, state: TrainState, full: Any, batch: Batch, alone: bool = False
    ) -> jax.Array:
        """Return uint32[device, leaf], each row on its device: of the device's own state, and of
        its gradients.

        All devices compute one microbatch, another one after each update. alone: each computes the
        first of its own instead, and no device waits for another.
        """
        key = next(key for key in self.ndim if key in batch)
        # Before those of an example: device, update, local microbatch.
        dims = np.ndim(batch[key]) - self.ndim[key]

        def spec(x):
            return getattr(getattr(x, "sharding", None), "spec", P())

        specs = tuple((name, spec(x)) for name, x in sorted(batch.items()))
        return self._compute(dims, specs, alone, state, full, batch)

    def _fingerprints(
        self, dims: int, specs: tuple, alone: bool, state: TrainState, full: Any, batch: Batch
    ) -> jax.Array:
        seed = jnp.asarray(self.strategy.seed)
        order, local = order_of(self.strategy.assignment), self.strategy.assignment.shape[1]

        def compute(state: TrainState, full: Any, batch: Batch) -> jax.Array:
            number = jnp.int32(0)
            if not alone:
                number = (fingerprint(state.step) % len(order)).astype(jnp.int32)
            device, position = jnp.divmod(jnp.asarray(order, jnp.int32)[number], local)

            def select(x: jax.Array) -> jax.Array:
                x = jax.lax.dynamic_slice_in_dim(x.reshape(-1, *x.shape[dims:]), position, 1)
                return x if alone else of_device(x, self.axes, device)

            kept = jax.tree.map(lambda x: x[number][None], state.kept)
            own = state.replace(params=full, kept=kept, opt_state=None, seed=seed)

            def grads(state: TrainState, batch: Batch, number: jax.Array) -> Any:
                return self.step.grads(state, batch, Replica(number))

            visit = visit_products(grads, lambda _, x: (x, fingerprint(x)))
            sums, products = visit(own, jax.tree.map(select, batch), number[None])
            results = {
                "grads": sums.grads,
                "loss": sums.loss,
                "metrics": sums.metrics,
                "state": sums.model_state,
            }
            own_leaves = tree_leaves_with_path(state.replace(kept={}))
            flat = [*own_leaves, *tree_leaves_with_path(results)]
            self.names = [path_string(path) for path, _ in flat]
            self.names += [f"product {i}" for i in range(len(products))]
            prints = [fingerprint(x) for _, x in flat]
            return jnp.array([*prints, *products], jnp.uint32)[None]

        mesh, in_specs, out_specs = self.strategy.mesh, (self.specs, P(), dict(specs)), P(self.axes)
        mapped = jax.shard_map(
            compute, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return mapped(state, full, batch)


@jax.jit  # traced once for each shape
def fingerprint(x: jax.Array) -> jax.Array:
    """Return a number, uint32 [], that every flipped bit of x changes."""
    if is_key(x):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    kind = f"uint{8 * min(x.dtype.itemsize, 4)}"  # 8 bytes become two words
    words = jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32).reshape(-1)
    words = words + jax.lax.iota(jnp.uint32, words.size) * np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        words = (words ^ words >> shift) * np.uint32(factor)
    if words.size > WINDOW:  # XLA on CPU fuses short sums with what computes their inputs
        rows = jnp.pad(words, (0, -words.size % WINDOW)).reshape(-1, WINDOW)
        words = rows.sum(1, dtype=jnp.uint32)
    return words.sum(dtype=jnp.uint32)
