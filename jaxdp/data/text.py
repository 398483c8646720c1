"""Text files as windows of tokens: one file split into train and test, or the three files of the
Penn Treebank.

`PythonSource` needs no download: the source of Python's standard library, byte by byte.
"""

import io
import os
import sysconfig
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.data.dataset import check_split, find_file
from jaxdp.data.documents import check_format, decoded
from jaxdp.data.tokenizers import Byte, Words, compact, make_tokenizer
from jaxdp.data.windows import Windows, check_fraction
from jaxdp.errors import UsageError, check_one_of


class TextFile(Windows):
    """A UTF-8 text: "inputs" and "labels" int32 [length], one token apart; see `Windows`. path: of a
    file, or of a folder, whose .txt files are joined in the order of their paths.

    The last `test_fraction` of its characters is the test split, as in nanoGPT's
    `shakespeare_char`. tokenizer: byte, char (the characters of this file), words, the path of a
    tokenizer.json, a tiktoken name, or a spec; see `jaxdp.data.tokenizers`. max_mb: read only the
    first max_mb MB (10^6 bytes) of each file. Attributes: `tokenizer`, and `classes`, the size of its
    vocabulary. Raises UsageError for a file that is missing, empty, not UTF-8 (with the position of
    the byte), or shorter than one example."""

    def __init__(
        self,
        path: str,
        split: str = "train",
        length: int = 256,
        stride: int | None = None,
        tokenizer: str | Mapping[str, Any] = "byte",
        test_fraction: float = 0.1,
        max_mb: float | None = None,
    ):
        check_split(split)
        check_fraction(test_fraction)
        text = read_text(path, max_mb)
        cut = int(len(text) * (1 - test_fraction))
        self.tokenizer = make_tokenizer(tokenizer, lambda: text)
        if isinstance(self.tokenizer, Words):  # not within a word
            cut = 1 + max(text.rfind(space, 0, cut) for space in " \t\n")
        tokens = compact(self.tokenizer, text[cut:] if split == "test" else text[:cut])
        stride = stride if split == "train" else None
        super().__init__([tokens], length, stride, self.tokenizer.size, [str(path)])


class PennTreebank(Windows):
    """The Penn Treebank for language models: "inputs" and "labels" int32 [length] in [0, 10,000),
    one word apart.

    Files ptb.train.txt, ptb.valid.txt and ptb.test.txt as T. Mikolov prepared them
    (http://www.fit.vutbr.cz/~imikolov/ rnnlm): the vocabulary is the train file's, in order of
    appearance; <eos> ends each line, and <unk> replaces rare words. root: the folder of the files,
    or a folder above it. vocabulary: a list of words to use instead, for a folder without the train
    file. Raises UsageError that names a missing file."""

    def __init__(
        self,
        root: str,
        split: str = "train",
        length: int = 35,
        stride: int | None = None,
        vocabulary: list[str] | None = None,
    ):
        check_one_of("data.args.split", split, ("train", "valid", "test"))
        self.tokenizer = (
            Words(vocabulary) if vocabulary else Words.of(read_text(_ptb(root, "train")))
        )
        path = _ptb(root, split)
        tokens = compact(self.tokenizer, read_text(path))
        stride = stride if split == "train" else None
        super().__init__([tokens], length, stride, self.tokenizer.size, [str(path)])


def read_text(path: str | Path, max_mb: float | None = None) -> str:
    """Read a UTF-8 file, at most `max_mb` MB (10^6 bytes), dropping a character cut off there; of a
    folder all .txt files, or .TXT, at any depth, but hidden ones, each with a newline after it. Raises
    UsageError.
    """
    limit, location = byte_limit(max_mb), Path(path).expanduser()
    if location.is_dir():
        # As those of images, hidden files are never read: macOS writes some beside others.
        return "\n".join(
            read_text(x, max_mb)
            for x in sorted(location.rglob("*.[tT][xX][tT]"))
            if x.is_file() and "/." not in f"/{x.relative_to(location)}"
        )
    try:
        # All at once: a pipe has no size, and can be read once.
        with location.open("rb") as file:
            content = file.read(
                limit + 1 if limit and limit < os.fstat(file.fileno()).st_size else -1
            )
        check_format(content)
        used = content[:limit]
        return "".join(decoded(io.BytesIO(used), len(used), final=used == content))
    except OSError as error:
        raise UsageError(
            f"data.args.path: cannot read {str(path)!r}: {error.strerror}; give a text file"
        ) from None
    except ValueError as problem:
        raise UsageError(f"data.args.path: {str(path)!r}{problem}") from None


def byte_limit(max_mb: float | None) -> int | None:
    """Return the number of bytes of the argument `max_mb`. Raises UsageError."""
    if max_mb is None:
        return None
    if not max_mb > 0:
        raise UsageError(f"data.args.max_mb: {max_mb} must be greater than 0, or null for all")
    return int(min(max_mb * 1e6, 1e18))  # infinity is no int


def _ptb(root: str, split: str) -> Path:
    name, origin = f"ptb.{split}.txt", "the files of the Penn Treebank for language models"
    return find_file(root, ("", "data", "simple-examples/data"), [name], repr(name), origin)


# Skipped: tests, installed packages, and files written by the build of this particular Python.
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
BUILT = ("config-", "_sysconfigdata", "sitecustomize")


class PythonSource(Windows):
    """The bytes of the standard library's .py files: "inputs" and "labels" int32 [length] in [0,
    256), one byte apart.

    About one file in 20, selected by a hash of its path, is the test split. The files of a split
    are joined in order of their paths, with zero bytes between them; example i is bytes length i to
    length (i + 1), its labels are one byte later. Drops the last bytes, too few for another
    example. About 10 MB; the text and all results differ between Python versions. max_mb: read only
    the first max_mb MB (10^6 bytes). Raises UsageError if there is no source."""

    def __init__(self, split: str = "train", length: int = 128, max_mb: float | None = None):
        check_split(split)
        limit = byte_limit(max_mb)
        root = Path(sysconfig.get_paths()["stdlib"])

        def is_test(path):
            return zlib.crc32(path.relative_to(root).as_posix().encode()) % 20 == 0

        files = [path for path in _files(root) if is_test(path) == (split == "test")]
        if not files:
            raise UsageError(
                f"data: no Python source in {str(root)!r}; use a Python whose library is not packed"
            )
        text = np.frombuffer(b"\0".join(path.read_bytes() for path in files), np.uint8)
        self.tokenizer = Byte()
        super().__init__([text[:limit]], length, classes=256, unit="bytes")


def _files(folder: Path) -> Iterator[Path]:
    """Yield the library's .py files in an order that does not depend on the file system."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name in SKIPPED or path.name.startswith(BUILT):
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.suffix == ".py":
            yield path
