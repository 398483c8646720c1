"""The protocol between the ranks and their coordinator: the facts of a rank, the operations, and
their fields.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.process import hosts
from jaxdp.process.channel import LONG_TEXT
from jaxdp.process.hosts import Facts as Facts
from jaxdp.process.launchers import seconds_of

# Facts that must be equal on all ranks, in the order in which a difference is reported.
COMMON = {
    "size": "world size",
    "jaxdp": "jaxdp version",
    "jax": "JAX version",
    "jaxlib": "jaxlib version",
    "python": "Python version",
    "tls": "TLS (the package cryptography)",
    "group": "process group",
}
TIMEOUT = 60.0  # seconds to wait for other ranks
GENERATION = "jaxdp.process.generation:Generation"  # of a group of processes that is fixed
FACTS: dict[str, Any] = {
    **dict.fromkeys(["host", "boot", "network", "jaxdp", "jax", "jaxlib", "python"], str),
    "group?": str,  # the kind of the job's `Group`
    "problem?": str,  # why the process cannot take part; it joins to tell the others
    "prepares?": bool,  # whether it can build its run before it joins a running job
    "tls?": str,
    "last?": [
        range(1 << 31)
    ],  # the number of the generation that this process was in before, and its size
    "state?": range(
        -1, 1 << 31
    ),  # the newest generation whose state it has, or has computed; -1: none
    "newest?": range(-1, 1 << 31),  # the newest `state` of the members of its generation before
    "busy?": bool,  # it will report to this coordinator on another connection
    "addresses": [str],
    "outward": (str, None),
    "rank": range(1 << 20),
    "size": range(1 << 21),
    "pid": range(1 << 31),
    "gloo": bool,
    "visible": (str, None),
}
NOTE = {"suspended?": bool, "own_ms?": float}
# The operations that a rank may ask for, and the fields of each.
OPERATIONS: dict[str, dict[str, Any]] = {
    "beat": {"note": NOTE},
    "beats": {"suspended": bool},
    "silent": {"seconds": float},
    "exchange": {
        "name": str,
        "turn": range(1 << 53),
        "members": ([range(1 << 20)], None),  # None: all ranks of the generation
        "text": LONG_TEXT,
        "timeout": float,
        "await_responsive": bool,
    },
    "put": {"key": str, "text": LONG_TEXT},
    "get": {"key": str, "timeout": float},
    "announce": {"name": str, "text": LONG_TEXT},
    "fault": {"text": str, "code": range(1, 256)},
    "log": {"path": str},
    "leave": {"code": range(256)},
}


# The answer to a rank's first message.
ADMISSION: dict[str, Any] = {
    "members?": {
        f"{name.rstrip('?')}?": {"kinds": [kind], "of": [range(-1, 1 << 20)]}
        for name, kind in FACTS.items()
    },
    "rank?": range(
        1 << 20
    ),  # with a code: the rank that prints the error; without, it is for one process alone
    "generation?": range(1 << 31),
    "jax?": str,
    "prepare?": bool,  # build the run, answer, and wait
    "error?": str,
    "code?": range(256),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the coordinator. size: ranks. timeout, silence: seconds until all must have
    joined, or one is dead.

    address: where to listen; None for all addresses of this host. jax_host: the host of JAX's
    service as other ranks reach it; None to choose one by the facts of the ranks. stderr: the file
    descriptor of rank 0's standard error. generation: "module:class" of the job's generations of
    ranks. options: those of its `Group`."""

    size: int
    secret: str
    port: int
    address: str | None
    jax_host: str | None
    timeout: float
    silence: float
    stderr: int = 2
    generation: str = GENERATION
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def pack(facts: Sequence[Facts]) -> dict[str, Any]:
    """Return {field: its distinct values, and the index of each rank's, -1 for none}; most are
    equal, or per host.

    The indices are left out if there is one value, or a different one of each rank.
    """
    columns = {}
    for field in dict.fromkeys(field for one in facts for field in one):
        texts = [json.dumps(one[field]) if field in one else None for one in facts]
        index = {
            text: i
            for i, text in enumerate(dict.fromkeys(text for text in texts if text is not None))
        }
        of = [-1 if text is None else index[text] for text in texts]
        obvious = of in ([0] * len(facts), [*range(len(facts))])
        columns[field] = {"kinds": [*map(json.loads, index)], "of": [] if obvious else of}
    return columns


def unpack(columns: dict[str, Any]) -> list[Facts]:
    """Invert `pack`."""
    size = len(columns["rank"]["kinds"])
    absent = object()
    values = []
    for column in columns.values():
        kinds = [*column["kinds"], absent]  # -1 is the last
        of = column["of"] or ([0] * size if len(kinds) == 2 else range(size))
        values.append([kinds[i] for i in of])
    return [
        {field: x for field, x in zip(columns, row) if x is not absent}
        for row in zip(*values, strict=True)
    ]


def difference(first: Facts, other: Facts, common: Mapping[str, str] = COMMON) -> str | None:
    """Return a line on the problem of one, or the first fact in which `other` differs from rank 0;
    None if they agree.

    common: the facts that must be equal, and their names.
    """
    for facts in (first, other):
        if problem := facts.get("problem"):
            return f"{hosts.title(facts['rank'], facts['host'])}: {problem}"
    for field, label in common.items():
        if first.get(field) != other.get(field):
            return (
                f"{hosts.title(other['rank'], other['host'])} has {label} {other.get(field)}, but "
                f"{hosts.title(0, first['host'])} has {first.get(field)}: start every process of the job with the same"
            )
    return None


def beat_interval(size: int) -> float:
    """Return the seconds between two heartbeats of a rank: 1, or more so that all send at most
    1,024 a second.
    """
    return max(1.0, size / 1024)


def silence(timeout: float, most: float = 20.0) -> float:
    """Return the seconds without a heartbeat after which a process is declared dead.

    JAXDP_SILENCE, else `most`, less for short timeouts. Raises UsageError.
    """
    return seconds_of("JAXDP_SILENCE", max(7.0, min(most, timeout / 3)))


def default_timeout(timeout: float | None = None) -> float:
    """Return the seconds to wait for other ranks: `timeout`, else JAXDP_TIMEOUT, else 60. Raises
    UsageError.
    """
    return seconds_of("JAXDP_TIMEOUT", TIMEOUT, timeout)
