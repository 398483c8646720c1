"""Validate messages from the network (size, type and range), and make them safe to print."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

Message = dict[str, Any]  # a decoded JSON object
LIMIT = 1 << 20  # characters of one message
TEXT = 8192  # characters of a string inside a message
LONG_TEXT = object()  # kind of a string of any length; its line breaks are not removed


def printable(text: object, most: int = TEXT) -> str:
    """Return a text without control characters (terminal escapes, line breaks), cut at `most`
    characters.
    """
    return "".join(c if c.isprintable() else "?" for c in str(text)[:most])


def parse(text: str | bytes | None, shape: dict[str, Any]) -> Message | None:
    """Return the JSON object in `text`, or None if it does not have this shape.

    Args:
        shape: name -> kind of its value: `str`, `bool`, `float` (finite, not negative), `object`
            (anything), a `range`, None, True, a string, LONG_TEXT, a tuple of alternatives, or a
            dict or one-element list of these. A name that ends in `?` may be absent. Other names
            are dropped; strings are made printable.
    """
    try:
        return _checked(json.loads(text), shape) if text and len(text) <= LIMIT else None
    except (ValueError, RecursionError):
        return None


def checked(message: Any, shape: dict[str, Any]) -> Message | None:
    """Check a decoded JSON message as `parse` does, and return its values; None if it has another
    shape.
    """
    try:
        return _checked(message, shape)
    except ValueError:
        return None


def integer(text: str | None, end: int = 1 << 53) -> int | None:
    """Parse a decimal integer from 0 to `end` - 1; return None for any other text."""
    value = int(text) if text and len(text) < 20 and text.isascii() and text.isdecimal() else -1
    return value if 0 <= value < end else None


def _checked(value: Any, kind: Any) -> Any:
    """Return `value` with printable strings. Raises ValueError if it is not of this kind."""
    if isinstance(kind, tuple):
        for alternative in kind:
            with contextlib.suppress(ValueError):
                return _checked(value, alternative)
    if kind is object:
        return value
    if kind is LONG_TEXT and isinstance(value, str):
        return (
            value
            if value.isprintable()
            else "\n".join(printable(line, len(line)) for line in value.split("\n"))
        )
    match value:
        case dict() if isinstance(kind, dict):
            present = {
                name.rstrip("?"): k
                for name, k in kind.items()
                if name[-1] != "?" or name[:-1] in value
            }
            return {name: _checked(value.get(name), k) for name, k in present.items()}
        case list() if (
            isinstance(kind, list) and isinstance(kind[0], range) and {*map(type, value)} == {int}
        ):
            if min(value) in kind[0] and max(value) in kind[0]:  # long lists, so not one by one
                return value
        case list() if isinstance(kind, list):
            return [_checked(v, kind[0]) for v in value]
        case str() if kind is str and len(value) <= TEXT:
            return printable(value)
        case bool() if kind is bool:
            return value
        case int() | float() if (
            kind is float and not isinstance(value, bool) and 0 <= value < math.inf
        ):
            return value
        case int() if isinstance(kind, range) and not isinstance(value, bool) and value in kind:
            return value
        case str() | bool() | None if value == kind and type(value) is type(kind):
            return value
    raise ValueError
