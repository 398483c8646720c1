"""Report an error in a user's code in one line: the key of the config, the error, and the lines of
the user's files.

Frames of jaxdp and of libraries do not help the author of a model; the last frames in the author's
own files do."""

import contextlib
import os
import pathlib
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxdp.errors import ReportedError, UsageError, one_line

PACKAGE = pathlib.Path(__file__).parent.parent
STANDARD = sysconfig.get_path("stdlib")
# Modules of this package that call a user's code -> the key of the config that names this code.
CALLERS = {"losses": "loss", "models": "model", "data/transforms": "data.transform", "data": "data"}
SHOWN = 3  # lines of the user's files in a message
TRACED = re.compile(
    r" The error occurred while tracing the function .+? for \w+\."
)  # JAX's note on a line of jaxdp


@contextlib.contextmanager
def reported(called_with: Callable[[str], str] = lambda key: "") -> Iterator[None]:
    """Turn an error raised in a user's code, or in a built-in model, loss or transform, into a
    UsageError.

    In built-in code, convert only TypeError and ValueError: shapes and dtypes that do not fit the
    data.

    called_with: returns a description of the arguments for a key ("model", ...).
    """
    try:
        yield
    except ReportedError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        user_lines = lines(error)
        key = caller(frames)
        if not user_lines and (
            key in ("config", "data") or not isinstance(error, TypeError | ValueError)
        ):
            raise
        text = f"{type(error).__name__}: {TRACED.sub('', one_line(error)).rstrip('.')}"
        text += "".join(f", {note}" for note in getattr(error, "__notes__", ()) if "\n" not in note)
        with contextlib.suppress(
            Exception
        ):  # describing the arguments may fail for the same reason
            text += called_with(key)
        if not user_lines:
            raise UsageError(f"{key}: its arguments do not fit the data: {text}") from error
        raise UsageError(f"{key}: it failed at {user_lines}: {text}") from error


def lines(error: BaseException) -> str:
    """Return the lines of the user's files in the traceback of an error, innermost first; "" if
    there are none.
    """
    user_frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)
    ]
    if not user_frames:
        return ""
    innermost, *outer = user_frames[::-1][:SHOWN]
    callers = "".join(f", from {relative(frame.filename)}:{frame.lineno}" for frame in outer)
    return f"{relative(innermost.filename)}:{innermost.lineno} (in {innermost.name}: {innermost.line}{callers})"


def cause(error: BaseException) -> str:
    """Return " at LINES: TYPE: message" of an error, without the lines if none are the user's."""
    where = lines(error)
    return f"{f' at {where}' if where else ''}: {type(error).__name__}: {one_line(error)}"


def is_own(file: str) -> bool:
    """Return whether a file is the user's: not in jaxdp, the standard library or an installed
    package.
    """
    path = pathlib.Path(file)
    installed = {"site-packages", "dist-packages"} & {*path.parts} or file.startswith(
        (STANDARD, "<")
    )
    return not installed and PACKAGE not in path.parents


def relative(file: str) -> str:
    """Return a path relative to the working directory if it is inside it, else unchanged."""
    path = os.path.relpath(file)
    return file if path.startswith("..") else path


def caller(frames: Any) -> str:
    """Return the key of the config whose code was called."""
    key = "config"
    for frame in frames:
        if is_own(frame.filename):
            return key
        if PACKAGE in (path := pathlib.Path(frame.filename)).parents:
            module = path.relative_to(PACKAGE).as_posix()
            key = next((key for start, key in CALLERS.items() if module.startswith(start)), key)
    return key


def refuse_losses(sown: Iterable[tuple[str, str]]) -> None:
    """Raise UsageError if any of the values that a model sows (path, type) is a loss, by its path
    or type.
    """
    for path, kind in sown:
        if "loss" in f"{path} {kind}".lower():
            raise UsageError(
                f"model: what it sows into {path!r} would not be part of the loss; return it among the outputs, and "
                "add it in the loss"
            )
