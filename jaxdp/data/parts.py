"""The arrays and files that the examples of a data set are made of, as bytes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

PIECE = 1 << 24  # bytes that are read at once


class Part(NamedTuple):
    """The number of bytes of an array or a file, infinite if it must not be read, and a function
    that reads them.
    """

    size: float
    pieces: Callable[[], Iterator[bytes]]


def bytes_of(array: np.ndarray) -> bytes:
    """Return the contents of an array in little-endian order."""
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def array_part(array: np.ndarray, rows: np.ndarray | None = None) -> Part:
    """Return the part of an array, or of some of its rows, as little-endian bytes."""
    count, each = len(array) if rows is None else len(rows), max(1, array[:1].nbytes)

    def pieces() -> Iterator[bytes]:
        for i in range(0, count, step := max(1, PIECE // each)):
            yield bytes_of(array[i : i + step] if rows is None else array[rows[i : i + step]])

    return Part(count * each, pieces)


def file_part(path: Path, read: bool = True) -> Part:
    def pieces() -> Iterator[bytes]:
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                yield piece

    return Part(path.stat().st_size if read else float("inf"), pieces)
