"""Before a collective, ranks compare what they bring: a difference would end in a C++ abort, a hang or in silence."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.distributed import membership
from jaxdp.errors import DistributedError, UsageError

Groups = Iterable[Iterable[int]] | None
Partition = tuple[tuple[int, ...], ...]  # every rank once, in groups; a rank in no group of the user's is one by itself


@dataclass(frozen=True)
class Signature:
    """What a rank brings to a call. `arrays`: a type and a shape each; None where only the root's count."""

    call: str
    arrays: list[str] | None = None
    is_list: bool = False
    error: str | None = None
    groups: str = ""
    x64: bool = field(default_factory=lambda: jax.dtypes.canonicalize_dtype(np.int64) == np.int64)

    def __str__(self) -> str:
        arrays = ", ".join(self.arrays or []) or "no arrays"
        return f"{self.call} of {'nothing' if self.arrays is None else 'a list of ' * self.is_list + arrays}"


def as_rank(value: Any, size: int) -> int:
    """Return `value` as a rank. Raises UsageError where it is not an integer from 0 to size - 1; True is none."""
    try:
        rank = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        rank = -1
    if not 0 <= rank < size:
        raise UsageError(f"{value!r} is not a rank; ranks run from 0 to {size - 1}")
    return rank


def partition(groups: Groups, size: int) -> Partition:
    """Return the groups in which `size` ranks work, sorted. Raises UsageError where `groups` are not disjoint ranks."""
    if groups is None:
        return (tuple(range(size)),)
    try:
        listed = [list(group) for group in groups]
    except TypeError:
        raise UsageError(f"groups={groups!r}: give lists of ranks, such as [[0, 1], [2, 3]]") from None
    try:
        parts = [tuple(as_rank(r, size) for r in group) for group in listed if group]
    except UsageError as error:
        raise UsageError(f"groups={listed}: {error}") from None
    seen: set[int] = set()
    for rank in (r for group in parts for r in group):
        if rank in seen:
            raise UsageError(f"groups={listed}: rank {rank} is there twice; a rank belongs to one group at most")
        seen.add(rank)
    return tuple(sorted([*parts, *((r,) for r in range(size) if r not in seen)]))


def group_of(rank: int, parts: Partition) -> tuple[int, ...]:
    return next(group for group in parts if rank in group)


def roots_of(root: Any, parts: Partition, size: int) -> tuple[int, ...]:
    """Return the root of each group. root: a rank, or one for each group; a rank that works alone is its own.

    Raises UsageError where one is not a rank, or a group has none of them or several.
    """
    try:
        given = {as_rank(r, size) for r in (root if isinstance(root, list | tuple) else [root])}
    except UsageError as error:
        raise UsageError(f"root={error}") from None
    inside = [given.intersection(group) if len(group) > 1 else set(group) for group in parts]
    for group, roots in zip(parts, inside):
        if len(roots) != 1:
            example = [group[0] for group in parts if len(group) > 1]
            raise UsageError(
                f"root={root}: group {[*group]} has {'several' if roots else 'none'} of these; give a rank of each, "
                f"such as root={example[0] if len(example) == 1 else example}"
            )
    return tuple(roots.pop() for roots in inside)


def shown(parts: Partition) -> str:
    """Return what a message says of groups; those of one rank are left out."""
    all_together = len(parts) == 1 and parts == partition(None, len(parts[0]))
    return " without groups" if all_together else f" in groups {[[*group] for group in parts if group[1:]]}"


def as_array(x: Any) -> jax.Array | np.ndarray:
    """x where it can be sent as it is; UsageError where JAX would change its type, or it is not this process's own."""
    if isinstance(x, jax.core.Tracer):
        raise UsageError("called inside jit, pmap or shard_map, where processes cannot meet: use jaxdp.lax there")
    if isinstance(x, jax.Array):
        if x.is_deleted():
            raise UsageError(f"the array {described(x)} was donated or deleted: pass a copy made before")
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise UsageError(f"an array of {x.dtype} cannot be sent: pass jax.random.key_data of it")
        if x.is_fully_addressable and len(x.devices()) == 1:
            return x
        if x.is_fully_replicated:
            return x.addressable_data(0)
        if x.is_fully_addressable:
            return np.asarray(x)
        raise UsageError(
            f"an array {described(x)} that is split over processes is no process's own: pass its local part"
        )
    if isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic):
        number = jnp.asarray(x)
        if np.isfinite(x) and not np.isfinite(number):
            raise UsageError(f"{x} is too large for {number.dtype}: set JAX_ENABLE_X64=1, or scale it")
        return number
    if isinstance(x, list | tuple | np.ma.MaskedArray):
        raise UsageError(f"a {type(x).__name__} cannot be sent as one array: bring arrays, or one flat list of them")
    array = np.asarray(x)
    array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
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


def compare(
    name: str,
    rank: int,
    members: Sequence[int],
    own: Signature,
    parts: Partition | None = None,
    roots: Sequence[int] | None = None,
) -> Signature:
    """Exchange signatures between `members` and return that of this rank's group; every member raises what one does.

    All must make the same call; arrays must be alike within each of the `parts`. With `roots`, the root's arrays count,
    and the others of its group may bring none.
    """
    texts, timeout = [json.dumps(asdict(own))], membership.default_timeout()
    if len(members) > 1:
        texts = membership.joined().exchange(name, texts[0], members, timeout)
    known = {text: Signature(**json.loads(text)) for text in dict.fromkeys(texts)}
    theirs = {member: known[text] for member, text in zip(members, texts)}
    for member, one in theirs.items():
        if one.error:
            raise UsageError(f"rank {member}: {one.call}: {one.error}", rank=member)
    _check_same(theirs, lambda one: f"{one.call}{' (x64 enabled)' * one.x64}{one.groups}", members[0])
    for i, group in enumerate(parts or (tuple(members),)):
        free = {m for m in group if roots is not None and m != roots[i] and theirs[m].arrays is None}
        _check_same({m: theirs[m] for m in group if m not in free}, str, members[0])
        if rank in group:
            agreed = theirs[group[0] if roots is None else roots[i]]
    return agreed


def _check_same(theirs: dict[int, Signature], side: Callable[[Signature], str], speaker: int) -> None:
    sides: dict[str, list[int]] = {}
    for rank, one in theirs.items():
        sides.setdefault(side(one), []).append(rank)
    if len(sides) > 1:
        text = "; ".join(f"rank {', '.join(map(str, ranks))}: {side}" for side, ranks in [*sides.items()][:4])
        raise DistributedError(f"{text}: all ranks that take part must bring the same", rank=speaker)
