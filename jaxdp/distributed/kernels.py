"""A collective is a function of one replica's buffers, traced over the processes that take part and over no others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp.distributed.packing import Part, from_bits, pack, to_bits, unpack

AXIS = "rank"
Transfer = Callable[[Array], Array]  # buffer[rows, element] -> buffer[rows', element]


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The type a reduction runs in: halves are summed in float32 and rounded once; small integers wrap at the end."""
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        return jnp.dtype(jnp.float32)
    if jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4:
        return jnp.dtype(jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32)
    return dtype


def _gathered(combine: Callable[..., Array]) -> Transfer:
    """Gather and combine: exact order for products; and Gloo's min and max are wrong where there are NaNs."""
    return lambda x: combine(lax.all_gather(x, AXIS), axis=0)


def _extreme(native: Callable[[Array, str], Array], combine: Callable[..., Array]) -> Transfer:
    gathered = _gathered(combine)
    return lambda x: native(x, AXIS) if jnp.issubdtype(x.dtype, jnp.integer) else gathered(x)


def _divided(total: Array) -> Array:
    """By the number of members. XLA turns division by a scalar into a product with its reciprocal: 5/3 off by a bit."""
    return total / lax.optimization_barrier(jnp.full_like(total, lax.axis_size(AXIS)))


# What each operation does to one buffer of accumulators; bool goes as 0 and 1.
REDUCTIONS: dict[str, Transfer] = {
    "sum": lambda x: lax.psum(x, AXIS),
    "avg": lambda x: _divided(lax.psum(x, AXIS)),
    "prod": _gathered(functools.partial(jnp.prod, promote_integers=False)),
    "min": _extreme(lax.pmin, jnp.min),
    "max": _extreme(lax.pmax, jnp.max),
}
BOOLEAN = {"sum": "max", "prod": "min", "min": "min", "max": "max"}  # or, and, and, or: as NumPy adds and multiplies


def _reduced(op: str, buffer: Array, transfer: Callable[[str, Array], Array]) -> Array:
    if buffer.dtype == jnp.bool_:
        return transfer(BOOLEAN[op], buffer.astype(jnp.uint8)).astype(jnp.bool_)
    return transfer(op, buffer.astype(accumulator(buffer.dtype))).astype(buffer.dtype)


def _moved(buffer: Array, transfer: Transfer) -> Array:
    """`transfer` on the bits of the buffer; of a complex one, on those of each half."""
    bits = to_bits(buffer)
    back = transfer(bits) if bits.ndim == 2 else jnp.stack([transfer(half) for half in bits])
    return from_bits(back, buffer.dtype)


def _scattered(op: str, buffer: Array) -> Array:
    """buffer[member, element] reduced, of which this member keeps its row."""
    # Over Gloo, reduce-scatter dies after 30 s whatever the timeout (jax#40831) and was wrong at 24 devices (#40830).
    if op in ("sum", "avg") and jax.default_backend() != "cpu":
        mine = lax.psum_scatter(buffer, AXIS)
        return (_divided(mine) if op == "avg" else mine)[None]
    return lax.dynamic_slice_in_dim(REDUCTIONS[op](buffer), lax.axis_index(AXIS), 1)


def _masked_sum(bits: Array, root: int) -> Array:
    """Row for row what `root` has: all others add zeros, and integers add without rounding."""
    return lax.psum(jnp.where(lax.axis_index(AXIS) == root, bits, jnp.zeros_like(bits)), AXIS)


# Each on one buffer[rows, element] of this replica, with the operation's own argument.
KERNELS: dict[str, Callable[[Array, Any], Array]] = {
    "allreduce": lambda x, op: _reduced(op, x, lambda kind, b: REDUCTIONS[kind](b)),
    "reduce_scatter": lambda x, op: _reduced(op, x, _scattered),
    "allgather": lambda x, _: _moved(x, lambda b: lax.all_gather(b[0], AXIS)),
    "broadcast": lambda x, root: _moved(x, lambda b: _masked_sum(b, root)),
    "all_to_all": lambda x, _: _moved(x, lambda b: lax.all_to_all(b, AXIS, 0, 0)),
    "scatter": lambda x, root: _moved(x, lambda b: lax.all_to_all(b, AXIS, 0, 0)[root][None]),
    "send": lambda x, root: _moved(x, lambda b: lax.ppermute(b, AXIS, [(root, 1 - root)])),
}
CHUNKED = ("reduce_scatter", "all_to_all", "scatter")  # dim 0 of what comes in is dealt to the members
REDUCING = ("allreduce", "reduce_scatter")  # the others only move


def _finish(name: str, argument: Any, members: int) -> Callable[[Part, tuple[int, ...]], Part]:
    """What shapes a part[rows', element] that came back, from the shape of the array that went in."""
    if name in ("reduce_scatter", "scatter"):
        return lambda part, shape: part.reshape(shape[0] // members, *shape[1:])
    if name == "allgather":

        def finish(part: Part, shape: tuple[int, ...]) -> Part:
            axis = argument % max(len(shape), 1)
            apart = part.reshape(members, *(shape or (1,)))
            dims = [*shape[:axis], members * (shape[axis] if shape else 1), *shape[axis + 1 :]]
            return (np if isinstance(part, np.ndarray) else jnp).moveaxis(apart, 0, axis).reshape(dims)

        return finish
    return lambda part, shape: part.reshape(shape)


@functools.cache
def ranks_mesh(members: tuple[int, ...]) -> Mesh:
    """The first device of each of these ranks, along AXIS."""
    first = {r: min((d for d in jax.devices() if d.process_index == r), key=lambda d: d.id) for r in members}
    return Mesh(np.array([first[r] for r in members]), (AXIS,))


@functools.cache
def _program(name: str, argument: Any, members: tuple[int, ...]) -> Any:
    def replica(buffers: list[Array]) -> list[Array]:
        return [KERNELS[name](b, argument) for b in buffers]

    spec = PartitionSpec(AXIS)
    # What comes out differs between members and is only looked at locally, so no dim is made for the axis.
    mapped = jax.shard_map(replica, mesh=ranks_mesh(members), in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
    return jax.jit(mapped)


def run(name: str, argument: Any, arrays: Sequence[Part], rank: int, members: tuple[int, ...]) -> list[Array]:
    """This rank's results of collective `name`, which every one of `members` runs at the same time.

    arrays: this rank's, of the same shapes and types as every member's. A rank is its first device.
    """
    mesh, rows, as_bytes = ranks_mesh(members), len(members) if name in CHUNKED else 1, name not in REDUCING
    device = mesh.devices.flat[members.index(rank)]
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    local = jax.device_put(pack(arrays, rows, device, as_bytes), device)
    whole = [jax.make_array_from_single_device_arrays((len(members) * rows, b.shape[1]), sharding, [b]) for b in local]
    back = [y.addressable_data(0) for y in _program(name, argument, members)(whole)]
    parts = unpack(back, arrays, rows, device, as_bytes, _finish(name, argument, len(members)))
    return jax.device_put(parts, device)
