"""A mapped file: pages in memory are looked at; of those that are not, a batch asks for all at once, then reads them.

A page that is looked at before it is there costs a fault, and on a disk a wait, each by itself. `posix_fadvise(2)` with
POSIX_FADV_WILLNEED begins to read and does not wait, so that a disk, or a server, works at all of them together.
"""

import ctypes
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from jaxdp.errors import UsageError, one_line

PROBE = 32  # of so many places, the first is looked up: it tells of the others, and costs little where pages are there
PAGE = -mmap.PAGESIZE
CAN_ASK = hasattr(os, "posix_fadvise")
if CAN_ASK:
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class Mapped:
    """The `bytes` of a file, uint8, at an `address` in memory; it is closed when nothing refers to this any more.

    random: what is looked at lies anywhere, so that what follows it is not worth reading ahead. UsageError naming the
    file where it cannot be mapped.
    """

    def __init__(self, path: Path, random: bool):
        try:
            self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            weakref.finalize(self, os.close, self._file)
            status = os.fstat(self._file)
            self.bytes = np.zeros(0, np.uint8)
            if status.st_size:
                mapped = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)
                if random and hasattr(mmap, "MADV_RANDOM"):
                    mapped.madvise(mmap.MADV_RANDOM)
                self.bytes = np.frombuffer(mapped, np.uint8)
        except OSError as error:  # a file takes two descriptors: `ulimit -n` may be too low for hundreds of them
            raise UsageError(f"data.args.path: cannot map {str(path)!r}: {one_line(error)}") from None
        self.address = self.bytes.ctypes.data
        # to others than an owner and those who may write, mincore(2) says that every page is there
        self._told = CAN_ASK and (status.st_uid == os.geteuid() or os.access(path, os.W_OK))

    def ask(self, offsets: np.ndarray, size: int) -> bool:
        """Whether to `read` the `size` bytes at each of offsets, and not to look at them; they are on their way then.

        False where those that are looked up are in memory, and where the system has no such calls.
        """
        if not CAN_ASK or (self._told and self._resident(offsets[::PROBE].tolist())):
            return False
        for offset in offsets.tolist():
            os.posix_fadvise(self._file, offset, size, os.POSIX_FADV_WILLNEED)
        return True

    def read(self, offsets: np.ndarray, rows: np.ndarray) -> None:
        """Fills rows[k] with the bytes at offsets[k]; rows is contiguous."""
        for row, offset in zip(rows, offsets.tolist()):
            if os.preadv(self._file, (row,), offset) != row.nbytes:  # some file systems may give less
                row[...] = self.bytes[offset : offset + row.nbytes].view(row.dtype)

    def _resident(self, offsets: list[int]) -> bool:
        """Whether the pages of all these bytes are in memory."""
        found = ctypes.c_ubyte()
        place = ctypes.byref(found)
        return all(mincore((self.address + at) & PAGE, 1, place) == 0 and found.value & 1 for at in offsets)
