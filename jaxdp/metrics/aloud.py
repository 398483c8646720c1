"""What is said to people is said where it can be: a full disk, a pipe whose reader left or no output end no run."""

import contextlib
import os
import sys
from typing import TextIO


def say(text: str, error: bool = False) -> None:
    """A line to standard output, or error; what its encoding has not becomes a question mark."""
    stream = sys.stderr if error else sys.stdout
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        try:
            print(text, file=stream, flush=True)
        except UnicodeEncodeError as problem:
            print(text.encode(problem.encoding, "replace").decode(problem.encoding), file=stream, flush=True)


def draws() -> bool:
    """Whether standard output is a terminal that can be drawn on, in the characters that a panel needs."""
    with contextlib.suppress(OSError, ValueError):
        stream: TextIO | None = sys.stdout
        plain = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
        return stream is not None and stream.isatty() and not plain and "utf" in (stream.encoding or "").lower()
    return False


def drain() -> None:
    """Before the end: what cannot be written any more is dropped, or Python would end with code 120 over it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
