"""Faults: who records the cause before one ends this process, and which errors are consequences of another's."""

from __future__ import annotations

import contextlib
import json
import pathlib
import threading
import time
from collections.abc import Callable

from jaxdp.errors import DistributedError

RECORDING = 1.0  # seconds: a file system that hangs must not keep a process from ending
# What JAX says on a process whose collective, or coordination service, has lost another process.
CONSEQUENCES = ("gloo", "nccl", "connection", "coordination", "peer", "socket", "heartbeat", "unhealthy")
_listeners: list[Callable[[str], None]] = []


def subscribe(listener: Callable[[str], None]) -> None:
    """Call `listener` with the cause before a fault ends this process, in a thread, for RECORDING seconds at most."""
    _listeners.append(listener)


def unsubscribe(listener: Callable[[str], None]) -> None:
    _listeners.remove(listener)


def record(text: str) -> None:
    """Give the cause to those who record it: this process ends now."""

    def work() -> None:
        for listener in list(_listeners):
            with contextlib.suppress(Exception):
                listener(text)

    if _listeners:
        thread = threading.Thread(target=work, name="faults", daemon=True)
        thread.start()
        thread.join(RECORDING)


def append_event(log: str, text: str) -> None:
    """Append the cause of a fault to a run's events.jsonl, unless its last line has it."""
    with contextlib.suppress(OSError, ValueError):
        lines = pathlib.Path(log).read_text()
        if text in lines.rstrip("\n").rpartition("\n")[2]:
            return
        line = json.dumps({"t": round(time.time(), 3), "kind": "failed", "reason": text})
        with open(log, "a") as file:
            file.write(f"{line}\n" if lines.endswith("\n") or not lines else f"\n{line}\n")  # a torn line ends here


def is_consequence(error: BaseException) -> bool:
    """Return whether this looks like the error of a process that has lost another one."""
    import jax

    text = str(error).lower()
    return isinstance(error, jax.errors.JaxRuntimeError | DistributedError) and any(w in text for w in CONSEQUENCES)
