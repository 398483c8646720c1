"""Before a collective, its members compare what they bring: a difference would end in a C++ abort, or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.distributed import coordination
from jaxdp.errors import DistributedError, UsageError

Groups = Sequence[Sequence[int]] | None


@dataclass(frozen=True)
class Signature:
    """What a rank brings to a call. `arrays`: a type and a shape each; None where only the root's count."""

    op: str
    arrays: list[str] | None
    is_list: bool = False
    x64: bool = False
    error: str | None = None

    def __str__(self) -> str:
        arrays = "nothing" if self.arrays is None else ", ".join(self.arrays) or "no arrays"
        return f"{self.op} of {arrays}{' (x64 enabled)' if self.x64 else ''}"


def members_of(rank: int, size: int, groups: Groups) -> tuple[int, ...]:
    """The ranks that `rank` works with, in the order of its group; UsageError where `groups` are not disjoint ranks."""
    if groups is None:
        return tuple(range(size))
    try:
        listed = [r for group in groups for r in group]
    except TypeError:
        raise UsageError(f"groups={groups!r}: give lists of ranks, such as [[0, 1], [2, 3]]") from None
    outside = [r for r in listed if not (isinstance(r, int | np.integer) and 0 <= r < size)]
    if outside:
        raise UsageError(f"groups={groups}: {outside[0]} is not a rank; ranks run from 0 to {size - 1}")
    twice = [r for r in listed if listed.count(r) > 1]
    if twice:
        raise UsageError(f"groups={groups}: rank {twice[0]} is there twice; a rank belongs to one group at most")
    return next((tuple(map(int, group)) for group in groups if rank in group), (rank,))


def as_array(x: Any) -> jax.Array | np.ndarray:
    """x where it can be sent as it is; UsageError where JAX would change its type, or it is not this process's own."""
    if isinstance(x, jax.Array):
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise UsageError(f"an array of {x.dtype} cannot be sent: pass jax.random.key_data of it")
        if x.is_fully_addressable and len(x.devices()) == 1:
            return x
        if x.is_fully_replicated:
            return x.addressable_data(0)
        if x.is_fully_addressable:
            return np.asarray(x)
        raise UsageError(f"an array[{x.shape}] that is split over processes is no process's own: pass its local part")
    if isinstance(x, bool | int | float | complex):
        return jnp.asarray(x)
    array = np.asarray(x)
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool):
        raise UsageError(
            f"{type(x).__name__} of {array.dtype} cannot be sent: bring numbers, or a list of arrays of them"
        )
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise UsageError(
            f"{array.dtype} would be cut to {jax.dtypes.canonicalize_dtype(array.dtype)}: "
            "set JAX_ENABLE_X64=1, or cast the array yourself"
        )
    return array


def described(x: jax.Array | np.ndarray) -> str:
    """Type and shape, as in float32[4,2]."""
    return f"{x.dtype.name}[{','.join(map(str, x.shape))}]"


def zeros(text: str) -> np.ndarray:
    """Zeros of the type and shape that `described` gave."""
    name, _, dims = text[:-1].partition("[")
    return np.zeros([int(d) for d in dims.split(",") if d], jnp.dtype(name))


def compare(name: str, rank: int, members: tuple[int, ...], own: Signature, lead: int | None) -> Signature:
    """The signature of all members; with `lead` that member's, and the others may bring nothing."""
    texts = coordination.exchange(name, json.dumps(asdict(own)), rank, members, coordination.seconds())
    theirs = [Signature(**json.loads(t)) for t in texts]
    first = theirs[0 if lead is None else lead]
    for member, one in zip(members, theirs):
        if one.error:
            raise UsageError(f"rank {member}: {one.op}: {one.error}", rank=member)
    for one in theirs:
        free = lead is not None and one.arrays is None and (one.op, one.x64) == (first.op, first.x64)
        if one != first and not free:
            same = [m for m, s in zip(members, theirs) if s == one]
            others = [m for m, s in zip(members, theirs) if s == first]
            raise DistributedError(
                f"rank {_names(others)}: {first}; rank {_names(same)}: {one}: all ranks that take part must bring "
                "the same",
                rank=members[0],
            )
    return first


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
