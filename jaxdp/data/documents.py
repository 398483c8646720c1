"""Documents from text files, the lines of a .jsonl file or the parts of a .txt file, read in pieces of bounded size."""

import codecs
import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxdp.errors import UsageError

MARK = "<|endoftext|>"  # separates documents in a .txt file
BLOCK = 1 << 20  # bytes per read
SAFE = re.compile(r"\S\n(?=\S)")  # a cut here changes no token of GPT-2-like tokenizers: none crosses a single newline
LONGEST = 1 << 24  # characters without a safe position, after which a text is cut anywhere


class Piece(NamedTuple):
    """A piece of text; ends: True if a document ends with it."""

    text: str
    ends: bool


def pieces(path: Path, start: int = 0, stop: int | None = None, key: str = "data.args.path") -> Iterator[Piece]:
    """Yield the text of a file between two byte positions, which are 0, the file's size, or results of `boundary`.

    A .jsonl file yields the field "text" of each line as a document. Any other file yields its text in pieces cut at
    line breaks, and ends a document at each `<|endoftext|>`. key: the prefix of error messages. Raises UsageError with
    the position of a line or byte that cannot be read.
    """
    size = path.stat().st_size if stop is None else stop
    with path.open("rb") as file:
        file.seek(start)
        yield from _lines(file, path, size, key) if is_lines(path) else _parts(file, path, size, key)


def is_lines(path: Path) -> bool:
    return path.suffix in (".jsonl", ".ndjson")


def _lines(file: BinaryIO, path: Path, stop: int, key: str) -> Iterator[Piece]:
    at, line = file.tell(), 0
    while at < stop and (content := file.readline()):
        line += 1
        if content.strip():
            try:
                text = json.loads(content)["text"]
                if not isinstance(text, str):
                    raise TypeError
            except (ValueError, KeyError, TypeError) as error:
                problem = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else "is no JSON object with a 'text'"
                raise UsageError(
                    f'{key}: {str(path)!r}: the line at byte {at:,} {problem}; a line is such as {{"text": "..."}}'
                ) from None
            yield Piece(text, True)
        at += len(content)


def _parts(file: BinaryIO, path: Path, stop: int, key: str) -> Iterator[Piece]:
    rest = ""
    for text in _decoded(file, path, stop, key):
        *documents, rest = (rest + text).split(MARK)
        yield from (Piece(document, True) for document in documents)
        if len(rest) >= BLOCK:
            cut = _last_safe(rest)
            if cut:
                yield Piece(rest[:cut], False)
                rest = rest[cut:]
    if rest:
        yield Piece(rest, False)


def _last_safe(text: str) -> int:
    """Return the last position where a text may be cut, never inside a partial mark; 0 if there is none yet."""
    for first in (len(text) - (1 << 14), 0):  # search near the end first
        positions = [match.end() for match in SAFE.finditer(text, max(first, 0))]
        if positions:
            return positions[-1]
    return len(text) - len(MARK) if len(text) > LONGEST else 0


def _decoded(file: BinaryIO, path: Path, stop: int, key: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    while True:
        at = file.tell() - len(decoder.getstate()[0])
        content = file.read(min(BLOCK, stop - file.tell()))
        try:
            text = decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{key}: {str(path)!r} is not UTF-8: byte {at + error.start:,} is {error.object[error.start]:#04x}; "
                "convert it, e.g. with iconv -t utf-8"
            ) from None
        if not content:
            return
        yield text


def boundary(path: Path, fraction: float) -> int:
    """Return the byte position before the last `fraction` of a file, moved to the next start of a line or document, or
    to the previous one if there is no next; the file's size if there is none."""
    size = path.stat().st_size
    if not fraction or not size:
        return size
    near = int(size * (1 - fraction))
    marks = [b"\n"] if is_lines(path) else [MARK.encode(), b"\n"]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        after = [(text.find(mark, max(0, near - len(mark))), mark) for mark in marks]
        before = [(text.rfind(mark, 0, near), mark) for mark in marks]
        positions = [at + len(mark) for at, mark in [*after, *before] if at >= 0]
    return next((position for position in positions if position < size), size)
