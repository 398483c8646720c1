"""What ends a process in the middle of things is told, before it ends, to those who keep a record."""

import contextlib
import threading
from collections.abc import Callable

PATIENCE = 1.0  # seconds: a file system that hangs must not keep a process from ending
_listeners: list[Callable[[str], None]] = []


def subscribe(listener: Callable[[str], None]) -> None:
    """`listener` is given the line that says why, in a thread of its own, and has PATIENCE seconds."""
    _listeners.append(listener)


def unsubscribe(listener: Callable[[str], None]) -> None:
    _listeners.remove(listener)


def tell(text: str) -> None:
    """This process ends now."""

    def work() -> None:
        for listener in list(_listeners):
            with contextlib.suppress(Exception):
                listener(text)

    if _listeners:
        thread = threading.Thread(target=work, name="last words", daemon=True)
        thread.start()
        thread.join(PATIENCE)
