"""The `pjit` strategy: one `jax.jit` over a mesh of all devices, a ZeRO layout, explicit reductions
in `shard_map`."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxdp.optim import check_elementwise
from jaxdp.parallel.placement import fit_trees, padded_shapes
from jaxdp.parallel.strategy import Strategy, Tree
from jaxdp.split import spec, split_dims


class PJit(Strategy):
    """State sharded over a mesh (NamedSharding), batches sharded along all its axes.

    Explicit collectives inside `shard_map` sum the gradients. The update is an ordinary program on
    global arrays, so the optimizer gets full arrays, even if they are sharded.
    """

    def check(self, tx: Any, params: Tree) -> None:
        """Accept any optimizer, as it gets full arrays; a reduction in groups needs an elementwise one, or the
        layout matters."""
        if (advice := self.arithmetic.advice) and self.layout.opt_state:
            check_elementwise(tx, params, 2, self.blocks, advice, pad=self.pad)  # on one too

    def on_each_device(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(
            f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def compiled(self, f: Callable, out_specs: Any, donate: bool = False) -> Any:
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), out_specs)
        return jax.jit(f, donate_argnums=(0,) if donate else (), out_shardings=shardings)

    def slice_params(self, params: Tree) -> Tree:
        def shard(x: jax.Array, dim: int) -> jax.Array:
            sharding = NamedSharding(self.mesh, spec(dim, self.axes.shard))
            return jax.lax.with_sharding_constraint(x, sharding)

        padded = padded_shapes(self.shapes.params, self.param_dims, self.parts)
        return jax.tree.map(shard, fit_trees(params, padded), self.param_dims)

    def other_dims(self, opt_state: Tree) -> Tree:
        return split_dims(opt_state, self.parts, self.blocks)
