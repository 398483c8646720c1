"""SIGTERM, SIGUSR1 and SIGINT ask a run to save and end, SIGUSR2 to profile its next updates.

They are heard at once, also in a compilation or a collective.

Python runs a signal's handler between two instructions of the main thread, which may be inside XLA for minutes. So the
interpreter writes the number to a socket as it comes in (`signal.set_wakeup_fd`), and a thread reads it there.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

TRACE = "SIGUSR2"
NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2)

_heard: list[str] = []
_listeners: list[Callable[[str], None]] = []
_lock = threading.Lock()
_socket: socket.socket | None = None
_before: dict[int, Any] = {}


def listen() -> None:
    """From now on the signals end nothing by themselves, but a second SIGINT does, at once. In the main thread.

    Those that came before and are pending are heard now.
    """
    global _socket
    if _socket is not None:
        return
    ours, _socket = socket.socketpair()
    _socket.setblocking(False)
    _before.update({number: signal.getsignal(number) for number in NUMBERS})
    heed()
    signal.set_wakeup_fd(_socket.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_read, args=(ours,), name="signals", daemon=True).start()
    deliver()


def deliver() -> None:
    """Let the signals come that were blocked while the command was starting."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)


def heed() -> None:
    """Once `listen` was called: takes the signals again from a library, such as MPICH, whose start takes SIGUSR1."""
    if _socket is not None:
        for number in NUMBERS:
            signal.signal(number, lambda number, frame: None)


def rest() -> None:
    """The signals do again what they did before `listen`, and what was heard is forgotten. In the main thread."""
    global _socket
    if _socket is None:
        return
    signal.set_wakeup_fd(-1)
    for number, handler in _before.items():
        signal.signal(number, handler)
    _socket.close()
    _socket = None
    with _lock:
        _heard.clear()


def _forget() -> None:
    """A forked child, such as a worker of a loader, dies of its signals as before, and they are not ours."""
    signal.set_wakeup_fd(-1)
    for number in NUMBERS:
        signal.signal(number, signal.SIG_DFL)


def unsubscribe(listener: Callable[[str], None]) -> None:
    with _lock:
        _listeners.remove(listener)


def subscribe(listener: Callable[[str], None]) -> None:
    """`listener` is told the name of every signal, in a thread, and first of those that have come already."""
    with _lock:
        _listeners.append(listener)
        before = list(_heard)
    for name in before:
        listener(name)


def _read(ours: socket.socket) -> None:
    """Report each signal whose number comes; end when the other end of the socket is closed."""
    with ours:
        while received := ours.recv(1):
            if received[0] in NUMBERS:
                _report(signal.Signals(received[0]).name)


def _report(name: str) -> None:
    if name == "SIGINT" and "SIGINT" in _heard:
        sys.stderr.write("jaxdp: a second SIGINT: ends at once; what was said to be saved is\n")
        sys.stderr.flush()
        os._exit(1)
    with _lock:
        _heard.append(name)
        listeners = list(_listeners)
    if name == "SIGINT":
        sys.stderr.write("jaxdp: SIGINT: saves, then ends; once more ends at once\n")
        sys.stderr.flush()
    for listener in listeners:
        listener(name)
