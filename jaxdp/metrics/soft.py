"""A writer that may fail, or hang: training goes on without it, and says so once."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxdp.errors import UsageError, one_line
from jaxdp.metrics import aloud
from jaxdp.metrics.writer import Record, Writer

START = 10.0  # seconds that training waits for a writer to be made
PATIENCE = 30.0  # seconds, at the end, that one call of it may take
WAITING = 10_000  # calls that may wait for it


class Soft:
    """Makes another writer and passes on to it, in a thread of its own, until it raises or is stuck.

    A writer that is not made after START seconds gets what is written later. Raises UsageError where `make` does.
    """

    def __init__(self, name: str, make: Callable[[], Writer]):
        self.name, self.failed = name, False
        self.calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(WAITING)
        self.began = time.monotonic()  # when the call began that it is in
        self.refused: UsageError | None = None
        made = threading.Event()
        self.thread = threading.Thread(target=self._work, args=(make, made), name=f"writer {name}", daemon=True)
        self.thread.start()
        if not made.wait(START):
            self._warn(f"is not ready after {START:g} s; training goes on, and it gets its records once it is")
        if self.refused is not None:
            raise self.refused

    def write(self, record: Record) -> None:
        self._pass("write", dict(record))

    def say(self, text: str) -> None:
        self._pass("say", text)

    def rewind(self, step: int) -> None:
        self._pass("rewind", step)

    def close(self) -> None:
        """Waits for what is left, as long as no call takes PATIENCE seconds."""
        self._pass("close")
        while self.thread.is_alive() and not self.failed:
            left = self.began + PATIENCE - time.monotonic()
            if left <= 0:
                self._leave(f"did not answer for {PATIENCE:g} s")
            self.thread.join(min(max(left, 0.0), 1.0))

    def _pass(self, method: str, *args: Any) -> None:
        if not self.failed:
            try:
                self.calls.put_nowait((method, args))
            except queue.Full:
                self._leave(f"has {WAITING:,} records to write and takes none")

    def _work(self, make: Callable[[], Writer], made: threading.Event) -> None:
        method = ""
        try:
            writer = make()
            made.set()
            while method != "close" and not self.failed:
                method, args = self.calls.get()
                self.began = time.monotonic()
                getattr(writer, method)(*args)
        except BaseException as error:
            if isinstance(error, UsageError) and not made.is_set():
                self.refused = error
            else:
                self._leave(f"failed ({type(error).__name__}: {one_line(error)})")
        finally:
            made.set()

    def _leave(self, why: str) -> None:
        if not self.failed:
            self.failed = True
            self._warn(f"{why}; training goes on without it")

    def _warn(self, text: str) -> None:
        aloud.say(f"jaxdp: warning: log.writers: {self.name} {text}", error=True)
