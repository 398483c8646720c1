"""Whole documents side by side in examples of one length: nothing is learned across them, and little room is lost."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.data.base import check_split
from jaxdp.data.documents import MARK, is_lines, pieces
from jaxdp.data.text import read_text
from jaxdp.data.tokenizers import make_tokenizer
from jaxdp.data.windows import check_fraction, smallest, stride_of
from jaxdp.errors import UsageError


class Documents:
    """Packed documents: "inputs", "labels", "segments" int32 [length] and "mask" float32 [length].

    path: a .jsonl file, one document a line in its field "text"; or a UTF-8 text, where documents stand between
    `<|endoftext|>`, or, where it has none, between blank lines. They are packed greedily in their order: each begins
    behind the one before if it fits as a whole, else in the next example; one longer than `length` is cut. labels are
    the next token of the same document, and at its last token the tokenizer's end_of_text. mask is 0 on padding, and
    at a document's last token where there is no end_of_text; segments is the document's number within the example
    (padding has the number after the last). `filled` is the share of the places that hold tokens.

    The last `test_fraction` of the documents is the test split. Everything is in memory: 5 bytes a token up to 256
    kinds of them, 7 up to 65,536. Raises UsageError for a file that cannot be read or holds no document.
    """

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
        stride_of(length, None)
        texts = read_documents(path)
        self.tokenizer = make_tokenizer(tokenizer, lambda: "".join(texts))
        cut = min(int(len(texts) * (1 - test_fraction)), len(texts) - 1)
        chosen = texts[cut:] if split == "test" else texts[:cut]
        if not chosen:
            raise UsageError(f"data.args.path: {path!r} holds {len(texts)} documents, too few for two splits; add some")
        dtype = smallest(self.tokenizer.size)
        tokens = [self.tokenizer.encode(text).astype(dtype, copy=False) for text in chosen]
        self.arrays = pack(tokens, length, self.tokenizer.end_of_text)
        self.filled = self.arrays.pop("filled").mean()
        self.classes, self.input_shape = self.tokenizer.size, (length,)

    def __len__(self) -> int:
        return len(self.arrays["inputs"])

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rows = {key: value[indices] for key, value in self.arrays.items()}
        return {key: value.astype(np.float32 if key == "mask" else np.int32) for key, value in rows.items()}


def read_documents(path: str) -> list[str]:
    """The documents of a file that are not empty; UsageError where there is none."""
    if is_lines(Path(path)) and Path(path).expanduser().is_file():
        texts = [piece.text for piece in pieces(Path(path).expanduser())]
    else:
        text = read_text(path)
        texts = text.split(MARK) if MARK in text else [part.strip("\n") for part in text.split("\n\n")]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UsageError(f"data.args.path: {path!r} holds no document")
    return texts


def pack(documents: Sequence[np.ndarray], length: int, end_of_text: int | None) -> dict[str, np.ndarray]:
    """Documents of tokens[any] as inputs, labels, segments, mask and filled [example, length]; see `Documents`."""
    spans, example, used, segment = [], -1, length, 0
    for number, document in enumerate(documents):
        for first in range(0, len(document), length):
            size = min(length, len(document) - first)
            if used + size > length:
                example, used, segment = example + 1, 0, 0
            spans.append((number, first, size, example, used, segment))
            used, segment = used + size, segment + 1
    shape, dtype = (example + 1, length), documents[0].dtype
    found = {"inputs": np.zeros(shape, dtype), "labels": np.zeros(shape, dtype)}
    found["segments"] = np.zeros(shape, smallest(length + 1))
    found |= {"mask": np.zeros(shape, bool), "filled": np.zeros(shape, bool)}
    for number, first, size, row, place, segment in spans:
        here, document = (row, slice(place, place + size)), documents[number]
        following = document[first + 1 : first + size + 1]
        if len(following) < size and end_of_text is not None:
            following = np.append(following, dtype.type(end_of_text))
        learned = (row, slice(place, place + len(following)))
        found["inputs"][here], found["filled"][here] = document[first : first + size], True
        found["labels"][learned], found["mask"][learned] = following, True
        found["segments"][row, place:] = segment
        found["segments"][row, place + size :] = segment + 1
    return found
