"""Compare the ranks' arguments before a collective: a mismatch would end in a C++ abort, a hang or
wrong results.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.errors import DistributedError, UsageError
from jaxdp.process import hosts, membership, protocol

Groups = Iterable[Iterable[int]] | None
# Groups with every rank once; a rank in none of the user's is a group of one.
Partition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Signature:
    """A rank's arguments of a collective. arrays: dtype and shape of each, see `described`; None if
    passed as None.
    """

    call: str
    arrays: list[str] | None = None
    is_list: bool = False
    error: str | None = None
    groups: str = ""
    x64: bool = field(default_factory=lambda: jax.dtypes.canonicalize_dtype(np.int64) == np.int64)

    def __str__(self) -> str:
        arrays = ", ".join(self.arrays or []) or "no arrays"
        return f"{self.call} of {'nothing' if self.arrays is None else 'a list of ' * self.is_list + arrays}"


def as_rank(value: Any, size: int, title: str) -> int:
    """Return `value` as a rank. Raises UsageError if it is not an integer from 0 to size - 1, or is
    a bool. title: the beginning of the message, such as "root=".
    """
    try:
        rank = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        rank = -1
    if not 0 <= rank < size:
        raise UsageError(f"{title}{value!r} is not a rank; ranks run from 0 to {size - 1}")
    return rank


def partition(groups: Groups, size: int) -> Partition:
    """Return the groups of all `size` ranks, sorted. Raises UsageError if `groups` are not disjoint
    lists of ranks.
    """
    if groups is None:
        return (tuple(range(size)),)
    try:
        listed = [list(group) for group in groups]
    except TypeError:
        raise UsageError(
            f"groups={groups!r}: give lists of ranks, such as [[0, 1], [2, 3]]"
        ) from None
    title = f"groups={listed}: "
    parts = [tuple(as_rank(r, size, title) for r in group) for group in listed if group]
    seen: set[int] = set()
    for rank in (r for group in parts for r in group):
        if rank in seen:
            raise UsageError(
                f"{title}rank {rank} appears twice; a rank belongs to one group at most"
            )
        seen.add(rank)
    return tuple(sorted([*parts, *((r,) for r in range(size) if r not in seen)]))


def group_of(rank: int, parts: Partition) -> tuple[int, ...]:
    return next(group for group in parts if rank in group)


def roots_of(root: Any, parts: Partition, size: int) -> tuple[int, ...]:
    """Return the root of each group. root: a rank, or one for each group; a rank that works alone
    is its own root.

    Raises UsageError if one is not a rank, or if a group contains none of them or several.
    """
    candidates = {
        as_rank(r, size, "root=") for r in (root if isinstance(root, list | tuple) else [root])
    }
    by_group = [candidates.intersection(group) if len(group) > 1 else set(group) for group in parts]
    for group, roots in zip(parts, by_group):
        if len(roots) != 1:
            example = [group[0] for group in parts if len(group) > 1]
            raise UsageError(
                f"root={root}: group {[*group]} has {'several' if roots else 'none'} of these; give a rank of each, "
                f"such as root={example[0] if len(example) == 1 else example}"
            )
    return tuple(roots.pop() for roots in by_group)


def shown(parts: Partition) -> str:
    """Describe groups for an error message, without those of one rank."""
    all_together = len(parts) == 1 and parts == partition(None, len(parts[0]))
    return (
        " without groups"
        if all_together
        else f" in groups {[[*group] for group in parts if group[1:]]}"
    )


def has_dim(axis: Any, dims: int) -> bool:
    """Return whether `axis` is an integer, but no bool, that names one of so many dims."""
    return (
        not isinstance(axis, bool)
        and hasattr(axis, "__index__")
        and -dims <= operator.index(axis) < dims
    )


def native(x: Any) -> np.ndarray:
    """Return x as a NumPy array in this machine's byte order."""
    array = np.asarray(x)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def as_array(x: Any) -> jax.Array | np.ndarray:
    """Return x as an array to send. Raises UsageError if JAX would change its dtype, or if x spans
    processes.
    """
    if isinstance(x, jax.core.Tracer):
        raise UsageError(
            "called inside jit, pmap or shard_map, where processes cannot meet: use jax.lax there"
        )
    if isinstance(x, jax.Array):
        if x.is_deleted():
            raise UsageError(
                f"the array {described(x)} was donated or deleted: pass a copy made before"
            )
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise UsageError(
                f"an array of {x.dtype} cannot be sent: pass jax.random.key_data of it"
            )
        if x.is_fully_addressable and len(x.devices()) == 1:
            return x
        if x.is_fully_replicated:
            return x.addressable_data(0)
        if x.is_fully_addressable:
            return np.asarray(x)
        raise UsageError(
            f"the array {described(x)} is sharded over several processes: pass its local part"
        )
    if isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic):
        number = jnp.asarray(x)
        if np.isfinite(x) and not np.isfinite(number):
            raise UsageError(
                f"{x} is too large for {number.dtype}: set JAX_ENABLE_X64=1, or scale it"
            )
        return number
    if isinstance(x, list | tuple | np.ma.MaskedArray):
        raise UsageError(
            f"a {type(x).__name__} cannot be sent as one array: pass arrays, or one flat list of them"
        )
    array = native(x)
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool):
        raise UsageError(
            f"{type(x).__name__} of {array.dtype} cannot be sent: pass numbers, or a list of arrays of them"
        )
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise UsageError(
            f"{array.dtype} would be cut to {jax.dtypes.canonicalize_dtype(array.dtype)}: "
            "set JAX_ENABLE_X64=1, or cast the array yourself"
        )
    return array


def described(x: jax.Array | np.ndarray) -> str:
    """Return dtype and shape of x, as in float32[4,2]."""
    return f"{x.dtype.name}[{','.join(map(str, x.shape))}]"


def zeros(text: str) -> np.ndarray:
    """Return zeros of a dtype and shape formatted by `described`."""
    name, _, dims = text[:-1].partition("[")
    return np.zeros([int(d) for d in dims.split(",") if d], jnp.dtype(name))


def compare(
    rank: int,
    members: Sequence[int],
    signature: Signature,
    parts: Partition | None = None,
    roots: Sequence[int] | None = None,
) -> Signature:
    """Exchange signatures between `members` and return that of this rank's group.

    Raises UsageError on all members if one has an error, and DistributedError if their calls
    differ, or the arrays within one of the `parts`. With `roots`, the root's arrays count, and the
    others of its group may pass None."""
    texts = [json.dumps(asdict(signature))]
    timeout = protocol.default_timeout()
    if len(members) > 1:
        texts = membership.joined().exchange(
            "collective", texts[0], members, timeout, title=signature.call
        )
    decoded = {text: Signature(**json.loads(text)) for text in dict.fromkeys(texts)}
    signatures = {member: decoded[text] for member, text in zip(members, texts)}
    for member, one in signatures.items():
        if one.error:
            raise UsageError(f"rank {member}: {one.call}: {one.error}", rank=member)
    _check_same(
        signatures, lambda one: f"{one.call}{' (x64 enabled)' * one.x64}{one.groups}", members[0]
    )
    for i, group in enumerate(parts or (tuple(members),)):
        without = {
            m for m in group if roots is not None and m != roots[i] and signatures[m].arrays is None
        }
        _check_same({m: signatures[m] for m in group if m not in without}, str, members[0])
        if rank in group:
            agreed = signatures[group[0] if roots is None else roots[i]]
    return agreed


def _check_same(
    signatures: dict[int, Signature], describe: Callable[[Signature], str], speaker: int
) -> None:
    """Raise DistributedError, for rank `speaker` to print, if the descriptions of the signatures
    differ.
    """
    versions: dict[str, list[int]] = {}
    for rank, signature in signatures.items():
        versions.setdefault(describe(signature), []).append(rank)
    if len(versions) > 1:
        text = "; ".join(
            f"rank {hosts.listed(ranks)}: {version}" for version, ranks in [*versions.items()][:4]
        )
        raise DistributedError(f"{text}: all ranks that take part must pass the same", rank=speaker)
