"""Eager collectives between processes, on one array or a list. A mismatch raises an error on every
rank: no hang.

Every function takes an array or a list of arrays, of NumPy or JAX, and returns a jax.Array or a
list of them. A list is sent in one transfer, or if it is reduced, in one transfer for each element
type. A rank is a process, and its arrays live on its first device. Operations without arithmetic
preserve the bits (-0.0, NaN payloads). 64-bit NumPy arrays are refused unless jax_enable_x64 is
set; Python's numbers become int32, float32 and complex64, as in JAX.

`groups`, such as [[0, 1], [2, 3]], are disjoint lists of ranks that work independently, of any
size; the order of ranks is that of their results. A rank in no group works alone. **All ranks of
the job make the same call with the same groups**, even ranks in no group. `root` is a rank of the
job, or with several groups, a list with one rank of each.

Before anything is sent, all ranks compare their arguments. Raises UsageError on every rank if one
rank's arguments are invalid (naming that rank), and DistributedError if ranks disagree on
operation, groups, shapes or types (naming the ranks and their versions), or if one does not call
within JAXDP_TIMEOUT seconds (60).

The operations are those of NCCL, and of RAF (github.com/awslabs/raf): see `docs/coming_from.md#collectives`.
That page also lists the calls of `jax.lax` to use inside jit, pmap and shard_map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp.errors import UsageError, one_line
from jaxdp.interop import kernels
from jaxdp.process.context import joined
from jaxdp.process.signature import (
    Groups,
    Partition,
    Signature,
    as_array,
    as_rank,
    compare,
    described,
    group_of,
    has_dim,
    partition,
    roots_of,
    shown,
    zeros,
)

Arrays = Any  # an array, or a list of arrays
Part = np.ndarray | jax.Array
Root = int | Sequence[int]


def _call(
    name: str,
    x: Arrays,
    groups: Groups = None,
    root: Root | None = None,
    *,
    kernel: str = "",
    op: str = "",
    axes: Mapping[str, int] | None = None,
    stack: bool = False,
    pair: tuple[int, int] | None = None,
) -> Any:
    """Check this rank's arguments, compare them with those of the other ranks, transfer.

    kernel: a key of `kernels.KERNELS`; by default `name`. axes: {argument: the dim to split or to
    join}, in this order if there are both; by default 0. stack: x is a list with one array for each
    rank of the group, sent as one array. pair: the two ranks of a send, of which the root sends;
    None if all ranks take part.
    """
    context, kernel = joined(), kernel or name
    dims = list((axes or {"axis": 0}).items())
    (split_name, split), (join_name, join) = dims[0], dims[-1]
    members = tuple(range(context.size)) if pair is None else pair
    parts: Partition = (members,)
    roots: tuple[int, ...] = ()
    arrays, error, reduces = None, None, kernel in kernels.REDUCING
    words = [str(op)] * reduces + [f"{key}={axis}" for key, axis in (axes or {}).items()]
    words += ["per_rank"] * stack
    is_list, from_root = isinstance(x, list | tuple) and not stack, kernel in kernels.FROM_ROOT
    try:
        if pair is None:
            parts = partition(groups, context.size)
        group = group_of(context.rank, parts)
        if root is not None or from_root:
            roots = roots_of(root, parts, context.size)
            named = [r for r, members in zip(roots, parts) if members[1:]]
            words.append(f"root={named[0] if len(named) == 1 else named}")
        if x is not None or not from_root or context.rank in roots:
            arrays = [as_array(a) for a in (x if isinstance(x, list | tuple) else [x])]
            arrays = [_stacked(arrays, len(group))] if stack else arrays
            if reduces:
                kernels.check_op(op, [a.dtype for a in arrays])
            if kernel in kernels.CHUNKED:
                _check_axis(arrays, split, split_name, len(group))
            if kernel in kernels.JOINED:
                _check_axis(arrays, join, join_name)
    except (
        Exception
    ) as problem:  # any exception: the other ranks must receive it, or they would wait
        error = one_line(problem)
    types = None if arrays is None else [described(a) for a in arrays]
    call = name if pair else f"{name}({', '.join(words)})"
    signature = Signature(call, types, is_list, error, "" if pair else shown(parts))
    agreed = compare(context.rank, members, signature, parts, roots if from_root else None)
    arrays = [zeros(text) for text in agreed.arrays or []] if arrays is None else arrays
    argument = group.index(roots[parts.index(group)]) if from_root else op
    out = kernels.run(kernel, argument, arrays, context.rank, group, split, join)
    if roots and not from_root and context.rank not in roots:
        return [None] * len(out) if is_list else None
    return out if agreed.is_list else out[0]


def _stacked(arrays: list[Part], n: int) -> Part:
    if len(arrays) != n or len({described(a) for a in arrays}) != 1:
        texts = ", ".join(described(a) for a in arrays)
        raise UsageError(
            f"per_rank takes {n} arrays of one type and shape, one for each rank of the group; got {texts}"
        )
    return np.stack([np.asarray(a) for a in arrays])


def _check_axis(arrays: list[Part], axis: int, name: str, chunks: int = 0) -> None:
    """Check that every array has dim `axis`, and that it is that many equal chunks. 0: it is not
    split, and a scalar counts as one of dim 0.
    """
    for a in arrays:
        if not has_dim(axis, a.ndim if chunks else max(a.ndim, 1)):
            raise UsageError(f"{name}={axis!r}: {described(a)} has no dim {axis!r}")
        if chunks and a.shape[axis] % chunks:
            raise UsageError(
                f"dim {axis} of {described(a)} cannot be split into {chunks} equal chunks, one a rank"
            )


def allreduce(x: Arrays, op: str = "sum", groups: Groups = None) -> Arrays:
    """Reduce x over the ranks by op (sum, prod, min, max, avg); every rank gets the result.

    Floats below 32 bits are reduced in float32 and rounded once; integers wrap around; for bool,
    sum and max are `or`, prod and min are `and`; NaN stays NaN. Raises UsageError for avg of
    integers, min or max of complex numbers."""
    return _call("allreduce", x, groups, op=op)


def reduce(x: Arrays, root: Root = 0, op: str = "sum", groups: Groups = None) -> Arrays:
    """Reduce x over the ranks by op; `root` gets the result, the others None (for a list, a list of
    None).
    """
    return _call("reduce", x, groups, root, kernel="allreduce", op=op)


def reduce_scatter(
    x: Arrays, op: str = "sum", groups: Groups = None, per_rank: bool = False
) -> Arrays:
    """Reduce x[n * k, ...] over the n ranks of a group; the i-th of them gets chunk i of the
    result: [k, ...].

    In a list, each array is split. per_rank: a list has one array for each rank instead, all of one
    shape, and the i-th rank gets the reduction of the i-th, as in RAF's `reduce_scatter` of a list.
    Raises UsageError if n does not divide dim 0, or with per_rank, if there are not n arrays.
    """
    out = _call("reduce_scatter", x, groups, op=op, stack=per_rank)
    return out[0] if per_rank else out


def allgather(x: Arrays, axis: int = 0, groups: Groups = None) -> Arrays:
    """Concatenate the ranks' x along dim `axis`, in the order of the group, on every rank; scalars
    become [n].
    """
    return _call("allgather", x, groups, axes={"axis": axis})


def gather(x: Arrays, root: Root = 0, axis: int = 0, groups: Groups = None) -> Arrays:
    """Concatenate the ranks' x along dim `axis` on rank `root`; the others get None (for a list, a
    list of None).
    """
    return _call("gather", x, groups, root, kernel="allgather", axes={"axis": axis})


def broadcast(x: Arrays, root: Root = 0, groups: Groups = None) -> Arrays:
    """Send the root's x to every rank, bit for bit. The others pass None, or arrays of the same
    shapes and types.
    """
    return _call("broadcast", x, groups, root)


def scatter(x: Arrays, root: Root = 0, groups: Groups = None) -> Arrays:
    """Send chunk i of the root's x[n * k, ...] to the i-th rank: [k, ...], bit for bit. The others
    may pass None.
    """
    return _call("scatter", x, groups, root)


def all_to_all(
    x: Arrays, split_axis: int = 0, concat_axis: int = 0, groups: Groups = None
) -> Arrays:
    """Send chunk j of x to the group's j-th rank; concatenate the received chunks in the order of
    their ranks.

    x is split into n equal chunks along dim `split_axis`; received chunks are joined along dim
    `concat_axis`."""
    return _call(
        "all_to_all", x, groups, axes={"split_axis": split_axis, "concat_axis": concat_axis}
    )


def send(x: Arrays, dst: int) -> None:
    """Send x to rank dst, and return when it has received it with `recv`.

    Two ranks that both send to each other first deadlock: let one receive first, or use
    `all_to_all`."""
    _pair(x, "dst", dst)


def recv(src: int) -> Arrays:
    """Receive from rank src, bit for bit: an array, or a list if it sent one."""
    return _pair(None, "src", src)


def _pair(x: Arrays, name: str, value: int) -> Arrays:
    context, sends = joined(), name == "dst"
    peer = as_rank(value, context.size, f"{name}=")
    if peer == context.rank:
        raise UsageError(f"rank {peer} cannot {'send to' if sends else 'receive from'} itself")
    sender, receiver = (context.rank, peer) if sends else (peer, context.rank)
    pair = (min(sender, receiver), max(sender, receiver))
    name = f"send from rank {sender} to rank {receiver}"
    out = _call(name, x, root=sender, kernel="send", pair=pair)
    return None if sends else out
