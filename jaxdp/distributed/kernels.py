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


# What each operation does to one buffer of accumulators; bool goes as 0 and 1.
REDUCTIONS: dict[str, Transfer] = {
    "sum": lambda x: lax.psum(x, AXIS),
    "avg": lambda x: lax.psum(x, AXIS) / lax.axis_size(AXIS),
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
        return (mine / lax.axis_size(AXIS) if op == "avg" else mine)[None]
    return lax.dynamic_slice_in_dim(REDUCTIONS[op](buffer), lax.axis_index(AXIS), 1)


def _moved(transfer: Transfer, rows: int, arrays: list[Array]) -> list[Array]:
    """Like `fused`, on bits: per array its part [rows', element...], in its own type."""
    back = fused(transfer, [to_bits(x) for x in arrays], rows)
    out = []
    for x, y in zip(arrays, back):
        tail = (2,) if jnp.issubdtype(x.dtype, jnp.complexfloating) else ()
        columns = y.shape[1] // 2 if tail else y.shape[1]
        out.append(from_bits(y.reshape(y.shape[0], columns, *tail), x.dtype))
    return out


def allreduce(arrays: list[Array], op: str) -> list[Array]:
    run = _reduce_into(op, 1, lambda kind, b: REDUCTIONS[kind](b))
    return [y.reshape(x.shape) for x, y in zip(arrays, run(arrays))]


def reduce_scatter(arrays: list[Array], op: str) -> list[Array]:
    n = lax.axis_size(AXIS)
    run = _reduce_into(op, n, _scattered)
    return [y.reshape(x.shape[0] // n, *x.shape[1:]) for x, y in zip(arrays, run(arrays))]


def allgather(arrays: list[Array], axis: int) -> list[Array]:
    parts = _moved(lambda b: lax.all_gather(b[0], AXIS), 1, arrays)
    out = []
    for x, y in zip(arrays, parts):
        stacked = y.reshape(lax.axis_size(AXIS), *x.shape)
        out.append(jnp.concatenate(list(stacked), axis) if x.ndim else stacked)
    return out


def broadcast(arrays: list[Array], root: int) -> list[Array]:
    def transfer(bits: Array) -> Array:  # all others add zeros, and integers add without rounding
        return lax.psum(jnp.where(lax.axis_index(AXIS) == root, bits, jnp.zeros_like(bits)), AXIS)

    return [y.reshape(x.shape) for x, y in zip(arrays, _moved(transfer, 1, arrays))]


def all_to_all(arrays: list[Array]) -> list[Array]:
    n = lax.axis_size(AXIS)
    return [y.reshape(x.shape) for x, y in zip(arrays, _moved(lambda b: lax.all_to_all(b, AXIS, 0, 0), n, arrays))]


def scatter(arrays: list[Array], root: int) -> list[Array]:
    n = lax.axis_size(AXIS)
    parts = _moved(lambda b: lax.all_to_all(b, AXIS, 0, 0)[root][None], n, arrays)
    return [y.reshape(x.shape[0] // n, *x.shape[1:]) for x, y in zip(arrays, parts)]


def send(arrays: list[Array], root: int) -> list[Array]:
    """From member `root` of two to the other, which alone gets something."""
    parts = _moved(lambda b: lax.ppermute(b, AXIS, [(root, 1 - root)]), 1, arrays)
    return [y.reshape(x.shape) for x, y in zip(arrays, parts)]


@functools.cache
def _mesh(members: tuple[int, ...]) -> Mesh:
    first = {r: min((d for d in jax.devices() if d.process_index == r), key=lambda d: d.id) for r in members}
    return Mesh(np.array([first[r] for r in members]), (AXIS,))


@functools.cache
def _program(kernel: Callable[..., list[Array]], members: tuple[int, ...], static: tuple[Any, ...]) -> Any:
    def replica(arrays: list[Array]) -> list[Array]:
        return kernel([x[0] for x in arrays], *static)

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
