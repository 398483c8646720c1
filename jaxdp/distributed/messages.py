"""Validate what comes in over the network, in one place: size, type and range; and make it safe to print."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

LIMIT = 1 << 20  # characters of one message
TEXT = 8192  # characters of a string inside a message
_reported = False


def printable(text: object, most: int = TEXT) -> str:
    """Return a text without control characters (terminal escapes, line breaks), cut at `most` characters."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:most])


def parse(text: str | bytes | None, shape: dict[str, Any], limit: int = LIMIT) -> dict[str, Any] | None:
    """Return the JSON object in `text`, or None where it is not of this shape.

    Args:
        shape: name -> what its value must be: `str`, `bool`, `float` (finite, not negative), `object` (anything), a
            `range`, None, a string, a tuple of alternatives, or a dict or one-element list of these. A name that ends
            in `?` may be absent. Other names are dropped; strings come back printable.
        limit: the most characters that the text may have.
    """
    try:
        return _checked(json.loads(text), shape) if text and len(text) <= limit else None
    except (ValueError, RecursionError):
        return None


def integer(text: str | None, end: int = 1 << 53) -> int | None:
    """Return the integer from 0 to `end` - 1 that a text is; None where it is not one."""
    value = int(text) if text and len(text) < 20 and text.isascii() and text.isdecimal() else -1
    return value if 0 <= value < end else None


def _checked(value: Any, kind: Any) -> Any:
    """Return `value` with printable strings; ValueError where it is not of this kind."""
    if isinstance(kind, tuple):
        for alternative in kind:
            with contextlib.suppress(ValueError):
                return _checked(value, alternative)
    if kind is object:
        return value
    match value:
        case dict() if isinstance(kind, dict):
            present = {name.rstrip("?"): k for name, k in kind.items() if name[-1] != "?" or name[:-1] in value}
            return {name: _checked(value.get(name), k) for name, k in present.items()}
        case list() if isinstance(kind, list):
            return [_checked(v, kind[0]) for v in value]
        case str() if kind is str and len(value) <= TEXT:
            return printable(value)
        case bool() if kind is bool:
            return value
        case int() | float() if kind is float and not isinstance(value, bool) and 0 <= value < math.inf:
            return value
        case int() if isinstance(kind, range) and not isinstance(value, bool) and value in kind:
            return value
        case str() | None if value == kind:
            return value
    raise ValueError


def exchanged(text: str) -> str | None:
    """One rank's text of an exchange; its line breaks stay, other control characters do not."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return "\n".join(printable(line, len(line)) for line in value.split("\n")) if isinstance(value, str) else None


def exchange_verdict(text: str, members: Sequence[int]) -> dict[str, Any] | None:
    """What the first member published: {missing: ranks}, or {texts: of the members, in their order}."""
    of, ranks = [range(len(members))], [range(max(members) + 1)]
    verdict = parse(text, {"missing?": ranks, "kinds?": [object], "of?": of}, limit=1 << 30)
    if verdict is None or verdict.get("missing"):
        return verdict
    kinds = [exchanged(json.dumps(kind)) for kind in verdict.get("kinds", [])]
    if len(verdict.get("of", [])) != len(members) or max(verdict["of"]) >= len(kinds) or None in kinds:
        return None
    return {"texts": [kinds[i] for i in verdict["of"]]}


def report_refused(what: str, value: object, who: str = "jaxdp") -> None:
    """Print, once a process, that a message was refused; whatever `value` holds, it is shown as safe text."""
    global _reported
    if not _reported:
        _reported = True
        sys.stderr.write(
            f"{who}: refused {printable(what, 200)}: {printable(repr(value), 80)} is no message of this job; the job "
            "continues, further ones are refused without a line (who can reach its port? see docs/hosts.md)\n"
        )
