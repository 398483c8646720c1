"""A background writer: if the wrapped writer fails or hangs, training continues without it after
one warning.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxdp.errors import UsageError, one_line
from jaxdp.metrics import safe_print
from jaxdp.metrics.writer import Record, Writer

START = 10.0  # seconds that training waits for a writer to start
LONGEST_CALL = 30.0  # seconds that one call may take at the end of the run
WAITING = 10_000  # the capacity of the call queue


class BackgroundWriter(Writer):
    """A writer that makes another writer and forwards calls to it in a separate thread, until that
    raises or hangs.

    If `make` takes longer than START seconds, calls wait in the queue. Raises the UsageError of
    `make`."""

    def __init__(self, name: str, make: Callable[[], Writer]):
        self.name = name
        self.failed = False
        self.calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(WAITING)
        self.began = time.monotonic()  # the start of the current call
        self.refused: UsageError | None = None
        ready = threading.Event()
        self.thread = threading.Thread(
            target=self._work, args=(make, ready), name=f"writer {name}", daemon=True
        )
        self.thread.start()
        if not ready.wait(START):
            self._warn(
                f"is not ready after {START:g} s; training continues, and records are queued for it"
            )
        if self.refused is not None:
            raise self.refused

    def write(self, record: Record) -> None:
        self._enqueue("write", dict(record))

    def say(self, text: str) -> None:
        self._enqueue("say", text)

    def rewind(self, step: int) -> None:
        self._enqueue("rewind", step)

    def close(self) -> None:
        """Wait for the queued calls, as long as no call takes LONGEST_CALL seconds."""
        self._enqueue("close")
        while self.thread.is_alive() and not self.failed:
            remaining = self.began + LONGEST_CALL - time.monotonic()
            if remaining <= 0:
                self._abandon(f"did not answer for {LONGEST_CALL:g} s")
            self.thread.join(min(max(remaining, 0.0), 1.0))

    def _enqueue(self, method: str, *args: Any) -> None:
        if not self.failed:
            try:
                self.calls.put_nowait((method, args))
            except queue.Full:
                self._abandon(f"has {WAITING:,} queued records and accepts none")

    def _work(self, make: Callable[[], Writer], ready: threading.Event) -> None:
        method = ""
        try:
            writer = make()
            ready.set()
            while method != "close" and not self.failed:
                method, args = self.calls.get()
                self.began = time.monotonic()
                getattr(writer, method)(*args)
        except BaseException as error:
            if isinstance(error, UsageError) and not ready.is_set():
                self.refused = error
            else:
                self._abandon(f"failed ({type(error).__name__}: {one_line(error)})")
        finally:
            ready.set()

    def _abandon(self, reason: str) -> None:
        if not self.failed:
            self.failed = True
            self._warn(f"{reason}; training continues without it")

    def _warn(self, text: str) -> None:
        safe_print.say(f"jaxdp: warning: log.writers: {self.name} {text}", error=True)
