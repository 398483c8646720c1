"""Faults that end this process: record the cause, and recognize errors that another process's fault
has caused.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable

from jaxdp.errors import DistributedError

RECORDING = 1.0  # seconds: a hanging file system must not keep a process from ending
# Words in JAX's errors on a process whose collective, or coordination service, has lost another
# process.
CONSEQUENCES = (
    "gloo",
    "nccl",
    "connection",
    "coordination",
    "peer",
    "socket",
    "heartbeat",
    "unhealthy",
)
_listeners: list[Callable[[str], None]] = []


def subscribe(listener: Callable[[str], None]) -> None:
    """Call `listener` with the cause before a fault ends this process, in a thread, for RECORDING
    seconds at most.
    """
    _listeners.append(listener)


def unsubscribe(listener: Callable[[str], None]) -> None:
    _listeners.remove(listener)


def record(text: str) -> None:
    """Pass the cause to all listeners, just before this process ends."""

    def work() -> None:
        for listener in list(_listeners):
            with contextlib.suppress(Exception):
                listener(text)

    if _listeners:
        thread = threading.Thread(target=work, name="faults", daemon=True)
        thread.start()
        thread.join(RECORDING)


def append_event(log: str, text: str) -> None:
    """Append the cause of a fault to a run's events.jsonl, unless its last line contains it."""
    with contextlib.suppress(OSError, ValueError):
        lines = pathlib.Path(log).read_text(encoding="utf-8", errors="replace")
        if text in lines.rstrip("\n").rpartition("\n")[2]:
            return
        line = json.dumps({"t": round(time.time(), 3), "kind": "failed", "reason": text})
        with open(
            log,
            "a",
            encoding="utf-8",
            opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666),
        ) as file:
            file.write(
                f"{line}\n" if lines.endswith("\n") or not lines else f"\n{line}\n"
            )  # end a torn line


def is_consequence(error: BaseException) -> bool:
    """Return whether this looks like the error of a process that lost its connection to another."""
    import jax

    text = str(error).lower()
    if isinstance(error, ValueError):  # JAX's kind for a status of UNKNOWN
        return "gloo" in text
    return isinstance(error, jax.errors.JaxRuntimeError | DistributedError) and any(
        w in text for w in CONSEQUENCES
    )
