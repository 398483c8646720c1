"""A byte-level text data set without a download: the source of Python's standard library."""

import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxdp.data.dataset import check_split
from jaxdp.data.text import byte_limit
from jaxdp.data.tokenizers import Byte
from jaxdp.data.windows import Windows
from jaxdp.errors import UsageError

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
        files = [
            path for path in _files(root) if _in_test(path.relative_to(root)) == (split == "test")
        ]
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


def _in_test(path: Path) -> bool:
    return zlib.crc32(path.as_posix().encode()) % 20 == 0
