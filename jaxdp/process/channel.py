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
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import pathlib
import secrets
from typing import NamedTuple

from jaxdp.errors import UsageError
from jaxdp.process.messages import Message

MAGIC = b"jaxdp coordinator 2\n"
NONCE = 32  # bytes
HEAD = 4 + 32  # bytes before the payload
REFUSAL = b"jaxdp refused your first message".ljust(HEAD)  # in the place of the head of a frame
LIMIT = 1 << 26  # bytes of one payload
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


def length(head: bytes, limit: int = LIMIT) -> int:
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
