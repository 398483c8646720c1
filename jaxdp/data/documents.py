"""Documents from text files, the lines of a .jsonl file or the parts of a .txt file, read in pieces
of bounded size.
"""

import codecs
import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxdp.errors import UsageError

MARK = "<|endoftext|>"  # separates documents in a .txt file
RESERVED = "which ends a document for this tokenizer; remove it, or use another tokenizer"
BLOCK = 1 << 20  # bytes per read
# A text up to its last single newline: a cut there changes no token of GPT-2-like tokenizers, none of
# which crosses one.
SAFE = re.compile(r"(?s).*\S\n(?=\S)")
LONGEST = 1 << 24  # characters without a safe position, after which a text is cut anywhere


LINES = (".jsonl", ".ndjson", ".json")  # endings of files with one JSON object per line
LINE = r"(?:\r\n|\r(?!\n)|\n)"
# The end of a line, and blank lines after it.
BLANK_LINES = re.compile(rf"{LINE}(?:[^\S\r\n]*{LINE})+")
OTHER_FORMATS = {  # how a file begins -> what it is, and what to do
    b"\x1f\x8b": "compressed; decompress it with gunzip",
    b"\x28\xb5\x2f\xfd": "compressed; decompress it with unzstd",
    b"\xfd7zXZ": "compressed; decompress it with unxz",
    b"BZh": "compressed; decompress it with bunzip2",
    b"PK\x03\x04": "a zip archive; unpack it with unzip",
    b"\xff\xfe": "UTF-16; convert it with iconv -f utf-16 -t utf-8",
    b"\xfe\xff": "UTF-16; convert it with iconv -f utf-16 -t utf-8",
}


class Piece(NamedTuple):
    """A piece of text; ends: True if a document ends with it."""

    text: str
    ends: bool


def pieces(
    path: Path,
    start: int = 0,
    stop: int | None = None,
    key: str = "data.args.path",
    reserved: str = "",
    problems: list[str] | None = None,
) -> Iterator[Piece]:
    """Yield the text of a file between two byte positions, which are 0, the file's size, or results
    of `boundary`.

    A file of `LINES` yields the field "text" of each line as a document. Any other file yields its
    text in pieces cut at line breaks, and ends a document at each `<|endoftext|>`. key: the prefix
    of error messages. reserved: a character that no document may contain. Raises UsageError with
    the position of a line or byte that cannot be read. problems: gets what is wrong with each line
    of a file of `LINES`, instead of an error; as in all functions below, the text follows the path.
    """
    size = path.stat().st_size if stop is None else stop
    try:
        with path.open("rb") as file:
            head = file.read(1 << 12)
            check_format(head)
            file.seek(start)
            if not is_lines(path):
                yield from _parts(file, size, reserved)
            elif head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                raise ValueError(" is a JSON array; write one object per line, as with jq -c '.[]'")
            else:
                yield from _lines(file, size, reserved, problems)
    except ValueError as problem:
        raise UsageError(f"{key}: {str(path)!r}{problem}") from None


def is_lines(path: Path) -> bool:
    return path.suffix.lower() in LINES


def check_format(head: bytes) -> None:
    """Raise ValueError if the first bytes of a file are not those of a text."""
    for begins, content in OTHER_FORMATS.items():
        if head.startswith(begins):
            raise ValueError(f" is {content}")


def text_of_line(content: bytes, reserved: str) -> str:
    """Return the text of a line of a file of `LINES`. Raises ValueError with what is wrong with the
    line.
    """
    try:
        line = json.loads(content.decode("utf-8-sig"))
        text = line.get("text") if isinstance(line, dict) else None
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8; convert it, e.g. with iconv -t utf-8") from None
    except (ValueError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise ValueError('is no JSON object with a \'text\'; a line is such as {"text": "..."}')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"has half a character, {text[error.start]!r}, in its text; replace or remove it"
        ) from None
    if reserved and reserved in text:
        raise ValueError(f"has {reserved!r} in its text, {RESERVED}")
    return text


def _lines(file: BinaryIO, stop: int, reserved: str, problems: list[str] | None) -> Iterator[Piece]:
    at = start = file.tell()
    number = 0
    while at < stop and (content := file.readline()):
        number += 1
        try:
            if content.strip():
                yield Piece(text_of_line(content, reserved), True)
        except ValueError as problem:
            file.seek(0)
            line = file.read(start).count(b"\n") + number
            file.seek(at + len(content))
            text = f": line {line:,} at byte {at:,} {problem}"
            if problems is None:
                raise ValueError(text) from None
            problems.append(text)
        at += len(content)


def _parts(file: BinaryIO, stop: int, reserved: str) -> Iterator[Piece]:
    rest = ""
    for text in decoded(file, stop, reserved):
        *documents, rest = (rest + text).split(MARK)
        yield from (Piece(document, True) for document in documents)
        cut = 0
        if len(rest) >= BLOCK and (match := SAFE.match(rest)):
            cut = match.end()
        elif len(rest) > LONGEST:
            cut = len(rest) - len(MARK)  # never within a mark, of which the end is not read yet
        if cut:
            yield Piece(rest[:cut], False)
            rest = rest[cut:]
    if rest:
        yield Piece(rest, False)


def decoded(file: BinaryIO, stop: int, reserved: str = "", final: bool = True) -> Iterator[str]:
    """Yield the text of an open file up to byte `stop`, without a byte order mark. final: raise
    ValueError if it ends within a character, instead of dropping that. reserved: as in `pieces`."""
    decoder = codecs.getincrementaldecoder("utf-8" if file.tell() else "utf-8-sig")()
    while True:
        content = file.read(min(BLOCK, stop - file.tell()))
        try:
            text = decoder.decode(content, final and not content)
        except UnicodeDecodeError as error:
            at = file.tell() - len(error.object) + error.start
            raise ValueError(
                f" is not UTF-8: byte {at:,} is {error.object[error.start]:#04x}; convert it, e.g. with "
                "iconv -t utf-8"
            ) from None
        if reserved and reserved.encode() in content:
            at = file.tell() - len(content) + content.index(reserved.encode())
            raise ValueError(f" has {reserved!r} at byte {at:,}, {RESERVED}")
        if not content:
            return
        yield text


def boundary(path: Path, fraction: float) -> int:
    """Return the byte position before the last `fraction` of a file, moved to the next start of a
    line or document, or to the previous one if there is no next; the file's size if there is none.
    """
    size = path.stat().st_size
    if not fraction or not size:
        return size
    near = int(size * (1 - fraction))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        line = b"\r" if text.find(b"\n") < 0 else b"\n"
        marks = [line] if is_lines(path) else [MARK.encode(), line]
        after = [(text.find(mark, max(0, near - len(mark))), mark) for mark in marks]
        before = [(text.rfind(mark, 0, near), mark) for mark in marks]
        positions = [at + len(mark) for at, mark in [*after, *before] if at >= 0]
    return next((position for position in positions if position < size), size)
