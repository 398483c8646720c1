"""One microbatch, computed by every device alike: a fingerprint of each gradient, and of each leaf of the state.

A fingerprint is 32 bits, made on the device. Each word of a leaf is mixed with its position by a bijection (the
finalizer of MurmurHash3), and the results are summed, so every flipped bit changes it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.audit.products import visit_products
from jaxdp.core.state import Batch, TrainState, View
from jaxdp.core.step import Step
from jaxdp.parallel.placement import of_device
from jaxdp.parallel.strategy import Strategy
from jaxdp.split import fit, path_string

Tree = Any
SMALL = 1024  # elements
BITS: dict[int, Any] = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # of 8 bytes: two words


class Sample(NamedTuple):
    """The inputs of all devices, replicated: the view of the state with full parameters, and one microbatch."""

    view: View
    batch: Batch
    slots: np.ndarray


class Probe:
    """The program of a strategy's devices. ndim: {entry of a batch: its number of dims in one microbatch}."""

    def __init__(self, strategy: Strategy, step: Step, ndim: dict[str, int]):
        self.strategy, self.step, self.ndim = strategy, step, ndim
        self.names: list[str] = []  # of the fingerprints: first those of the state
        self.axes = strategy.mesh.axis_names
        self.full = NamedSharding(strategy.mesh, P())
        self._replicate = jax.jit(self._unpadded, out_shardings=self.full)
        self._select = jax.jit(self._select_microbatch, static_argnums=0)
        self._compute = jax.jit(self._fingerprints)

    def sample(self, state: TrainState, batch: Batch, microbatch: int) -> tuple[list[jax.Array], Sample]:
        """Return (the leaves of the exported state, the inputs): gather parameters, broadcast the microbatch."""
        exported = self.strategy.export(state, padded=True)
        leaves, structure = jax.tree.flatten(exported.params)
        split = [i for i, x in enumerate(leaves) if not x.sharding.is_fully_replicated]
        for i, x in (self._replicate({i: leaves[i] for i in split}) if split else {}).items():
            leaves[i] = x
        view = exported.replace(params=jax.tree.unflatten(structure, leaves), exponents=None).view(self.step.seed)
        if view.carry is not None:
            view = view._replace(carry=jax.tree.map(lambda x: x[microbatch][None], view.carry))
        ((device, slot),) = np.argwhere(self.strategy.assignment == microbatch)
        key = next(key for key in self.ndim if key in batch)
        dims = np.ndim(batch[key]) - self.ndim[key]  # before those of an example: device, update, slot
        spec = lambda x: getattr(getattr(x, "sharding", None), "spec", P())
        specs = tuple((name, spec(x)) for name, x in sorted(batch.items()))
        chosen = self._select((dims, specs), batch, device, slot)
        named = exported.replace(carry=None)
        if not self.names:
            self.names = [path_string(path) for path, _ in jax.tree_util.tree_flatten_with_path(named)[0]]
        return jax.tree.leaves(named), Sample(view, chosen, np.full(1, microbatch, np.int32))

    def fingerprints(self, leaves: list[jax.Array], sample: Sample) -> jax.Array:
        """Return uint32[device, leaf], each row on its device: of the device's own state, and of its gradients.

        No device waits for another.
        """
        return self._compute(leaves, sample)

    def _unpadded(self, leaves: dict[int, jax.Array]) -> dict[int, jax.Array]:
        shapes = jax.tree.leaves(self.strategy.shapes.params)
        return {i: fit(x, shapes[i].shape) for i, x in leaves.items()}

    def _select_microbatch(self, form: tuple[int, tuple], batch: Batch, device: jax.Array, slot: jax.Array) -> Batch:
        dims, specs = form

        def select(batch: Batch, device: jax.Array, slot: jax.Array) -> Batch:
            def one(x: jax.Array) -> jax.Array:
                x = jax.lax.dynamic_slice_in_dim(x.reshape(-1, *x.shape[dims:]), slot, 1)
                return of_device(x, self.axes, device)

            return jax.tree.map(one, batch)

        return self._map(select, (dict(specs), P(), P()), P())(batch, device, slot)

    def _fingerprints(self, leaves: list[jax.Array], sample: Sample) -> jax.Array:
        def compute(leaves: list[jax.Array], sample: Sample) -> jax.Array:
            sums, products = visit_products(self.step.grads, lambda number, x: (x, fingerprint(x)))(*sample)
            results = {"grads": sums.grads, "loss": sums.loss, "metrics": sums.metrics, "state": sums.model_state}
            flat = jax.tree_util.tree_flatten_with_path(results)[0]
            self.names[len(leaves) :] = [path_string(path) for path, _ in flat]
            self.names += [f"product {i}" for i in range(len(products))]
            return jnp.stack([*fingerprints([*leaves, *(x for _, x in flat)]), *products])[None]

        specs = [x.spec for x in self.shardings]
        return self._map(compute, (specs, P()), P(self.axes))(leaves, sample)

    @property
    def shardings(self) -> list[NamedSharding]:
        """Return the shardings of the state's leaves."""
        return [x.sharding for x in jax.tree.leaves(self.strategy.abstract(padded=True).replace(carry=None))]

    def _map(self, f: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(f, mesh=self.strategy.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def fingerprints(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the fingerprint of each array; one operation makes those of small ones of the same shape."""
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        groups.setdefault((x.shape, x.dtype) if x.size <= SMALL else i, []).append(i)
    prints: dict[int, jax.Array] = {}
    for group in groups.values():
        prints |= zip(group, jax.vmap(fingerprint)(jnp.stack([arrays[i] for i in group])))
    return [prints[i] for i in range(len(arrays))]


def fingerprint(x: jax.Array) -> jax.Array:
    """Return a number, uint32 [], that every flipped bit of x changes."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    kind = BITS[x.dtype.itemsize] if x.dtype.itemsize < 4 else jnp.uint32  # 8 bytes become two words
    words = jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32).reshape(-1)
    words = words + jax.lax.iota(jnp.uint32, words.size) * np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        words = (words ^ words >> shift) * np.uint32(factor)
    return words.sum(dtype=jnp.uint32)
