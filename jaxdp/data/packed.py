"""Pack documents from memory-mapped token files: only the position of each example is in memory."""

from array import array

import numpy as np

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
        self.begins = [pack(tokens, length, self.end_of_text) for tokens in self.shards]
        self.starts = np.cumsum([0, *(len(begins) - 1 for begins in self.begins)])

    parts = TokenFile.parts

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        indices = np.asarray(indices, np.int64)
        if len(indices) and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"indices are not all in [0, {len(self):,})")
        owners = np.searchsorted(self.starts, indices, side="right") - 1
        rows = np.zeros((len(indices), self.length + 1), np.int32)
        sizes, labeled = np.zeros((2, len(indices), 1), np.int64)
        columns = np.arange(self.length + 1)
        for shard in np.unique(owners).tolist():
            chosen, begins, total = owners == shard, self.begins[shard], len(self.shards[shard])
            numbers = indices[chosen] - self.starts[shard]
            first = begins[numbers]
            sizes[chosen, 0] = begins[numbers + 1] - first
            labeled[chosen, 0] = np.minimum(sizes[chosen, 0], total - 1 - first)
            start = np.minimum(
                first, total - self.length - 1
            )  # the last windows would exceed the file
            windows = self._windows(shard, start)
            shifted = np.minimum(columns + (first - start)[:, None], self.length)
            rows[chosen] = np.take_along_axis(windows, shifted, 1)
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


def pack(tokens: np.ndarray, length: int, end_of_text: int) -> np.ndarray:
    """Return the position of each example's first token, then that of the end, int64; none for a
    short file.
    """
    if len(tokens) <= length:
        return np.zeros(1, np.int64)
    ends = [
        np.flatnonzero(tokens[i : i + PIECE] == end_of_text) + i + 1
        for i in range(0, len(tokens), PIECE)
    ]
    bounds = np.unique(np.concatenate([[0], *ends, [len(tokens)]]))  # of the documents
    following = (
        np.searchsorted(bounds, bounds + length, side="right") - 1
    )  # the last bound that an example can reach
    begins, position, document = array("q", [0]), 0, 0
    while position < len(tokens):
        if position == bounds[document]:
            reached = int(following[document])
        else:  # inside a long document
            reached = int(np.searchsorted(bounds, position + length, side="right")) - 1
        if bounds[reached] > position:
            position, document = int(bounds[reached]), reached
        else:
            position += length
        begins.append(position)
    return np.frombuffer(begins, np.int64)
