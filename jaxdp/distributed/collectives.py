"""Eager collectives between processes, on one array or a list; what cannot work is an error on every rank, not a hang.

Every function takes an array or a list of arrays, NumPy's or JAX's, and gives jax.Arrays, of a list a list. A list
travels as one: by one transfer where it is only moved, by one for each element type where it is reduced. A rank is a
process, and its arrays live on its first device. `groups`, such as [[0, 1], [2, 3]], are disjoint sets of ranks that
each work by themselves, of any sizes; a rank in none works alone. What is only moved keeps its bits (-0.0, NaN
payloads). 64-bit NumPy arrays are refused unless jax_enable_x64 is set.

Before anything is sent, the ranks that take part compare what they bring. Raises UsageError where one rank's arguments
cannot work (on every member, naming that rank), DistributedError where the ranks disagree on operation, shapes or types
(naming the ranks and both sides), or where one does not come within JAXDP_TIMEOUT seconds (60).

The operations are those of NCCL, and of RAF (github.com/awslabs/raf), whose `rank_list` is `groups` here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.distributed import kernels
from jaxdp.distributed.context import current
from jaxdp.distributed.signature import Groups, Signature, as_array, compare, described, members_of, zeros
from jaxdp.errors import UsageError

Arrays = Any  # an array, or a list of arrays


def _call(
    label: str,
    name: str,
    argument: Any,
    x: Arrays,
    groups: Groups = None,
    check: Callable[[np.ndarray | jax.Array, int], str | None] = lambda x, n: None,
    lead: int | None = None,
    members: tuple[int, ...] | None = None,
) -> Any:
    """One collective: judge what this rank brings, compare, run. `lead`: the member whose arrays count, the root."""
    context = current()
    members = members_of(context.rank, context.size, groups) if members is None else members
    is_list = isinstance(x, list | tuple)
    arrays, error = None, None
    if lead is None or x is not None:
        try:
            arrays = [as_array(a) for a in (x if is_list else [x])]
            error = next(filter(None, (check(a, len(members)) for a in arrays)), None)
        except (UsageError, TypeError) as problem:
            error = str(problem)
    if lead is not None and members.index(context.rank) == lead and x is None:
        error = f"rank {context.rank} is the root and brings nothing"
    brought = None if arrays is None else [described(a) for a in arrays]
    own = Signature(label, brought, is_list, jax.dtypes.canonicalize_dtype(np.int64) == np.int64, error)
    agreed = compare("collective", context.rank, members, own, lead)
    if arrays is None:
        arrays = [zeros(text) for text in agreed.arrays or []]
    out = kernels.run(name, argument, arrays, context.rank, members)
    return out if agreed.is_list else out[0]


def _reducible(op: str) -> Callable[[Any, int], str | None]:
    def check(x: Any, members: int) -> str | None:
        if op not in kernels.REDUCTIONS:
            return f"op={op!r} is not one of {', '.join(kernels.REDUCTIONS)}"
        if op == "avg" and not jnp.issubdtype(x.dtype, jnp.inexact):
            return f"the average of {x.dtype} is not one: cast it to a float, or take the sum"
        if op in ("min", "max") and jnp.issubdtype(x.dtype, jnp.complexfloating):
            return f"{x.dtype} has no order"
        return None

    return check


def _divisible(x: Any, members: int) -> str | None:
    if x.ndim and x.shape[0] % members == 0:
        return None
    return f"dim 0 of {described(x)} cannot be split into {members} equal chunks, one for each rank"


def _rank(value: int, name: str) -> int:
    size = current().size
    if not (isinstance(value, int | np.integer) and 0 <= value < size):
        raise UsageError(f"{name}={value!r} is not a rank; ranks run from 0 to {size - 1}")
    return int(value)


def allreduce(x: Arrays, op: str = "sum", groups: Groups = None) -> Arrays:
    """x reduced over the ranks by op (sum, prod, min, max, avg), on every rank.

    Halves are reduced in float32 and rounded once; integers wrap around; bool is or (sum, max) and and (prod, min);
    NaN stays NaN. UsageError: avg of integers, min or max of complex numbers.
    """
    return _call(f"allreduce({op})", "allreduce", op, x, groups, _reducible(op))


def reduce(x: Arrays, root: int = 0, op: str = "sum") -> Arrays:
    """x reduced over all ranks by op, on rank `root`; the others get None (of a list, a list of None)."""
    root = _rank(root, "root")
    out = _call(f"reduce({op}, root={root})", "allreduce", op, x, None, _reducible(op))
    return _only(out, root)


def _only(out: Arrays, root: int) -> Arrays:
    if current().rank == root:
        return out
    return [None] * len(out) if isinstance(out, list) else None


def reduce_scatter(x: Arrays, op: str = "sum", groups: Groups = None) -> Arrays:
    """x[n * k, ...] reduced over the n ranks of the group, of which the i-th gets chunk i: [k, ...].

    UsageError where n does not divide dim 0. RAF's `reduce_scatter([x0, x1])`, which gives rank i the reduction of the
    i-th array, is `reduce_scatter(concatenate([x0, x1]))`; here a list is several arrays, each split.
    """
    check = lambda a, n: _reducible(op)(a, n) or _divisible(a, n)
    return _call(f"reduce_scatter({op})", "reduce_scatter", op, x, groups, check)


def allgather(x: Arrays, axis: int = 0, groups: Groups = None) -> Arrays:
    """The ranks' x one after the other along dim `axis`, on every rank; scalars become [n]."""
    return _call(f"allgather(axis={axis})", "allgather", axis, x, groups, _has_axis(axis))


def gather(x: Arrays, root: int = 0, axis: int = 0) -> Arrays:
    """The ranks' x one after the other along dim `axis`, on rank `root`; the others get None (a list of None)."""
    root = _rank(root, "root")
    out = _call(f"gather(axis={axis}, root={root})", "allgather", axis, x, None, _has_axis(axis))
    return _only(out, root)


def _has_axis(axis: int) -> Callable[[Any, int], str | None]:
    return lambda x, n: None if -max(x.ndim, 1) <= axis < max(x.ndim, 1) else f"{described(x)} has no dim {axis}"


def broadcast(x: Arrays, root: int = 0) -> Arrays:
    """Rank root's x, on every rank, bit for bit. The others may pass None; what they pass else must be alike."""
    root = _rank(root, "root")
    return _call(f"broadcast(root={root})", "broadcast", root, x, lead=root)


def scatter(x: Arrays, root: int = 0) -> Arrays:
    """Chunk r of rank root's x[n * k, ...], on rank r: [k, ...], bit for bit. The others may pass None."""
    root = _rank(root, "root")
    return _call(f"scatter(root={root})", "scatter", root, x, None, _divisible, lead=root)


def all_to_all(x: Arrays, groups: Groups = None) -> Arrays:
    """Chunk j of x[n * k, ...] goes to the group's j-th rank; the result[n * k, ...] has chunk i from its i-th rank."""
    return _call("all_to_all", "all_to_all", None, x, groups, _divisible)


def send(x: Arrays, dst: int) -> None:
    """x to rank dst, which calls `recv` of this rank; returns when it has done so.

    Two ranks that send to each other first wait for each other: let one receive first, or use `all_to_all`.
    """
    _pair(x, _rank(dst, "dst"), sends=True)


def recv(src: int) -> Arrays:
    """What rank src sends to this rank, bit for bit: an array, or a list where it sent one."""
    return _pair(None, _rank(src, "src"), sends=False)


def _pair(x: Arrays, peer: int, sends: bool) -> Arrays:
    rank = current().rank
    if peer == rank:
        raise UsageError(f"rank {rank} cannot {'send to' if sends else 'receive from'} itself")
    members = (min(rank, peer), max(rank, peer))
    sender = members.index(rank if sends else peer)
    label = f"send from rank {members[sender]} to rank {members[1 - sender]}"
    out = _call(label, "send", sender, x, lead=sender, members=members)
    return None if sends else out
