"""The `pmap` strategy: `jax.pmap` over all devices, `psum` between them: the classic data-parallel
loop."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import global_array_to_host_local_array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.errors import UsageError
from jaxdp.optim import check_elementwise
from jaxdp.parallel.layout import Sharding
from jaxdp.parallel.placement import converter
from jaxdp.parallel.strategy import Strategy, Tree
from jaxdp.split import DATA, WHOLE, from_slices, spec, take, to_slices
from jaxdp.train.state import Batch, TrainState


class PMap(Strategy):
    """State replicated on all devices; each device computes the full update.

    Every device divides the same psum by the same weight (`lax.pmean` with weights), so all stay
    equal. zero: 1 gives each device a slice of the optimizer state and of the update, and needs an
    elementwise optimizer. Programs take slices as [device, ...slice], and batches as [device, local,
    example, ...].
    """

    @property
    def lead(self) -> tuple[int, ...]:
        return self.assignment.shape

    def check_sharding(self, sharding: Sharding) -> None:
        for key, works in (("zero", sharding.zero < 2), ("shard_size", not sharding.shard_size)):
            if not works:
                raise UsageError(
                    f"parallel.{key}: {getattr(sharding, key)} does not work under pmap; set "
                    "parallel.backend to pjit",
                    rank=0,
                )

    def check(self, tx: Any, params: Tree) -> None:
        parts = 2 if self.arithmetic.advice else len(self.devices)
        if self.layout.opt_state and parts > 1:
            check_elementwise(tx, params, parts, self.blocks, pad=self.pad)

    def on_each_device(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return f  # the whole program runs on each device

    def compiled(self, f: Callable, out_specs: Any, donate: bool = False) -> Any:
        return Mapped(f, (self.specs(), self.by_device.spec), out_specs, self.mesh, donate)

    def specs(self) -> TrainState:
        return jax.tree.map(lambda spec: spec if spec == P() else P(DATA), super().specs())

    def slice_params(self, params: Tree) -> Tree:
        index = jax.lax.axis_index(DATA)
        return jax.tree.map(lambda x, d: take(x, d, index, self.parts), params, self.param_dims)

    def shard_batch(self, batch: dict[str, np.ndarray], several: bool = False) -> Batch:
        def by_device(x: np.ndarray) -> np.ndarray:
            """Reshape to [local device, local, ...] or [local device, step, local, ...]."""
            count = self.assignment.shape[1]
            if several:
                return x.reshape(len(x), -1, count, *x.shape[2:]).swapaxes(0, 1)
            return x.reshape(-1, count, *x.shape[1:])

        return super().shard_batch({name: by_device(x) for name, x in batch.items()})

    def to_programs(self, state: TrainState) -> TrainState:
        def stack(x: Any, dim: int) -> Any:
            if dim == WHOLE:
                return x
            program = converter(to_slices, self.by_device, dim, self.parts)
            return program(x) if isinstance(x, jax.Array) else jax.eval_shape(program, x)

        return jax.tree.map(stack, state, self.state_dims.replace(kept={}))

    def from_programs(self, state: TrainState) -> TrainState:
        def join(x: jax.Array, dim: int) -> jax.Array:
            if dim == WHOLE:
                return x
            return converter(from_slices, NamedSharding(self.mesh, spec(dim, DATA)), dim)(x)

        return jax.tree.map(join, state, self.state_dims.replace(kept={}))


class Mapped:
    """`pmap` of f(state, batch) on global arrays.

    Each leaf is an argument of its own, and only the program that `pmap` compiles is called: around
    it, `pmap` prepares every call in Python, and over several processes it takes and returns the
    arrays of one process, and converts them, which takes longer than the rest of the Python code.

    Args:
        in_specs, out_specs: of the arguments and results, PartitionSpecs of the mesh; what is split
            is [device, ...].
        donate: donate the state.
    """

    def __init__(self, f: Callable, in_specs: Any, out_specs: Any, mesh: Mesh, donate: bool):
        self.f, self.mesh, self.donate = f, mesh, donate
        self.in_specs, self.out_axes = in_specs, jax.tree.map(axis_of, out_specs)
        self.compiled: dict[Any, Any] = {}  # for each form of the batch
        self.mapped = functools.cache(self.map_leaves)  # JAX finds what it traced by the function

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        leaves, treedef = jax.tree.flatten((state, batch))
        if isinstance(leaves[0], jax.core.Tracer):  # a compiled program cannot be traced
            return self.mapped(treedef)(*leaves)
        form = tuple((name, x.shape, x.dtype) for name, x in batch.items())
        if form not in self.compiled:
            self.compiled[form] = self.lower(state, batch).compile()
        return self.compiled[form](*leaves)

    def lower(self, state: TrainState, batch: Batch) -> Any:
        leaves, treedef = jax.tree.flatten((state, batch))
        if jax.process_count() > 1:
            leaves = global_array_to_host_local_array(leaves, self.mesh, self._specs(treedef))
        return self.mapped(treedef).lower(*leaves)

    def _specs(self, treedef: Any) -> list[P]:
        arguments = jax.tree.unflatten(treedef, range(treedef.num_leaves))
        return jax.tree.leaves(jax.tree.broadcast(self.in_specs, arguments))

    def map_leaves(self, treedef: Any) -> Any:
        """Return the `pmap` of a function of the leaves of (state, batch), which has this treedef."""

        @functools.wraps(self.f)
        def f(*leaves: jax.Array) -> Any:
            return self.f(*jax.tree.unflatten(treedef, leaves))

        donated = treedef.children()[0].num_leaves if self.donate else 0
        return jax.pmap(
            f,
            axis_name=DATA,
            in_axes=tuple(map(axis_of, self._specs(treedef))),
            out_axes=self.out_axes,
            donate_argnums=range(donated),
            devices=list(self.mesh.devices.flat),
            axis_size=self.mesh.size,
        )


def axis_of(spec: P) -> int | None:
    return None if spec == P() else 0
