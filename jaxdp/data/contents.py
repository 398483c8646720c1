"""What is compared of a data set when a run resumes: digests of everything that is cheap to read at
a start.

A data set may have a method `parts() -> {name: Part}`: the arrays and files that its examples are
made of. Of a set without it, or with a `read` that is more derived, the examples themselves are
read if that takes less than `SECONDS`."""

import hashlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdp.data.dataset import PROBES, Arrays, Dataset, Part, fingerprint, probes, update

MOST = 1 << 28  # bytes of a data set that are read
SECONDS = 0.5
EARLIER = {"all": None, "partly": "64 examples, since it was saved by an earlier version"}


def contents(dataset: Dataset, whole: bool = False) -> dict[str, Any]:
    """Return what a checkpoint stores of a data set, as JSON.

    probes: its `fingerprint`; all: a digest of everything that is cheap to read, or None; partly:
    what these two cover, in words, "" if that is all. whole: as in `fingerprint`.
    """
    began = time.perf_counter()
    result = {"probes": fingerprint(dataset, whole), "all": None, "partly": ""}
    seconds, size = time.perf_counter() - began, len(dataset)
    arrays = dataset.arrays.values() if whole and isinstance(dataset, Arrays) else ()
    if size <= PROBES or (arrays and not any(isinstance(x, np.memmap) for x in arrays)):
        return result
    if has_parts(dataset):
        return result | digest_parts(size, dataset.parts())  # type: ignore[attr-defined]
    cheap = not hasattr(dataset, "read_ahead") and seconds * size / PROBES < SECONDS
    if cheap and (everything := digest_examples(dataset, began + 4 * SECONDS)):
        return result | {"all": everything}
    return result | {
        "partly": f"{len(probes(dataset))} {'examples' if size >> 60 else f'of {size:,} examples'}"
    }


def has_parts(dataset: Any) -> bool:
    """Return whether the data set has `parts`, and no subclass has another `read` without other
    parts.
    """
    derived = next((c for c in type(dataset).__mro__ if {"read", "parts"} & vars(c).keys()), object)
    return "parts" in vars(derived)


def digest_parts(size: int, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Return the digest of the parts of a set of `size` examples, smallest first, up to MOST bytes;
    and of all names and sizes."""
    read, total = set[str](), 0.0
    for name, part in sorted(parts.items(), key=lambda item: item[1].size):
        total += part.size
        if total <= MOST:
            read.add(name)
    digest = hashlib.sha256()
    for name, part in parts.items():
        digest.update(f"\n{name} {part.size}\n".encode(errors="surrogateescape"))
        for piece in part.pieces() if name in read else ():
            digest.update(piece)
    some = f" and {len(read):,} of {len(parts):,} files or arrays" if read else ""
    return {
        "all": digest.hexdigest()[:16],
        "partly": f"{PROBES} of {size:,} examples{some}" * (len(read) < len(parts)),
    }


def digest_examples(dataset: Dataset, until: float) -> str | None:
    """Return the digest of all examples; None if one cannot be read, or not until then (of
    `time.perf_counter`).
    """
    digest = hashlib.sha256()
    try:
        for first in range(0, len(dataset), PROBES):
            if time.perf_counter() > until:
                return None
            first = min(first, len(dataset) - PROBES)
            update(digest, dataset.read(np.arange(first, first + PROBES, dtype=np.int64)))
    except Exception:  # training reports it if it reads that example
        return None
    return digest.hexdigest()[:16]


def difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return "old -> new" of the first digest that differs, None if none does."""
    comparable = ("probes", "all") if saved["partly"] == now["partly"] else ("probes",)
    return next(
        (f"{saved[key]} -> {now[key]}" for key in comparable if saved[key] != now[key]), None
    )


def partly(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words which part of a set was compared; "" for all of it."""
    return now["partly"] or saved["partly"]
