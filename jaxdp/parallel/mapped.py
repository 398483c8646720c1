"""Calls of `jax.pmap` with trees of which some leaves differ between devices and some do not."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.axes import DATA
from jaxdp.parallel.placement import data_mesh, of_this_process

VARIES = (True, False, True, False)  # the parts of two arguments


class Mapped:
    """`pmap` of f(state, other): every tree goes in and comes out as two tuples of leaves, those that differ between
    devices and those that do not, because `pmap` over several processes wants its axes hashable.

    takes, gives: of each argument, and of the result, a tree (or a prefix of one) of which leaves differ. donate: the
    first argument.

    Over several processes `pmap` makes a global array of each one of this process's, and the reverse, in every call,
    which takes longer than all else that Python does. There it only compiles; what is compiled takes global arrays and
    gives global arrays, and what is not global yet is made so here, once.
    """

    def __init__(
        self, f: Callable, takes: tuple[Any, Any], gives: Any, devices: list[jax.Device], donate: bool = False
    ):
        self.takes, self.gives = [Partition(varies) for varies in takes], Partition(gives)

        def run(_: jax.Array, *parts: tuple) -> tuple[tuple, tuple]:
            first, second = self.takes
            return self.gives.cut(f(first.join(*parts[:2]), second.join(*parts[2:])))

        local = data_mesh([devices[i] for i in of_this_process(devices)])
        self.here = {varies: NamedSharding(local, P(DATA) if varies else P()) for varies in (True, False)}
        self.everywhere = {varies: NamedSharding(data_mesh(devices), own.spec) for varies, own in self.here.items()}
        anchor = np.zeros(local.size, bool)  # pmap wants something that is mapped
        self.anchor = jax.device_put(anchor, self.here[True])
        self.compiled: Any = None

        # Over several processes pmap takes all devices in their own order, which must be ours.
        chosen = None if jax.process_count() > 1 else devices
        assert chosen is not None or devices == jax.devices(), (devices, jax.devices())
        self.mapped = jax.pmap(
            run,
            axis_name=DATA,
            in_axes=(0, 0, None, 0, None),
            out_axes=(0, None),
            donate_argnums=(1, 2) if donate else (),
            devices=chosen,
        )

    def __call__(self, *arguments: Any) -> Any:
        parts = self._cut(arguments)
        if jax.process_count() == 1:
            return self.gives.join(*self.mapped(self.anchor, *parts))
        if self.compiled is None:
            self.compiled = self._lower(parts).compile()
            self.anchor = over_all(self.anchor, self.everywhere[True])
        return self.gives.join(*self.compiled(self.anchor, *map(self._over_all, parts, VARIES)))

    def _over_all(self, part: tuple, varies: bool) -> tuple:
        """A part as global arrays; all of it are, or none is."""
        if not part or not part[0].is_fully_addressable:
            return part
        return tuple(over_all(x, self.everywhere[varies]) for x in part)

    def _lower(self, parts: Sequence[tuple]) -> Any:
        """`pmap` lowers for this process's arrays."""
        own = lambda x, varies: x if x.is_fully_addressable else over_all(x, self.here[varies])
        anchor = own(self.anchor, True)
        return self.mapped.lower(anchor, *(tuple(own(x, v) for x in part) for part, v in zip(parts, VARIES)))

    def lower(self, *arguments: Any) -> Any:
        parts = self._cut(arguments)
        return self._lower(parts) if jax.process_count() > 1 else self.mapped.lower(self.anchor, *parts)

    def _cut(self, arguments: Sequence[Any]) -> list[tuple]:
        return [part for parted, tree in zip(self.takes, arguments, strict=True) for part in parted.cut(tree)]


class Partition:
    """Trees of one structure as two tuples of leaves: (those that vary, the others)."""

    def __init__(self, varies: Any):
        self.prefix = varies
        self.treedef: Any = None
        self.varies: list[bool] = []
        self.others: list[bool] = []

    def cut(self, tree: Any) -> tuple[tuple, tuple]:
        leaves, treedef = jax.tree.flatten(tree)
        if self.treedef is None or treedef != self.treedef:
            self.treedef, self.varies = treedef, jax.tree.leaves(jax.tree.broadcast(self.prefix, tree))
            self.others = [not v for v in self.varies]
        return tuple(itertools.compress(leaves, self.varies)), tuple(itertools.compress(leaves, self.others))

    def join(self, own: tuple, shared: tuple) -> Any:
        own_left, shared_left = iter(own), iter(shared)
        return jax.tree.unflatten(self.treedef, [next(own_left if v else shared_left) for v in self.varies])


def over_all(x: jax.Array, place: NamedSharding) -> jax.Array:
    """This process's array [local device, ...], or one that is whole on each, as the global array it is part of; or the
    reverse, by the place."""
    return of_buffers((place.mesh.size, *x.shape[1:]) if place.spec else x.shape, place, x)


def of_buffers(shape: tuple[int, ...], sharding: NamedSharding, x: jax.Array) -> jax.Array:
    """The same buffers as an array of another sharding."""
    return jax.make_array_from_single_device_arrays(shape, sharding, [s.data for s in x.addressable_shards])
