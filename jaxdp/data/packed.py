"""Pack documents from memory-mapped token files: only the position of each example is in memory."""

import numpy as np

from jaxdp.data.dataset import Batch, by_member
from jaxdp.data.packing import example_begins
from jaxdp.data.token_file import TokenFile

PIECE = 1 << 24  # tokens that are searched for ends of documents at once


class PackedTokens(TokenFile):
    """Packed documents of token files: "inputs", "labels", "segments" int32 [length] and "mask"
    float32 [length].

    path, split, vocabulary, dtype, end_of_text, test_fraction: as in `TokenFile`. Documents are
    packed greedily in their order: an example ends with the last document that fits in full, and is
    padded with zeros; a document longer than `length` is split. Labels are the next tokens. mask is
    0 on padding and at the end_of_text token of each document; segments is the document's number
    within the example (padding has the number after the last). A file shorter than one example is
    skipped.

    The files are read once at the start, to find the ends of documents; 8 bytes per example and 16
    per document are in memory. Raises UsageError.
    """

    def __init__(
        self,
        path: str,
        split: str | None = None,
        length: int = 1024,
        vocabulary: int | None = None,
        dtype: str | None = None,
        end_of_text: int | None = None,
        test_fraction: float = 0.1,
    ):
        super().__init__(
            path, split, length, None, vocabulary, dtype, "separate", end_of_text, test_fraction
        )
        assert self.end_of_text is not None
        self.begins = [
            example_positions(tokens, length, self.end_of_text) for tokens in self.shards
        ]
        self.starts = np.cumsum([0, *(len(begins) - 1 for begins in self.begins)])

    parts = TokenFile.parts

    def read(self, indices: np.ndarray) -> Batch:
        self.mapped.check()
        rows = np.empty((len(indices), self.length + 1), np.int32)
        sizes, labeled = np.zeros((2, len(indices), 1), np.int64)
        columns = np.arange(self.length + 1)
        for shard, chosen, numbers in by_member(self.starts, np.asarray(indices, np.int64)):
            tokens, begins = self.shards[shard], self.begins[shard]
            firsts, last = begins[numbers], len(tokens) - 1
            windows = tokens[np.minimum(firsts[:, None] + columns, last)]
            self._check(windows, firsts, shard)
            rows[chosen] = windows
            sizes[chosen, 0] = begins[numbers + 1] - firsts
            labeled[chosen, 0] = np.minimum(sizes[chosen, 0], last - firsts)
        columns = columns[:-1]
        inputs = np.where(columns < sizes, rows[:, :-1], 0)
        ends = (columns < sizes) & (inputs == self.end_of_text)
        mask = (columns < labeled) & ~ends
        last = ends | (columns == sizes - 1)
        return {
            "inputs": inputs,
            "labels": np.where(columns < labeled, rows[:, 1:], 0),
            "segments": np.cumsum(last, 1, dtype=np.int32) - last,
            "mask": mask.astype(np.float32),
        }


def example_positions(tokens: np.ndarray, length: int, end_of_text: int) -> np.ndarray:
    """Return the position of each example's first token, then that of the end, int64; none for a
    short file.
    """
    if len(tokens) <= length:
        return np.zeros(1, np.int64)
    ends = [
        np.flatnonzero(tokens[i : i + PIECE] == end_of_text) + i + 1
        for i in range(0, len(tokens), PIECE)
    ]
    return example_begins(np.concatenate([[0], *ends, [len(tokens)]]), length)
