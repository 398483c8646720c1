"""Authenticated messages between the ranks and their coordinator: JSON objects in frames, each with
an HMAC.

The processes of a job share a secret. The coordinator opens a connection with a magic line and a
random nonce; the client's first message contains a second nonce. Each direction has a key derived
from the secret and the nonces, and each frame is numbered, so a frame recorded on another
connection, or sent twice, is refused. Messages are authenticated, not encrypted. A message to all
ranks is encoded and hashed once: the HMAC is that of its hash.

A first message that is not authentic is answered by REFUSAL, so that a connection that breaks is
not taken for one.

    frame = length (4 bytes, big-endian) | HMAC-SHA256(key, number | SHA-256(payload)) (32 bytes) | payload (JSON)

Messages from the network are validated (size, type and range), and made safe to print.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import os
import pathlib
import secrets
from typing import Any, NamedTuple

from jaxdp.errors import UsageError

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


MAGIC = b"jaxdp coordinator 2\n"
NONCE = 32  # bytes
HEAD = 4 + 32  # bytes before the payload
REFUSAL = b"jaxdp refused your first message".ljust(HEAD)  # in the place of the head of a frame
PAYLOAD = 1 << 26  # bytes of one payload at most
FIRST_LIMIT = 1 << 16  # bytes of the first payload, before the sender is authenticated
VARIABLE = "JAXDP_SECRET"


class Refused(Exception):
    """A frame that does not come from a process with the secret, or is malformed."""


class Encoded(NamedTuple):
    """A message as bytes, and their SHA-256."""

    payload: bytes
    sha256: bytes


def encode(message: Message) -> Encoded:
    payload = json.dumps(message, separators=(",", ":")).encode()
    return Encoded(payload, hashlib.sha256(payload).digest())


class Sealer:
    """One direction of a connection: numbers and authenticates frames, or checks them."""

    def __init__(self, secret: str, direction: bytes, *nonces: bytes):
        self.key = hmac.digest(secret.encode(), b"|".join((direction, *nonces)), "sha256")
        self.number = 0

    def _digest(self, sha256: bytes) -> bytes:
        digest = hmac.digest(self.key, self.number.to_bytes(8, "big") + sha256, "sha256")
        self.number += 1
        return digest

    def seal(self, message: Encoded) -> bytes:
        """Return the frame of a message."""
        return (
            len(message.payload).to_bytes(4, "big") + self._digest(message.sha256) + message.payload
        )

    def open(self, head: bytes, payload: bytes) -> Message:
        """Return the message of a frame. Raises Refused if it was not sealed with this key and
        number.
        """
        if not hmac.compare_digest(self._digest(hashlib.sha256(payload).digest()), head[4:]):
            raise Refused("wrong secret")
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError):
            raise Refused("not JSON") from None
        if not isinstance(message, dict):
            raise Refused("not a JSON object")
        return message


def length(head: bytes, limit: int = PAYLOAD) -> int:
    """Return the number of bytes of the payload. Raises Refused if it is larger than `limit`."""
    size = int.from_bytes(head[:4], "big")
    if size > limit:
        raise Refused(f"a frame of {size:,} bytes")
    return size


def to_coordinator(secret: str, nonce: bytes) -> Sealer:
    """Return the sealer of messages from a rank to the coordinator. nonce: the coordinator's."""
    return Sealer(secret, b"to coordinator", nonce)


def to_rank(secret: str, nonce: bytes, rank_nonce: bytes) -> Sealer:
    """Return the sealer of messages from the coordinator to a rank. nonce: the coordinator's."""
    return Sealer(secret, b"to rank", nonce, rank_nonce)


def secret_file() -> pathlib.Path:
    """Return the path of the user's secret, for launchers that cannot pass one:
    ~/.config/jaxdp/secret.
    """
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return pathlib.Path(config).expanduser() / "jaxdp" / "secret"


def shared_secret() -> str:
    """Return the secret from JAXDP_SECRET, else from `secret_file`, which is created on first use.

    Raises UsageError if other users may read the file, or if it cannot be read or created.
    """
    if secret := os.environ.get(VARIABLE):
        return secret
    path = secret_file()
    fix = f"set {VARIABLE} to the same random text on every process"
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = path.with_name(f"secret.{os.getpid()}.{secrets.token_hex(4)}")
            draft.touch(mode=0o600)
            draft.write_text(secrets.token_hex(32), encoding="utf-8")
            try:
                os.link(draft, path)  # atomic: another process of the job may create it as well
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        mode = path.stat().st_mode
        owner = path.stat().st_uid
        secret = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise UsageError(
            f"{path}: the job's secret cannot be stored there ({error.strerror}): {fix}"
        ) from None
    if mode & 0o077 or owner != os.getuid() or not secret:
        raise UsageError(
            f"{path}: others can read this secret, or it is empty: remove it, or {fix}"
        )
    return secret
