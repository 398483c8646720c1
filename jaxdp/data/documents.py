"""Documents from text: a line of a .jsonl file each, or the parts of a .txt file; read in pieces of bounded size."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxdp.errors import UsageError

MARK = "<|endoftext|>"  # stands between documents in a .txt file
BLOCK = 1 << 20  # bytes read at once
SAFE = re.compile(r"\S\n(?=\S)")  # to cut here changes no token of GPT-2's kind: they cross no single line break
LONGEST = 1 << 24  # characters without such a place, after which a text is cut anywhere


class Piece(NamedTuple):
    """Some text, and whether a document ends with it."""

    text: str
    ends: bool


def pieces(path: Path, start: int = 0, stop: int | None = None, key: str = "data.args.path") -> Iterator[Piece]:
    """The text of a file between two positions in bytes, which are those of `boundary`, or the file's own ends.

    A .jsonl file gives each line's field "text", a document. Any other gives a text bit by bit, cut at line breaks,
    and a document's end at each `<|endoftext|>`. key: what messages begin with. Raises UsageError that names the line
    or the byte which cannot be read.
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
        *whole, rest = (rest + text).split(MARK)
        yield from (Piece(document, True) for document in whole)
        if len(rest) >= BLOCK:
            cut = _last_safe(rest)
            if cut:
                yield Piece(rest[:cut], False)
                rest = rest[cut:]
    if rest:
        yield Piece(rest, False)


def _last_safe(text: str) -> int:
    """The last place where a text may be cut; 0 where there is none yet. Never inside what may become the mark."""
    for first in (len(text) - (1 << 14), 0):  # near the end, mostly
        found = [match.end() for match in SAFE.finditer(text, max(first, 0))]
        if found:
            return found[-1]
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
    """The position in bytes before the last `fraction` of a file, moved to where a line or a document begins: the next
    such place, or the one before where there is no next; the file's size where there is none at all."""
    size = path.stat().st_size
    if not fraction:
        return size
    near = int(size * (1 - fraction))
    marks = [b"\n"] if is_lines(path) else [MARK.encode(), b"\n"]
    for mark in marks:
        found = _after(path, mark, max(0, near - len(mark)), size)
        if found < size:
            return found
    for mark in marks:
        if found := _before(path, mark, near):
            return found
    return size


def _after(path: Path, mark: bytes, start: int, size: int) -> int:
    """The position behind the first `mark` from `start` on; `size` where there is none."""
    with path.open("rb") as file:
        file.seek(start)
        tail = b""
        while content := file.read(BLOCK):
            tail += content
            if (found := tail.find(mark)) >= 0:
                return file.tell() - len(tail) + found + len(mark)
            tail = tail[-len(mark) :]
    return size


def _before(path: Path, mark: bytes, stop: int) -> int:
    """The position behind the last `mark` before `stop`; 0 where there is none in the block before it."""
    with path.open("rb") as file:
        first = max(0, stop - BLOCK)
        file.seek(first)
        found = file.read(stop - first).rfind(mark)
    return first + found + len(mark) if found >= 0 else 0
