"""Print without failing: a full disk, a broken pipe or a closed stdout never ends a run."""

import contextlib
import io
import os
import sys
from typing import TextIO


def say(text: str, error: bool = False) -> None:
    """Print a line to standard output, or error; characters outside its encoding become question
    marks.
    """
    stream = sys.stderr if error else sys.stdout
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
        try:
            print(text, file=stream, flush=True)
        except UnicodeEncodeError as problem:
            print(
                text.encode(problem.encoding, "replace").decode(problem.encoding),
                file=stream,
                flush=True,
            )


def escape() -> None:
    """Let standard output and error print any text: as an escape, such as \\u00e9, what their
    encoding lacks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def draws() -> bool:
    """Return True if standard output is a terminal that can display the live panel."""
    with contextlib.suppress(OSError, ValueError):
        stream: TextIO | None = sys.stdout
        plain = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
        return (
            stream is not None
            and stream.isatty()
            and not plain
            and "utf" in (stream.encoding or "").lower()
        )
    return False


def drain() -> None:
    """Flush the output before exit, dropping what cannot be written; otherwise Python would exit
    with code 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
