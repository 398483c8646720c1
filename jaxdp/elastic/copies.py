"""Copy a run's state on its devices: the part of each device, and that of its neighbour in another
process.

The parts are the replicated leaves, number WHOLE, and the slices of the split leaves on one device,
numbers 0 to `count` - 1. Neighbours exchange their slices in one `ppermute` for each leaf."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.parallel.placement import of_this_process
from jaxdp.parallel.strategy import Strategy
from jaxdp.split import WHOLE
from jaxdp.train.state import TrainState


class Copies:
    """The program that copies the state of a strategy.

    hosts[rank]. dims: of the leaves. count: the number of slices of the split leaves; 0: there are
    none. size: the bytes that this process copies. shift: how many devices further the neighbour of
    a device is; 0: another process has each slice already (hybrid sharding), or there is no other
    process."""

    def __init__(self, strategy: Strategy, hosts: Sequence[str]):
        mesh, shapes = strategy.mesh, jax.tree.leaves(strategy.abstract(padded=True))
        self.dims = jax.tree.leaves(strategy.state_dims)
        split = of_part(0, shapes, self.dims)
        self.count = strategy.parts if split else 0
        self.devices = list(mesh.devices.flat)
        axis = mesh.axis_names.index(strategy.axes.shard)
        self.numbers = np.indices(mesh.devices.shape)[axis].ravel().tolist()  # of their slices
        processes = [d.process_index for d in self.devices]
        self.shift = shift(processes, hosts) if self.count == len(self.devices) else 0

        slices = min(len(of_this_process(self.devices)), self.count) * (2 if self.shift else 1)
        self.size = 0
        for x, dim in zip(shapes, self.dims):
            piece = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            self.size += piece if dim == WHOLE else piece * slices

        n, specs = len(self.devices), [x.sharding.spec for x in split]
        pairs = [((i + self.shift) % n, i) for i in range(n)]

        exchange = jax.shard_map(
            lambda slices: jax.lax.ppermute(slices, mesh.axis_names, pairs),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=specs,
            check_vma=False,
        )

        def copy(state):
            leaves = jax.tree.leaves(state)
            moved = exchange(of_part(0, leaves, self.dims)) if self.shift else []
            return [jnp.copy(x) for x in leaves], moved

        copied = shapes, split if self.shift else []
        self._copy = jax.jit(copy, out_shardings=jax.tree.map(lambda x: x.sharding, copied))

    def start(self, state: TrainState) -> Any:
        """Start to copy an exported, padded state to host memory; return the arrays that `read`
        waits for: all leaves, and the split ones of neighbours.
        """
        copied = self._copy(state)
        for x in jax.tree.leaves(copied):
            x.copy_to_host_async()
        return copied

    def read(self, copied: Any) -> dict[int, list[np.ndarray]]:
        """Return the arrays of each part that was copied. Raises JAX's errors if another process
        was lost meanwhile.
        """
        leaves, moved = copied
        parts = {WHOLE: jax.device_get(of_part(WHOLE, leaves, self.dims))}
        for arrays, shift in (of_part(0, leaves, self.dims), 0), (moved, self.shift):
            for shards in zip(*(x.addressable_shards for x in arrays)):
                position = self.devices.index(shards[0].device) + shift
                number = self.numbers[position % len(self.devices)]
                parts[number] = [np.asarray(shard.data) for shard in shards]
        return parts


def of_part(part: int, leaves: Iterable[Any], dims: Iterable[int]) -> list[Any]:
    """Return the leaves of which a part has an array: those that are split, or if it is WHOLE, the
    others. dims: of all leaves.
    """
    return [x for x, d in zip(leaves, dims, strict=True) if (d == WHOLE) == (part == WHOLE)]


def shift(processes: Sequence[int], hosts: Sequence[str]) -> int:
    """Return the least shift along a circle of devices that takes most of them to another host,
    then process; 0: none.

    processes: of the devices. hosts[process].
    """

    def leave(k):
        pairs = list(zip(processes, np.roll(processes, -k)))
        return sum(hosts[a] != hosts[b] for a, b in pairs), sum(a != b for a, b in pairs)

    return max(range(len(processes)), key=leave)


def assemble(
    shapes: Sequence[Any], dims: Sequence[int], parts: Iterable[tuple[int, Sequence[np.ndarray]]]
) -> list[jax.Array]:
    """Return global arrays of these shapes and shardings from the parts of a state that was split
    in another way.

    dims: along which it was split. parts: (number, arrays) of all parts; padding at the end of a
    dim is dropped."""
    shards = []  # of each leaf, by the first element of each shard
    for x in shapes:
        indices = x.sharding.addressable_devices_indices_map(x.shape).values()
        size = x.sharding.shard_shape(x.shape)
        shards.append({first(index): np.empty(size, x.dtype) for index in indices})

    for part, arrays in parts:
        leaves = of_part(part, zip(shards, dims), dims)
        for piece, (targets, dim) in zip(arrays, leaves, strict=True):
            start = [part * n if d == dim else 0 for d, n in enumerate(piece.shape)]
            for target_start, target in targets.items():
                offset = np.subtract(start, target_start)
                overlap(target, offset, piece.shape)[...] = overlap(piece, -offset, target.shape)

    return [
        jax.make_array_from_callback(
            x.shape,
            x.sharding,
            lambda index, pieces=pieces: pieces[first(index)].copy(),  # type: ignore[misc]
        )
        for x, pieces in zip(shapes, shards)
    ]


def first(index: Any) -> tuple[int, ...]:
    """Return the first element of an index of a shard."""
    return tuple(x.start or 0 for x in index)


def overlap(x: np.ndarray, offset: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a view of what an array has in common with another one, which starts at an offset."""
    index: Any = ..., *map(slice, np.maximum(offset, 0), np.maximum(offset + shape, 0))
    return x[index]
