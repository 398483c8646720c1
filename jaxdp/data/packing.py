"""Pack full documents into examples of one length, with segments that separate them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.data.dataset import Arrays, check_split
from jaxdp.data.documents import BLANK_LINES, MARK, RESERVED, is_lines, pieces
from jaxdp.data.text import read_text
from jaxdp.data.tokenizers import make_tokenizer, reserved
from jaxdp.data.windows import check_fraction
from jaxdp.errors import UsageError, check_sizes


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
        dtype = np.min_scalar_type(self.tokenizer.size - 1)
        tokens = [self.tokenizer.encode(text).astype(dtype, copy=False) for text in chosen]
        super().__init__(**pack(tokens, length, self.tokenizer.end_of_text))
        self.classes, self.input_shape = self.tokenizer.size, (length,)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rows = super().read(indices).items()
        return {key: value.astype(np.float32 if key == "mask" else np.int32) for key, value in rows}

    parts = Arrays.parts


def read_documents(path: str, reserved: str = "") -> list[str]:
    """Return the non-empty documents of a file. reserved: a character that none may contain. Raises
    UsageError, also if there are none."""
    if is_lines(Path(path)) and Path(path).expanduser().is_file():
        texts = [piece.text for piece in pieces(Path(path).expanduser(), reserved=reserved)]
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


def pack(
    documents: Sequence[np.ndarray], length: int, end_of_text: int | None
) -> dict[str, np.ndarray]:
    """Pack arrays of tokens into inputs, labels, segments and mask [example, length]; see
    `Documents`.
    """
    spans, example, used, segment = [], -1, length, 0
    for number, document in enumerate(documents):
        for first in range(0, len(document), length):
            size = min(length, len(document) - first)
            if used + size > length:
                example, used, segment = example + 1, 0, 0
            spans.append((number, first, size, example, used, segment))
            used, segment = used + size, segment + 1
    shape, dtype = (example + 1, length), documents[0].dtype
    arrays = {"inputs": np.zeros(shape, dtype), "labels": np.zeros(shape, dtype)}
    arrays |= {
        "segments": np.zeros(shape, np.min_scalar_type(length)),
        "mask": np.zeros(shape, bool),
    }
    for number, first, size, row, start, segment in spans:
        span, document = (row, slice(start, start + size)), documents[number]
        following = document[first + 1 : first + size + 1]
        if len(following) < size and end_of_text is not None:
            following = np.append(following, dtype.type(end_of_text))
        labeled = (row, slice(start, start + len(following)))
        arrays["inputs"][span] = document[first : first + size]
        arrays["labels"][labeled], arrays["mask"][labeled] = following, True
        arrays["segments"][row, start:] = segment
        arrays["segments"][row, start + size :] = segment + 1
    return arrays
