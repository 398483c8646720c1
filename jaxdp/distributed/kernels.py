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

from jaxdp.distributed.packing import from_bits, fused, to_bits

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


def _reduce_into(op: str, rows: int, finish: Callable[[str, Array], Array]) -> Callable[..., list[Array]]:
    def run(arrays: list[Array]) -> list[Array]:
        out: list[Array] = [*arrays]
        for flag in (False, True):  # bool has another operation than the numbers
            mine = [i for i, x in enumerate(arrays) if (x.dtype == jnp.bool_) == flag]
            kind = BOOLEAN.get(op, op) if flag else op
            wide = [arrays[i].astype(jnp.uint8 if flag else accumulator(arrays[i].dtype)) for i in mine]
            for i, y in zip(mine, fused(lambda b, kind=kind: finish(kind, b), wide, rows)):  # type: ignore[misc]
                out[i] = y.astype(arrays[i].dtype)
        return out

    return run


def _scattered(op: str, buffer: Array) -> Array:
    """buffer[member, element] reduced, of which this member keeps its row."""
    # Over Gloo, reduce-scatter dies after 30 s whatever the timeout (jax#40831) and was wrong at 24 devices (#40830).
    if op in ("sum", "avg") and jax.default_backend() != "cpu":
        mine = lax.psum_scatter(buffer, AXIS)
        return (_divided(mine) if op == "avg" else mine)[None]
    return lax.dynamic_slice_in_dim(REDUCTIONS[op](buffer), lax.axis_index(AXIS), 1)


def _moved(
    transfer: Transfer, rows: int, arrays: list[Array], finish: Callable[[Array, tuple[int, ...]], Array]
) -> list[Array]:
    """Like `fused`, on bits. `finish(part, shape of the array)` shapes what came back; only then is it numbers again.

    Numbers are never copied: XLA's code for CPUs quiets a signaling NaN when it copies a bfloat16.
    """
    sent = [to_bits(x) for x in arrays]  # of a complex array two, so there is a list of them for each
    back = iter(fused(transfer, [part for parts in sent for part in parts], rows))
    return [from_bits([finish(next(back), x.shape) for _ in parts], x.dtype) for x, parts in zip(arrays, sent)]


def _whole(part: Array, shape: tuple[int, ...]) -> Array:
    return part.reshape(shape)


def _chunk(part: Array, shape: tuple[int, ...]) -> Array:
    return part.reshape(shape[0] // lax.axis_size(AXIS), *shape[1:])


def allreduce(arrays: list[Array], op: str) -> list[Array]:
    run = _reduce_into(op, 1, lambda kind, b: REDUCTIONS[kind](b))
    return [y.reshape(x.shape) for x, y in zip(arrays, run(arrays))]


def reduce_scatter(arrays: list[Array], op: str) -> list[Array]:
    n = lax.axis_size(AXIS)
    run = _reduce_into(op, n, _scattered)
    return [y.reshape(x.shape[0] // n, *x.shape[1:]) for x, y in zip(arrays, run(arrays))]


def allgather(arrays: list[Array], axis: int) -> list[Array]:
    def finish(part: Array, shape: tuple[int, ...]) -> Array:
        return jnp.concatenate(list(part.reshape(lax.axis_size(AXIS), *shape)), axis) if shape else part[:, 0]

    return _moved(lambda b: lax.all_gather(b[0], AXIS), 1, arrays, finish)


def broadcast(arrays: list[Array], root: int) -> list[Array]:
    def transfer(bits: Array) -> Array:  # all others add zeros, and integers add without rounding
        return lax.psum(jnp.where(lax.axis_index(AXIS) == root, bits, jnp.zeros_like(bits)), AXIS)

    return _moved(transfer, 1, arrays, _whole)


def all_to_all(arrays: list[Array]) -> list[Array]:
    return _moved(lambda b: lax.all_to_all(b, AXIS, 0, 0), lax.axis_size(AXIS), arrays, _whole)


def scatter(arrays: list[Array], root: int) -> list[Array]:
    return _moved(lambda b: lax.all_to_all(b, AXIS, 0, 0)[root][None], lax.axis_size(AXIS), arrays, _chunk)


def send(arrays: list[Array], root: int) -> list[Array]:
    """From member `root` of two to the other, which alone gets something."""
    return _moved(lambda b: lax.ppermute(b, AXIS, [(root, 1 - root)]), 1, arrays, _whole)


@functools.cache
def _mesh(members: tuple[int, ...]) -> Mesh:
    first = {r: min((d for d in jax.devices() if d.process_index == r), key=lambda d: d.id) for r in members}
    return Mesh(np.array([first[r] for r in members]), (AXIS,))


@functools.cache
def _program(kernel: Callable[..., list[Array]], members: tuple[int, ...], static: tuple[Any, ...]) -> Any:
    def replica(arrays: list[Array]) -> list[Array]:
        return kernel([x.reshape(x.shape[1:]) for x in arrays], *static)

    spec = PartitionSpec(AXIS)
    # Outputs differ between members and are only ever looked at locally; so no dim has to be made for the axis.
    mapped = jax.shard_map(replica, mesh=_mesh(members), in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
    return jax.jit(mapped)


def run(
    kernel: Callable[..., list[Array]],
    arrays: Sequence[Array | np.ndarray],
    rank: int,
    members: tuple[int, ...],
    *static: Any,
) -> list[Array]:
    """This rank's results of `kernel(arrays, *static)`, which every one of `members` runs at the same time.

    arrays: this rank's, of the same shapes and types as every member's. A rank is its first device.
    """
    mesh = _mesh(members)
    device = mesh.devices.flat[members.index(rank)]
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    local = jax.device_put([x[None] for x in arrays], device)
    whole = [jax.make_array_from_single_device_arrays((len(members), *x.shape[1:]), sharding, [x]) for x in local]
    return [y.addressable_data(0) for y in _program(kernel, members, static)(whole)]
