"""An error out of a user's own code is said in one line: what was called, what went wrong, and at which line of theirs.

Ours and the libraries' frames say nothing to who wrote a model; the last lines of their own files do.
"""

import contextlib
import os
import pathlib
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from jaxdp.errors import Said, UsageError, one_line

PACKAGE = pathlib.Path(__file__).parent
STANDARD = sysconfig.get_path("stdlib")
# What calls a user's code, by its place in the package, and the key of a config that names what is called.
CALLERS = {"losses": "loss", "models": "model", "data/transforms": "data.transform", "data": "data"}
SHOWN = 3  # of their lines
TRACED = re.compile(r" The error occurred while tracing the function .+? for \w+\.")  # JAX's words on a line of ours


@contextlib.contextmanager
def said(given: Callable[[str], str] = lambda key: "") -> Iterator[None]:
    """Raise UsageError, from it, for an error on whose way a user's code is, or a model, loss or transform of ours.

    Of ours, a TypeError or ValueError only: shapes and dtypes of its arguments that do not fit the data.

    given: what the code of a key ("model", ...) was called with, in words.
    """
    try:
        yield
    except Said:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own, key = lines(error), caller(frames)
        if not own and (key in ("config", "data") or not isinstance(error, TypeError | ValueError)):
            raise
        text = f"{type(error).__name__}: {TRACED.sub('', one_line(error)).rstrip('.')}"
        text += "".join(f", {note}" for note in getattr(error, "__notes__", ()) if "\n" not in note)
        with contextlib.suppress(Exception):  # what it was given is a help, and may be what is wrong
            text += given(key)
        if not own:
            raise UsageError(f"{key}: its arguments do not fit the data: {text}") from error
        raise UsageError(f"{key}: it failed at {own}: {text}") from error


def lines(error: BaseException) -> str:
    """The lines of a user's own that an error came by, the last first; "" where there are none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    if not own:
        return ""
    last, *before = own[::-1][:SHOWN]
    way = "".join(f", from {shortly(frame.filename)}:{frame.lineno}" for frame in before)
    return f"{shortly(last.filename)}:{last.lineno} (in {last.name}: {last.line}{way})"


def is_own(file: str) -> bool:
    """Whether it is neither ours, nor Python's, nor of something installed."""
    path = pathlib.Path(file)
    installed = {"site-packages", "dist-packages"} & {*path.parts} or file.startswith((STANDARD, "<"))
    return not installed and PACKAGE not in path.parents


def shortly(file: str) -> str:
    inside = os.path.relpath(file)
    return file if inside.startswith("..") else inside


def caller(frames: Any) -> str:
    """The key of a config whose code was called."""
    key = "config"
    for frame in frames:
        if is_own(frame.filename):
            return key
        if PACKAGE in (path := pathlib.Path(frame.filename)).parents:
            place = path.relative_to(PACKAGE).as_posix()
            key = next((key for start, key in CALLERS.items() if place.startswith(start)), key)
    return key
