"""Text is one long row of tokens; an example is a window of it, and its labels are the same window one token later."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxdp.errors import UsageError

SMALL = 1 << 24  # tokens that are looked at before anything begins; of more, each window is when it is read


class Windows:
    """Windows of tokens: "inputs" and "labels" int32 [length], one token apart.

    shards: rows of tokens uint8, uint16, uint32 or int32, in memory or memory-mapped; no window crosses from one to
    the next. Example i of a row is `tokens[i * stride : i * stride + length + 1]`; the last tokens, too few for
    another, are left out. stride: tokens from one example to the next, by itself `length`; data sets of text take it
    for training alone, so that an evaluation counts a token once. classes: the size of the
    vocabulary; a token beyond it is a UsageError that names its place. names: what each row is called there.

    end_of_text: the token that ends a document. Where it is given, examples also have "segments" int32 [length], the
    number of the document within the window, and "mask" float32 [length], 0 where the label is the first token of the
    next document. The token itself belongs to the document that it ends.
    """

    def __init__(
        self,
        shards: Sequence[np.ndarray],
        length: int,
        stride: int | None = None,
        classes: int = 0,
        names: Sequence[str] = (),
        end_of_text: int | None = None,
        unit: str = "tokens",
    ):
        self.length, self.stride = length, stride_of(length, stride)
        self.shards, self.names, self.end_of_text = list(shards), list(names), end_of_text
        self.classes, self.input_shape = classes, (length,)
        counts = [max(0, (len(tokens) - 1 - length) // self.stride + 1) for tokens in self.shards]
        self.starts = np.cumsum([0, *counts])
        if not self.starts[-1]:
            longest = max(map(len, self.shards), default=0)
            raise UsageError(f"data.args.length: {length}, but there are {longest:,} {unit}; make it smaller")
        self._views = self._view()
        if sum(map(len, self.shards)) <= SMALL:
            for owner, tokens in enumerate(self.shards):
                self._check(tokens[None], np.zeros(1, np.int64), owner)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rows = self.rows(np.asarray(indices, np.int64))
        found = {"inputs": rows[:, :-1], "labels": rows[:, 1:]}
        if self.end_of_text is not None:
            ends = found["inputs"] == self.end_of_text
            found["segments"] = np.cumsum(ends, 1, dtype=np.int32) - ends
            found["mask"] = 1 - ends.astype(np.float32)
        return found

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """The windows at indices[k] as int32 [k, length + 1]."""
        if len(indices) and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"indices are not all in [0, {len(self):,})")
        rows = np.empty((len(indices), self.length + 1), np.int32)
        if len(self.shards) == 1:  # as mostly: then there is nothing to look up
            owners, present = None, [0] if len(indices) else []
        else:
            owners = np.searchsorted(self.starts, indices, side="right") - 1
            present = np.unique(owners).tolist()
        places = {owner: slice(None) if owners is None else owners == owner for owner in present}
        firsts = {owner: (indices[places[owner]] - self.starts[owner]) * self.stride for owner in present}
        for owner, found in self._fetch(firsts):
            self._check(found, firsts[owner], owner)
            rows[places[owner]] = found
        return rows

    def _fetch(self, firsts: dict[int, np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
        """(row, its windows [k, length + 1] at tokens firsts[row][k], as they are stored), for each row asked for."""
        for owner, tokens in firsts.items():
            yield owner, self._views[owner][tokens]

    def _view(self) -> list[np.ndarray]:
        """Every window of every row, as views of it."""
        length = self.length + 1
        return [
            np.lib.stride_tricks.sliding_window_view(tokens, length) if len(tokens) >= length else tokens[:0]
            for tokens in self.shards
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Without the views: they would be copied in full, each token `length` times."""
        return {**self.__dict__, "_views": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._views = self._view()

    def _check(self, found: np.ndarray, firsts: np.ndarray, owner: int) -> None:
        """UsageError for the first token that is not in the vocabulary; a model would give it another's weights."""
        if not self.classes or self.classes > np.iinfo(found.dtype).max or found.max(initial=0) < self.classes:
            return
        row, place = np.argwhere(found >= self.classes)[0]
        where = f"{self.names[owner]}: " if self.names else ""
        raise UsageError(
            f"data.args.vocabulary: {where}token {firsts[row] + place:,} is {found[row, place]}, and the vocabulary "
            f"has {self.classes:,}; give a larger one"
        )


def stride_of(length: int, stride: int | None) -> int:
    """`stride`, or `length` where it is None; UsageError where either is not positive."""
    for name, value in (("length", length), ("stride", stride)):
        if value is not None and value < 1:
            raise UsageError(f"data.args.{name}: {value} is too small; it must be at least 1")
    return length if stride is None else stride


def cut(shards: Sequence[np.ndarray], fraction: float, test: bool) -> list[np.ndarray]:
    """All but the last `fraction` of the tokens in the rows; or, for the test split, these: views, not copies."""
    check_fraction(fraction)
    left = int(sum(map(len, shards)) * (1 - fraction))
    kept = []
    for tokens in shards:
        part = tokens[left:] if test else tokens[:left]
        left = max(0, left - len(tokens))
        kept.append(part)
    return kept


def check_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise UsageError(f"data.args.test_fraction: {fraction} is not between 0 and 1; e.g. 0.1")


def smallest(size: int) -> np.dtype:
    """The narrowest unsigned dtype that holds `size` different tokens."""
    return np.dtype(np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.uint32)
