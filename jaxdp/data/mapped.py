"""A memory-mapped file. Resident pages are read directly; missing ones are prefetched together.

Touching a missing page costs a page fault and a disk access, one at a time. `posix_fadvise(2)` with POSIX_FADV_WILLNEED
starts a read without waiting for it, so that a disk, or a server, serves all of them concurrently.
"""

import ctypes
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from jaxdp.errors import UsageError, one_line

PROBE = 32  # test the residency of one in this many offsets, as a cheap sample of them all
PAGE = -mmap.PAGESIZE
CAN_ASK = hasattr(os, "posix_fadvise")
if CAN_ASK:
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class Mapped:
    """A file mapped as `bytes`, uint8, at an `address` in memory; closed when this object is garbage-collected.

    random: accesses are random, so disable readahead. Raises UsageError with the name of a file that cannot be mapped.
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
        # mincore(2) reports every page as resident unless the caller owns the file or may write to it
        self._can_probe = CAN_ASK and (status.st_uid == os.geteuid() or os.access(path, os.W_OK))

    def ask(self, offsets: np.ndarray, size: int) -> bool:
        """Start to prefetch the `size` bytes at each of offsets; return True if the caller should `read` them.

        Return False, without prefetching, if a sample of them is resident or the system lacks `posix_fadvise`.
        """
        if not CAN_ASK or (self._can_probe and self._resident(offsets[::PROBE].tolist())):
            return False
        for offset in offsets.tolist():
            os.posix_fadvise(self._file, offset, size, os.POSIX_FADV_WILLNEED)
        return True

    def read(self, offsets: np.ndarray, rows: np.ndarray) -> None:
        """Fill rows[k] with the bytes at offsets[k]; rows is contiguous."""
        for row, offset in zip(rows, offsets.tolist()):
            if os.preadv(self._file, (row,), offset) != row.nbytes:  # some file systems may return less
                row[...] = self.bytes[offset : offset + row.nbytes].view(row.dtype)

    def _resident(self, offsets: list[int]) -> bool:
        """Return True if the pages at all offsets are in memory."""
        status = ctypes.c_ubyte()
        pointer = ctypes.byref(status)
        return all(mincore((self.address + at) & PAGE, 1, pointer) == 0 and status.value & 1 for at in offsets)
