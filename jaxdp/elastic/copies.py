"""Copy a run's state on its devices: the part of each device, and that of its neighbour in another
process.

The parts are the replicated leaves, number WHOLE, and the slices of the split leaves on one device,
numbers 0 to `count` - 1. Neighbours exchange their slices in one `ppermute` for each 256 MB and
dtype."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.parallel.reduction import pack
from jaxdp.parallel.strategy import Strategy
from jaxdp.split import WHOLE
from jaxdp.train.state import TrainState

BUCKET = 1 << 28  # bytes
Box = tuple[tuple[int, int], ...]


class Copies:
    """The program that copies the state of a strategy.

    hosts[rank]. dims: of the leaves. count: the number of slices of the split leaves; 0: there are
    none. size: the bytes that this process copies. shift: how many devices further the neighbour of
    a device is; 0: another process has each slice already (hybrid sharding), or there is no other
    process."""

    def __init__(self, strategy: Strategy, hosts: Sequence[str]):
        leaves, self.mesh = jax.tree.leaves(strategy.abstract(padded=True)), strategy.mesh
        self.dims, self.devices = jax.tree.leaves(strategy.dims), list(self.mesh.devices.flat)
        self.split = [i for i, d in enumerate(self.dims) if d != WHOLE]
        self.count = strategy.parts if self.split else 0
        processes = [d.process_index for d in self.devices]
        self.numbers = (
            slice_numbers(leaves[self.split[0]], self.dims[self.split[0]]) if self.split else {}
        )
        processes_of = Counter(
            number for number, _ in {(n, d.process_index) for d, n in self.numbers.items()}
        )
        self.shift = shift(processes, hosts) if min(processes_of.values(), default=2) < 2 else 0
        self.slices = [leaves[i].sharding.shard_shape(leaves[i].shape) for i in self.split]
        sizes = [
            (leaves[i].dtype, math.prod(s) * leaves[i].dtype.itemsize)
            for i, s in zip(self.split, self.slices)
        ]
        self.buckets = pack(sizes, BUCKET) if self.shift else []
        whole = sum(
            x.dtype.itemsize * math.prod(x.shape) for x, d in zip(leaves, self.dims) if d == WHOLE
        )
        local = min(processes.count(jax.process_index()), max(1, self.count)) * (
            2 if self.shift else 1
        )
        self.size = whole + local * sum(size for _, size in sizes)
        specs = [leaves[i].sharding.spec for i in self.split]
        axis, n = self.mesh.axis_names, len(self.devices)
        pairs = [((i + self.shift) % n, i) for i in range(n)]

        def exchange(slices: list[jax.Array]) -> list[jax.Array]:
            flat = [
                jnp.concatenate([slices[i].ravel() for i in indices]) for indices in self.buckets
            ]
            return [jax.lax.ppermute(x, axis, pairs) for x in flat]

        def copy(state: TrainState) -> tuple[list[jax.Array], list[jax.Array]]:
            leaves = jax.tree.leaves(state)
            exchanged = jax.shard_map(
                exchange, mesh=self.mesh, in_specs=(specs,), out_specs=P(axis), check_vma=False
            )
            moved = exchanged([leaves[i] for i in self.split]) if self.shift else []
            return [jnp.copy(x) for x in leaves], moved

        shardings = [x.sharding for x in leaves], NamedSharding(self.mesh, P(axis))
        self._copy = jax.jit(copy, out_shardings=shardings)

    def start(self, state: TrainState) -> tuple[list[jax.Array], list[jax.Array]]:
        """Start to copy an exported, padded state to host memory; return the arrays that `read`
        waits for.
        """
        copied = self._copy(state)
        for x in jax.tree.leaves(copied):
            x.copy_to_host_async()
        return copied

    def read(self, copied: tuple[list[jax.Array], list[jax.Array]]) -> dict[int, list[np.ndarray]]:
        """Return the arrays of each part that was copied. Raises JAX's errors if another process
        was lost meanwhile.
        """
        own, moved = copied
        parts = {WHOLE: jax.device_get([x for x, d in zip(own, self.dims) if d == WHOLE])}
        slices, flat = [by_device(own[i]) for i in self.split], [by_device(x) for x in moved]
        for position, device in enumerate(self.devices):
            if self.count and device.process_index == jax.process_index():
                parts[self.numbers[device]] = [x[device] for x in slices]
                if self.shift:
                    neighbour = self.devices[(position + self.shift) % len(self.devices)]
                    parts[self.numbers[neighbour]] = self._unpack([x[device] for x in flat])
        return parts

    def _unpack(self, flat: list[np.ndarray]) -> list[np.ndarray]:
        """Return the slices of the split leaves in one device's buckets."""
        slices: list[Any] = [None] * len(self.split)
        for bucket, indices in zip(flat, self.buckets):
            ends = np.cumsum([math.prod(self.slices[i]) for i in indices])
            for i, x in zip(indices, np.split(bucket, ends[:-1])):
                slices[i] = x.reshape(self.slices[i])
        return slices


def slice_numbers(x: Any, dim: int) -> dict[jax.Device, int]:
    """Return the number of the slice that each device has of a leaf that is split along a dim."""
    size = x.sharding.shard_shape(x.shape)[dim]
    return {
        d: (i[dim].start or 0) // size for d, i in x.sharding.devices_indices_map(x.shape).items()
    }


def by_device(x: jax.Array) -> dict[jax.Device, np.ndarray]:
    return {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}


def shift(processes: Sequence[int], hosts: Sequence[str]) -> int:
    """Return the least shift along a circle of devices that takes most of them to another host,
    then process; 0: none.

    processes: of the devices. hosts[process].
    """

    def leave(k: int) -> tuple[int, int]:
        pairs = list(zip(processes, [*processes[k:], *processes[:k]]))
        return sum(hosts[a] != hosts[b] for a, b in pairs), sum(a != b for a, b in pairs)

    return max(range(1, len(processes)), key=leave) if len(set(processes)) > 1 else 0


def box(index: Any, shape: Sequence[int]) -> Box:
    """Return (start, stop) along each dim of an index."""
    return tuple(piece.indices(size)[:2] for piece, size in zip(index, shape))


def assemble(
    shapes: Sequence[Any], dims: Sequence[int], parts: Iterable[tuple[int, Sequence[np.ndarray]]]
) -> list[jax.Array]:
    """Return global arrays of these shapes and shardings from the parts of a state that was split
    in another way.

    dims: along which it was split. parts: (number, arrays) of all parts; padding at the end of a
    dim is dropped."""

    def indices(x):
        return x.sharding.addressable_devices_indices_map(x.shape).values()

    def empty(x):
        return np.empty(x.sharding.shard_shape(x.shape), x.dtype)

    shards = [{box(index, x.shape): empty(x) for index in indices(x)} for x in shapes]
    for part, arrays in parts:
        leaves = [i for i, d in enumerate(dims) if (d == WHOLE) == (part == WHOLE)]
        for i, piece in zip(leaves, arrays, strict=True):
            fill(shards[i], piece, dims[i], part * piece.shape[dims[i]] if part != WHOLE else 0)

    def place(x: Any, pieces: dict[Box, np.ndarray]) -> jax.Array:
        return jax.make_array_from_callback(
            x.shape, x.sharding, lambda index: pieces[box(index, x.shape)].copy()
        )

    return [place(x, pieces) for x, pieces in zip(shapes, shards)]


def fill(shards: Mapping[Box, np.ndarray], piece: np.ndarray, dim: int, first: int) -> None:
    """Copy a piece of a leaf to those of its shards that overlap it.

    dim: the dim along which the piece starts at `first`; WHOLE: it is the full leaf.
    """
    for bounds, shard in shards.items():
        source, target = [slice(*b) for b in bounds], [slice(None)] * piece.ndim
        if dim != WHOLE:
            start, stop = bounds[dim]
            low, high = max(start, first), min(stop, first + piece.shape[dim])
            source[dim], target[dim] = (
                slice(low - first, high - first),
                slice(low - start, high - start),
            )
            if low >= high:
                continue
        shard[tuple(target)] = piece[tuple(source)]
