"""events.jsonl: what happened to a run and when, one JSON object per line; never rewritten, over all its restarts."""

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxdp import rundir
from jaxdp.metrics.jsonl import dump

NAME = "events.jsonl"
BEGINS = ("start", "resume")
ENDS = ("finished", "preempted", "failed")


class NoEvents:
    """What the ranks other than root note, and a loop without a run directory.

    tell: is told the kind and the step of each event that is noted.
    """

    tell: Callable[[str, int | None], None] = staticmethod(lambda kind, step: None)

    def note(self, kind: str, step: int | None = None, **more: Any) -> None:
        """kind: `start`, `resume`, `first_update`, `evaluation`, `saved`, `save_failed`, `rolled_back`, or one of ENDS.

        step: updates made by then. more: JSON, such as `seconds` that it took, of which `blocked` held up the loop.
        """

    def check_directory(self) -> None:
        """Raise RunFailed where the run directory was removed."""


class Events(NoEvents):
    """Appends to `directory`/events.jsonl, from any thread; what a full disk does not take is written with the next."""

    def __init__(self, directory: pathlib.Path):
        self.path = directory / NAME
        self.lock = threading.Lock()
        torn = self.path.is_file() and self.path.read_bytes()[-1:] not in (b"\n", b"")
        self.pending = b"\n" if torn else b""

    def note(self, kind: str, step: int | None = None, **more: Any) -> None:
        at = {} if step is None else {"step": step}
        self.tell(kind, step)
        event = {"t": round(time.time(), 3), "kind": kind, **at, **more}
        with self.lock, contextlib.suppress(OSError):
            self.pending += dump(event).encode()
            with self.path.open("ab", buffering=0) as file:
                while self.pending:
                    self.pending = self.pending[file.write(self.pending) :]

    def check_directory(self) -> None:
        rundir.require(self.path.with_name("metrics.jsonl"))
