"""Handle signals: SIGTERM, SIGUSR1, SIGHUP and SIGINT ask a run to save and end, SIGUSR2 to profile
its next updates.

They take effect at once, even during a compilation or a collective. Before the first update there
is nothing to save, and whatever the start waits for may never come: then a signal ends the process.

Python runs a signal handler between two instructions of the main thread, which may be inside XLA
for minutes. So the interpreter writes each signal number to a socket (`signal.set_wakeup_fd`), from
which a thread reads it."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

TRACE = "SIGUSR2"
LAST = 10  # seconds that processes may take to end after a second signal
NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGUSR2)

_received: list[str] = []
_listeners: list[Callable[[str], None]] = []
_lock = threading.Lock()
_socket: socket.socket | None = None
_previous: dict[int, Any] = {}  # signal number -> handler before `listen`
_end_start: Callable[[str], None] | None = None  # ends this process, until the first update
_interrupts = False  # whether SIGINT until then raises KeyboardInterrupt instead


def handled() -> list[int]:
    """Return the signals to handle: all but SIGHUP where `nohup` has this process ignore it."""
    return [n for n in NUMBERS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def listen(end_start: Callable[[str], None] | None = None, interrupts: bool = False) -> None:
    """Start to handle the signals. Call it in the main thread. Pending signals are handled now.

    Args:
        end_start: called in a thread, after the listeners, with the name of a signal before
            `has_started`; None: a signal never ends the process.
        interrupts: SIGINT raises KeyboardInterrupt instead, before `has_started`: a notebook must
            not end.
    """
    global _socket, _end_start, _interrupts
    if _socket is not None:
        return
    reader, _socket = socket.socketpair()
    _socket.setblocking(False)
    _end_start = end_start
    _interrupts = interrupts
    _previous.update({number: signal.getsignal(number) for number in handled()})
    act()
    signal.set_wakeup_fd(_socket.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_read, args=(reader,), name="signals", daemon=True).start()
    deliver()


def has_started() -> None:
    """From now on there is an update to save: a signal no longer ends the process at once."""
    global _end_start
    _end_start = None


def is_starting() -> bool:
    """Return whether a signal ends this process at once, since no update has been made."""
    return _end_start is not None


def deliver() -> None:
    """Unblock the signals that were blocked while the command was starting."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)


def start_verb(
    words: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start `python -m jaxdp WORDS` in which signals stay pending until it can handle them.

    Args:
        output: the file for all that it prints; None: where this process prints.
    """
    errors = None if output is None else subprocess.STDOUT
    command = [sys.executable, "-m", "jaxdp", *words]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)  # the new process inherits them
    try:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=errors)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def end_after_second(received: Sequence[int]) -> None:
    """Raise SystemExit in the main thread, LAST seconds after the second SIGTERM or SIGINT of a
    command that has started processes: one of them may hang, and cannot save. Call it in the main
    thread.

    received: the signals so far.
    """

    def end(number: int, frame: Any) -> None:
        sys.exit(1)

    if sum(number in (signal.SIGTERM, signal.SIGINT) for number in received) == 2:
        os.write(2, b"jaxdp: a second signal: what has not ended in %d s is killed\n" % LAST)
        signal.signal(signal.SIGALRM, end)
        signal.alarm(LAST)


def act() -> None:
    """Install the handlers again after `listen`, in case a library replaced one: MPICH takes
    SIGUSR1 at its start.
    """
    if _socket is not None:
        for number in _previous:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: Any) -> None:
    """Handle a signal in the main thread, which may be inside XLA for minutes; `_report` does all
    that cannot wait.
    """
    if number == signal.SIGINT and _interrupts and is_starting():
        raise KeyboardInterrupt


def end_at_once(code: int) -> None:
    """Exit with `code` on a signal, as long as this command has started no process. Call it in the
    main thread.
    """

    def end(number: int, frame: Any) -> None:
        os._exit(code)  # an exception may be lost, such as in a callback of the garbage collector

    for number in handled():
        if number != signal.SIGUSR2:
            signal.signal(number, end)


def restore() -> None:
    """Restore the handlers from before `listen`, and forget received signals. Call it in the main
    thread.
    """
    global _socket
    if _socket is None:
        return
    signal.set_wakeup_fd(-1)
    for number, handler in _previous.items():
        signal.signal(number, handler)
    _previous.clear()
    _socket.close()
    _socket = None
    has_started()
    with _lock:
        _received.clear()


def _forget() -> None:
    """Restore the default handlers in a forked child, such as a data worker, so that signals end
    it.
    """
    signal.set_wakeup_fd(-1)
    for number in handled():
        signal.signal(number, signal.SIG_DFL)


def unsubscribe(listener: Callable[[str], None]) -> None:
    with _lock:
        _listeners.remove(listener)


def subscribe(listener: Callable[[str], None]) -> None:
    """Call `listener`, in a thread, with the name of every signal; first with those already
    received.
    """
    with _lock:
        _listeners.append(listener)
        earlier = list(_received)
    for name in earlier:
        listener(name)


def _read(reader: socket.socket) -> None:
    """Report each signal whose number is received, until the other end of the socket is closed."""
    with reader:
        while number := reader.recv(1):
            if number[0] in NUMBERS:
                _report(signal.Signals(number[0]).name)


def _report(name: str) -> None:
    if name == "SIGINT" and "SIGINT" in _received:
        os.write(
            2, b"jaxdp: a second SIGINT: ends at once; checkpoints reported as saved are complete\n"
        )
        os._exit(1)
    with _lock:
        _received.append(name)
        listeners = list(_listeners)
    for listener in listeners:
        listener(name)
    if _end_start is not None and name != TRACE and not (name == "SIGINT" and _interrupts):
        _end_start(name)
    elif name == "SIGINT":
        os.write(2, b"jaxdp: SIGINT: saves, then ends; a second one ends at once\n")
