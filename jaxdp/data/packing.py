"""Pack full documents into examples of one length, with segments that separate them: those of a text
in memory, or of memory-mapped token files, of which only the position of each example is in memory."""

import bisect
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.data.dataset import Arrays, Batch, by_member, check_split
from jaxdp.data.documents import BLANK_LINES, MARK, RESERVED, is_lines, pieces
from jaxdp.data.text import read_text
from jaxdp.data.token_file import TokenFile
from jaxdp.data.tokenizers import compact, make_tokenizer, reserved
from jaxdp.data.windows import check_fraction
from jaxdp.errors import UsageError, check_sizes

PIECE = 1 << 24  # tokens that are searched for ends of documents at once


class Documents(Arrays):
    """Packed documents: "inputs", "labels", "segments" int32 [length] and "mask" float32 [length].

    path: a .jsonl, .ndjson or .json file, one document per line in its field "text"; or a UTF-8
    text with documents separated by `<|endoftext|>`, or by blank lines if it has none. Documents
    are packed greedily in order: each follows the one before if it fits in full, else starts the
    next example; a document longer than `length` is split. labels are the next token of the same
    document, and the tokenizer's end_of_text after its last token. mask is 0 on padding, and at a
    document's last token if there is no end_of_text; segments is the document's number within the
    example (padding has the number after the last).

    The last `test_fraction` of the documents is the test split. All data is in memory: 5 bytes per
    token for vocabularies up to 256, 7 up to 65,536. Raises UsageError for a file that cannot be
    read or has no document."""

    dtypes = {
        "inputs": np.int32,
        "labels": np.int32,
        "segments": np.int32,
        "mask": np.float32,
    }

    def __init__(
        self,
        path: str,
        split: str = "train",
        length: int = 1024,
        tokenizer: str | Mapping[str, Any] = "byte",
        test_fraction: float = 0.1,
    ):
        check_split(split)
        check_fraction(test_fraction)
        check_sizes("data.args", length=length)
        texts = read_documents(path, reserved(tokenizer))
        self.tokenizer = make_tokenizer(
            tokenizer, lambda: ("\n" if tokenizer == "words" else "").join(texts)
        )
        cut = min(int(len(texts) * (1 - test_fraction)), len(texts) - 1)
        chosen = texts[cut:] if split == "test" else texts[:cut]
        if not chosen:
            raise UsageError(
                f"data.args.path: {path!r} has {len(texts)} documents, too few for two splits; add some"
            )
        tokens = [compact(self.tokenizer, text) for text in chosen]
        super().__init__(**pack(tokens, length, self.tokenizer.end_of_text))
        self.classes, self.input_shape = self.tokenizer.size, (length,)


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
        # Of each row, the tokens that are the example's, and those that the file has.
        own, stored = np.empty((2, *rows.shape), bool)
        for shard, chosen, numbers in by_member(self.starts, np.asarray(indices, np.int64)):
            tokens, begins = self.shards[shard], self.begins[shard]
            positions = begins[numbers][:, None] + np.arange(self.length + 1)
            windows = tokens[np.minimum(positions, len(tokens) - 1)]
            self._check(windows, begins[numbers], shard)
            rows[chosen] = windows
            own[chosen] = positions < begins[numbers + 1][:, None]
            stored[chosen] = positions < len(tokens)
        real = own[:, :-1]
        labeled = real & stored[:, 1:]
        ends = real & (rows[:, :-1] == self.end_of_text)
        last = ends | (real & ~own[:, 1:])
        return {
            "inputs": np.where(real, rows[:, :-1], 0),
            "labels": np.where(labeled, rows[:, 1:], 0),
            "segments": np.cumsum(last, 1, dtype=np.int32) - last,
            "mask": (labeled & ~ends).astype(np.float32),
        }


def read_documents(path: str, reserved: str = "") -> list[str]:
    """Return the non-empty documents of a file. reserved: a character that none may contain. Raises
    UsageError, also if there are none."""
    file = Path(path).expanduser()
    if is_lines(file) and file.is_file():
        texts = [piece.text for piece in pieces(file, reserved=reserved)]
    else:
        text = read_text(path)
        if reserved and reserved in text:
            line = text.count("\n", 0, text.index(reserved)) + 1
            raise UsageError(
                f"data.args.path: {path!r} has {reserved!r} in line {line:,}, {RESERVED}"
            )
        texts = (
            text.split(MARK)
            if MARK in text
            else [part.strip("\r\n") for part in BLANK_LINES.split(text)]
        )
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UsageError(f"data.args.path: {path!r} has no document")
    return texts


def pack(documents: Sequence[np.ndarray], length: int, end_of_text: int | None) -> Batch:
    """Pack arrays of tokens into inputs, labels, segments and mask [example, length]; see
    `Documents`.
    """
    tokens, bounds = np.concatenate(documents), np.cumsum([0, *map(len, documents)])
    begins, last = example_begins(bounds, length), bounds[1:] - 1
    labels, labeled = np.append(tokens[1:], tokens[:1]), np.ones(len(tokens), bool)
    labels[last] = 0 if end_of_text is None else end_of_text
    labeled[last] = end_of_text is not None
    ends = np.zeros(len(tokens), np.min_scalar_type(length))  # 1 at the end of each segment
    ends[last], ends[begins[1:] - 1] = 1, 1
    columns = {"inputs": tokens, "labels": labels, "mask": labeled, "segments": ends}
    real = np.arange(length) < np.diff(begins)[:, None]
    arrays = {name: np.zeros(real.shape, values.dtype) for name, values in columns.items()}
    for name, values in columns.items():
        arrays[name][real] = values
    arrays["segments"] = np.cumsum(arrays["segments"], 1, dtype=ends.dtype) - arrays["segments"]
    return arrays


def example_begins(bounds: np.ndarray, length: int) -> np.ndarray:
    """Pack documents greedily: return the position of each example's first token, then that of the
    end, int64.

    bounds: of the documents in an array of tokens: 0, and the end of each."""
    ends = np.unique(bounds).astype(np.int64).data  # gives Python's integers, without a list
    begins, document = array("q", [0]), 0
    while begins[-1] < ends[-1]:
        document = bisect.bisect_right(ends, begins[-1] + length, document) - 1
        # A document that is longer than an example is split.
        begins.append(ends[document] if ends[document] > begins[-1] else begins[-1] + length)
    return np.frombuffer(begins, np.int64)


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
