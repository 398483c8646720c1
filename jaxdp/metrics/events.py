"""events.jsonl: the events of a run with their times, one JSON object per line, appended across all
restarts.
"""

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxdp.metrics.jsonl import dump
from jaxdp.run import rundir

NAME = "events.jsonl"
BEGINS = ("start", "resume")
ENDS = ("finished", "preempted", "failed", "regroup")


class NoEvents:
    """An event log that writes nothing: for ranks other than root, and for a loop without a run
    directory.

    tell: a callback that gets the kind and the step of each event. ended: the newest one of ENDS,
    or ""."""

    ended = ""
    tell: Callable[[str, int | None], None] = staticmethod(lambda kind, step: None)

    def note(self, kind: str, step: int | None = None, **more: Any) -> None:
        """Log `start`, `resume`, `first_update`, `evaluation`, `saved`, `save_failed`,
        `rolled_back`, `stopped_early`, or one of ENDS.

        step: the number of completed updates. more: JSON, such as `seconds`, the duration, and
        `blocked`, the seconds of it that blocked the training loop, and `again`, the updates that a
        resume makes again."""


class Events(NoEvents):
    """Append events to `directory`/events.jsonl, from any thread; after a full disk, retry with the
    next event.
    """

    def __init__(self, directory: pathlib.Path):
        self.path = directory / NAME
        self.lock = threading.Lock()
        torn = self.path.is_file() and self.path.read_bytes()[-1:] not in (b"\n", b"")
        self.pending = b"\n" if torn else b""

    def note(self, kind: str, step: int | None = None, **more: Any) -> None:
        at = {} if step is None else {"step": step}
        self.tell(kind, step)
        self.ended = kind if kind in ENDS else self.ended
        event = {"t": round(time.time(), 3), "kind": kind, **at, **more}
        with self.lock, contextlib.suppress(OSError):
            self.pending += dump(event).encode()
            with open(self.path, "ab", buffering=0, opener=rundir.no_link) as file:
                while self.pending:
                    self.pending = self.pending[file.write(self.pending) :]
