"""Compiled collectives: functions of one replica's buffers, run with shard_map over the
participating ranks only.

Many arrays are packed into few buffers: one for each element type to reduce them, one of raw bytes
to move them. Packing is done outside the compiled program: XLA on CPU takes 8 s to compile a
concatenation of 400 arrays, and its copies of a bfloat16 quiet signaling NaNs. NumPy copies bytes.
Only a single array on another platform is not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp.errors import UsageError
from jaxdp.precision import is_narrow
from jaxdp.process import membership
from jaxdp.process.context import current
from jaxdp.process.enter import cached

Part = Any  # an array of NumPy or of JAX


def _of_one_type(arrays: Sequence[Part]) -> list[list[int]]:
    """Return the indices of the arrays of each type."""
    types: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        types.setdefault(x.dtype, []).append(i)
    return list(types.values())


def own_collectives() -> Any:
    """Return the collectives of another backend than JAX, or None."""
    member = membership.current()
    return member and member.collectives


def pack(arrays: Sequence[Part], rows: int, as_bytes: bool) -> list[Part]:
    """Return buffers[rows, element]; dim 0 of each array is split over the rows. as_bytes: one
    buffer, of uint32.

    The buffers are copies, since JAX may read the memory while the caller writes to the arrays.
    """
    flat = [np.ascontiguousarray(x).reshape(rows, x.size // rows) for x in arrays]
    if flat and as_bytes:
        flat = [x.view(np.uint8) for x in flat]
        padding = np.zeros((rows, -sum(x.shape[1] for x in flat) % 4), np.uint8)
        return [np.concatenate([*flat, padding], 1).view(np.uint32)]
    return [np.concatenate([flat[i] for i in indices], 1) for indices in _of_one_type(flat)]


def unpack(
    buffers: Sequence[Array], arrays: Sequence[Part], rows: int, as_bytes: bool
) -> list[Part]:
    """Return part[rows', element] for each of the `arrays` that were packed in `rows` rows."""
    out: list[Part] = [None] * len(arrays)
    groups = [range(len(arrays))] if as_bytes else _of_one_type(arrays)
    for buffer, indices in zip(buffers, groups):
        source = np.asarray(buffer)
        source = source.view(np.uint8) if as_bytes else source
        widths = [(arrays[i].nbytes if as_bytes else arrays[i].size) // rows for i in indices]
        for i, part in zip(indices, np.split(source, np.cumsum(widths), 1)):
            out[i] = np.ascontiguousarray(part).view(arrays[i].dtype)
    return out


def to_bits(x: Array) -> Array:
    """Return the bits of x[...] as unsigned integers of its width, those of float32 for numbers of
    less than 8 bits; of a complex x, those of the imaginary part follow in the last dim."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.concatenate([to_bits(x.real), to_bits(x.imag)], -1)
    x = x.astype(jnp.float32) if _is_narrow(x.dtype) else x
    return x.view(f"uint{8 * x.dtype.itemsize}")


def from_bits(bits: Array, dtype: Any) -> Array:
    """Invert `to_bits`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(*jnp.split(bits.view(jnp.finfo(dtype).dtype), 2, -1))
    return bits.view(jnp.float32).astype(dtype) if _is_narrow(dtype) else bits.view(dtype)


def _is_narrow(dtype: Any) -> bool:
    """Return whether a number of this type has less than 8 bits; then float32 has its values, and
    its -0.0.
    """
    return jax.dtypes.itemsize_bits(dtype) < 8


AXIS = "rank"
Transfer = Callable[[Array], Array]  # buffer[rows, element] -> buffer[rows', element]
Replica = Callable[[Sequence[Array]], list[Array]]


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype to reduce in: 32 bits for smaller floats and integers, which round or wrap
    at the end.
    """
    if is_narrow(dtype):
        return jnp.dtype(jnp.float32)
    if jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4:
        return jnp.dtype(jnp.int32)
    return dtype


def _divided(total: Array) -> Array:
    """Divide by the number of members. XLA would multiply by the reciprocal of a scalar, which
    rounds 5/3 wrongly.
    """
    return total / lax.optimization_barrier(jnp.full_like(total, lax.axis_size(AXIS)))


def _product(x: Array) -> Array:
    """Gather and multiply in rank order: no backend has a native product."""
    return jnp.prod(lax.all_gather(x, AXIS), 0, promote_integers=False)


# op -> accumulator -> result; bool is reduced as 0 and 1.
REDUCTIONS: dict[str, Transfer] = {
    "sum": lambda x: lax.psum(x, AXIS),
    "avg": lambda x: _divided(lax.psum(x, AXIS)),
    "prod": _product,
    "min": lambda x: lax.pmin(x, AXIS),
    "max": lambda x: lax.pmax(x, AXIS),
}
# Of booleans: or, and, and, or, as NumPy adds and multiplies them.
BOOLEAN = {"sum": "max", "prod": "min", "min": "min", "max": "max"}


def check_op(op: str, dtypes: Iterable[Any]) -> None:
    """Raise UsageError if the operation does not exist, or not for one of these dtypes."""
    if op not in [*REDUCTIONS]:  # of another type, too
        raise UsageError(f"op={op!r} is not one of {', '.join(REDUCTIONS)}")
    for dtype in dtypes:
        if op == "avg" and not jnp.issubdtype(dtype, jnp.inexact):
            raise UsageError(
                f"the average of {dtype} is a fraction: cast it to a float, or take the sum"
            )
        if op in ("min", "max") and jnp.issubdtype(dtype, jnp.complexfloating):
            raise UsageError(f"{dtype} has no order: op={op!r} is for real numbers")


def reduced(op: str, x: Part, transfer: Callable[[str, Part], Part]) -> Part:
    """Run `transfer(op, x)` in the accumulator's dtype and cast the result back; a min or max is NaN
    if a member's number is, which Gloo drops, and of which MPI says nothing.
    """
    if x.dtype == jnp.bool_:
        return transfer(BOOLEAN[op], x.astype(jnp.uint8)).astype(jnp.bool_)
    wide = x.astype(accumulator(x.dtype))
    if op not in ("min", "max") or not jnp.issubdtype(wide.dtype, jnp.inexact):
        return transfer(op, wide).astype(x.dtype)
    library = wide.__array_namespace__()
    is_nan = library.isnan(wide)
    best = transfer(op, library.where(is_nan, 0, wide))
    any_nan = transfer("max", is_nan.astype(jnp.int32)) > 0
    return library.where(any_nan, jnp.nan, best).astype(x.dtype)


def scattered(op: str, x: Array) -> Array:
    """Reduce x[member, ...] and return the current member's row."""
    # Over Gloo, reduce-scatter dies after 30 s whatever the timeout (jax#40831) and was wrong at 24
    # devices (#40830).
    if op in ("sum", "avg") and jax.default_backend() != "cpu":
        row = lax.psum_scatter(x, AXIS)
        return _divided(row) if op == "avg" else row
    return lax.dynamic_index_in_dim(REDUCTIONS[op](x), lax.axis_index(AXIS), keepdims=False)


def moved(buffer: Array, transfer: Transfer) -> Array:
    """Apply `transfer` to the bits of the buffer."""
    return from_bits(transfer(to_bits(buffer)), buffer.dtype)


def _masked_sum(bits: Array, root: int) -> Array:
    """Return `root`'s bits: all other ranks add zeros, and integers add without rounding."""
    return lax.psum(jnp.where(lax.axis_index(AXIS) == root, bits, jnp.zeros_like(bits)), AXIS)


# name -> (buffer[rows, element] of this replica, op or root) -> buffer
KERNELS: dict[str, Callable[[Array, Any], Array]] = {
    "allreduce": lambda x, op: reduced(op, x, lambda kind, b: REDUCTIONS[kind](b)),
    "reduce_scatter": lambda x, op: reduced(op, x, lambda kind, b: scattered(kind, b)[None]),
    "allgather": lambda x, _: moved(x, lambda b: lax.all_gather(b[0], AXIS)),
    "broadcast": lambda x, root: moved(x, lambda b: _masked_sum(b, root)),
    "all_to_all": lambda x, _: moved(x, lambda b: lax.all_to_all(b, AXIS, 0, 0)),
    "scatter": lambda x, root: moved(x, lambda b: lax.all_to_all(b, AXIS, 0, 0)[root][None]),
    "send": lambda x, root: moved(x, lambda b: lax.ppermute(b, AXIS, [(root, 1 - root)])),
}
CHUNKED = ("reduce_scatter", "all_to_all", "scatter")  # split a dim of the input over the members
JOINED = ("allgather", "all_to_all")  # concatenate the members' parts along a dim
FROM_ROOT = ("broadcast", "scatter", "send")
REDUCING = ("allreduce", "reduce_scatter")  # the others only move bits


def _split(x: Part, members: int, axis: int) -> Part:
    """Reshape x[..., n * k, ...] to [n, ..., k, ...]."""
    library = x.__array_namespace__()
    return library.stack(library.split(x, members, axis))


def _join(part: Part, members: int, shape: tuple[int, ...], axis: int) -> Part:
    """Concatenate part[n, element], the members' arrays of `shape`, to [..., n * k, ...]; scalars
    become [n].
    """
    library = part.__array_namespace__()
    return library.concatenate(part.reshape(members, *(shape or (1,))), axis)


def compiled(replica: Replica, members: tuple[int, ...]) -> Replica:
    """Return a function of this rank's arrays[rows, ...] on its first device, all of whose members
    call it together: it runs `replica` on each, and returns this rank's results.
    """
    mesh = Mesh(np.array([jax.local_devices(rank)[0] for rank in members]), (AXIS,))
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    # Results differ between members, but only the local shard is read, so the output needs no dim
    # for the axis.
    program = jax.jit(
        jax.shard_map(
            replica,
            mesh=mesh,
            in_specs=sharding.spec,
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )

    def call(local: Sequence[Array]) -> list[Array]:
        sharded = [
            jax.make_array_from_single_device_arrays(
                (len(members) * x.shape[0], *x.shape[1:]), sharding, [x]
            )
            for x in local
        ]
        return [y.addressable_data(0) for y in program(sharded)]

    return call


@cached
def _program(name: str, argument: Any, members: tuple[int, ...]) -> Replica:
    return compiled(lambda buffers: [KERNELS[name](b, argument) for b in buffers], members)


def run(
    name: str,
    argument: Any,
    arrays: Sequence[Part],
    rank: int,
    members: tuple[int, ...],
    split: int = 0,
    join: int = 0,
) -> list[Array]:
    """Run collective `name` on all `members` together, and return this rank's results.

    argument: the operation of a reduction, or the index of the root in `members`. arrays: this
    rank's, of the same shapes and dtypes as every member's. split, join: the dims along which to
    split the input and join the parts. Each rank uses its first device.
    """
    n, as_bytes, chunked = len(members), name not in REDUCING, name in CHUNKED
    device = jax.local_devices()[0]
    own = own_collectives()
    # A single array needs no packing, and stays on its device: a copy to the host is slow.
    stays = len(arrays) == 1 and device.platform != "cpu" and (not own or own.on_device)
    if not stays:
        arrays = [np.asarray(x) for x in arrays]
    if chunked:
        arrays = [_split(x, n, split) for x in arrays]
    rows = n if chunked else 1
    if stays:
        buffers = [jnp.reshape(x, (rows, x.size // rows)) for x in arrays]
    else:
        buffers = pack(arrays, rows, as_bytes)
    if own:
        results = own.run(name, argument, buffers, members)
    else:
        local, program = jax.device_put(buffers, device), _program(name, argument, members)
        if device.platform == "cpu":  # the results are read here
            results = current().compute(lambda: program(local))
        else:
            results = program(local)
    parts = results if stays else unpack(results, arrays, rows, as_bytes)
    shapes = [x.shape[1:] if chunked else x.shape for x in arrays]
    if name in JOINED:
        parts = [_join(part, n, shape, join) for part, shape in zip(parts, shapes)]
    else:
        parts = [part.reshape(shape) for part, shape in zip(parts, shapes)]
    return jax.device_put(parts, device)
