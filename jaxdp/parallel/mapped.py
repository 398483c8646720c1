"""`jax.pmap` for trees in which some leaves vary between devices and the others are replicated."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.axes import DATA
from jaxdp.parallel.placement import data_mesh, of_this_process

VARIES = (True, False, True, False)  # for each part of the two arguments


class Mapped:
    """`pmap` of f(state, batch). Every tree is passed as two tuples of leaves, those that vary
    between devices and those that do not, because `pmap` over several processes needs hashable
    axes.

    Over several processes, every call of `pmap` converts process-local arrays to global ones and
    back, which takes longer than the rest of the Python code. So `pmap` only compiles there: the
    compiled program takes and returns global arrays, and arguments that are not global yet are
    converted here, once.

    Args:
        takes, gives: for each argument, and for the result, a tree (or prefix) of booleans: the
            leaf varies.
        donate: donate the first argument.
    """

    def __init__(
        self, f: Callable, takes: Any, gives: Any, devices: list[jax.Device], donate: bool = False
    ):
        self.takes, self.gives = [Partition(varies) for varies in takes], Partition(gives)

        @functools.wraps(f)
        def run(*parts: tuple) -> tuple[tuple, tuple]:
            first, second = self.takes
            return self.gives.cut(f(first.join(*parts[:2]), second.join(*parts[2:])))

        local = data_mesh([devices[i] for i in of_this_process(devices)])
        specs = {True: P(DATA), False: P()}
        self.local = {varies: NamedSharding(local, spec) for varies, spec in specs.items()}
        self.all = {
            varies: NamedSharding(data_mesh(devices), spec) for varies, spec in specs.items()
        }
        self.compiled: dict[Any, Any] = {}  # for each shape of the second argument

        # Over several processes, pmap uses all devices in JAX's order, which must be ours.
        chosen = None if jax.process_count() > 1 else devices
        assert chosen is not None or devices == jax.devices(), (devices, jax.devices())
        self.mapped = jax.pmap(
            run,
            axis_name=DATA,
            in_axes=(0, None, 0, None),
            out_axes=(0, None),
            donate_argnums=(0, 1) if donate else (),
            devices=chosen,
        )

    def __call__(self, *arguments: Any) -> Any:
        parts = self._cut(arguments)
        if jax.process_count() == 1:
            return self.gives.join(*self.mapped(*parts))
        shapes = tuple(x.shape for part in parts[2:] for x in part)
        if shapes not in self.compiled:
            self.compiled[shapes] = self._lower(parts).compile()
        return self.gives.join(*self.compiled[shapes](*map(self._to_global, parts, VARIES)))

    def _to_global(self, part: tuple, varies: bool) -> tuple:
        """Convert a part to global arrays; either all of its arrays are global already or none is."""
        if not part or not part[0].is_fully_addressable:
            return part
        return tuple(reshard(x, self.all[varies]) for x in part)

    def _lower(self, parts: Sequence[tuple]) -> Any:
        """Lower for this process's arrays, as `pmap` requires."""

        def to_local(x: jax.Array, varies: bool) -> jax.Array:
            return x if x.is_fully_addressable else reshard(x, self.local[varies])

        return self.mapped.lower(
            *(tuple(to_local(x, v) for x in part) for part, v in zip(parts, VARIES))
        )

    def lower(self, *arguments: Any) -> Any:
        parts = self._cut(arguments)
        return self._lower(parts) if jax.process_count() > 1 else self.mapped.lower(*parts)

    def _cut(self, arguments: Sequence[Any]) -> list[tuple]:
        return [part for parted, tree in zip(self.takes, arguments) for part in parted.cut(tree)]


class Partition:
    """A split of trees of one structure into two tuples of leaves: (those that vary, the others)."""

    def __init__(self, varies: Any):
        self.prefix = varies
        self.treedef: Any = None
        self.varies: list[bool] = []
        self.others: list[bool] = []

    def cut(self, tree: Any) -> tuple[tuple, tuple]:
        leaves, treedef = jax.tree.flatten(tree)
        if self.treedef is None or treedef != self.treedef:
            self.treedef, self.varies = (
                treedef,
                jax.tree.leaves(jax.tree.broadcast(self.prefix, tree)),
            )
            self.others = [not v for v in self.varies]
        return tuple(itertools.compress(leaves, self.varies)), tuple(
            itertools.compress(leaves, self.others)
        )

    def join(self, varying: tuple, shared: tuple) -> Any:
        varying_leaves, shared_leaves = iter(varying), iter(shared)
        return jax.tree.unflatten(
            self.treedef, [next(varying_leaves if v else shared_leaves) for v in self.varies]
        )


def reshard(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Convert an array of this process, [local device, ...] or replicated, to the global array that
    it is part of, or back, as the sharding says. No data moves."""
    return from_buffers(
        (sharding.mesh.size, *x.shape[1:]) if sharding.spec else x.shape, sharding, x
    )


def from_buffers(shape: tuple[int, ...], sharding: NamedSharding, x: jax.Array) -> jax.Array:
    """Return an array of another sharding with the same buffers."""
    if x.sharding == sharding and x.shape == shape:
        return x
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [s.data for s in x.addressable_shards]
    )
