"""Agreement of all processes on a save: each learns at once if another could not write its part."""

import json
import pathlib
import time
from typing import Any

from jaxdp.checkpoint import manifest
from jaxdp.checkpoint.orbax import TIMEOUT
from jaxdp.distributed import membership
from jaxdp.distributed.context import Context
from jaxdp.errors import one_line


class PeerFailed(Exception):
    """Another process could not save; the message names it and the reason."""


class Commit:
    """The messages of one save between all processes."""

    def __init__(self, context: Context):
        self.context, self.turn = context, membership.joined().turn("save") if context.size > 1 else 0
        if context.is_root and self.turn > 1:
            membership.joined().forget(f"save/{self.turn - 2}/")

    def wait_for(self, response: Any) -> None:
        """Wait until Orbax has committed on this process. Raises PeerFailed as soon as another could not.

        response: Orbax's; None if this process writes nothing.
        """
        deadline = time.monotonic() + TIMEOUT
        while response is not None:
            asked = time.monotonic()
            try:
                response.result(timeout=0.2)
                return
            except TimeoutError:
                if time.monotonic() - asked < 0.1:  # Orbax's timeout: it uses the wall clock, which may be changed
                    raise
                self._raise_if_failed()
                if time.monotonic() > deadline:
                    raise

    def share(self, name: str, text: str) -> list[str]:
        """Return the texts of all processes. Unlike `Context.exchange`, raise PeerFailed if another could not save."""
        if self.context.size == 1:
            return [text]
        membership.joined().put(self._key(f"{name}/{self.context.rank}"), text)
        deadline = time.monotonic() + TIMEOUT
        texts = []
        for rank in range(self.context.size):
            while (posted := membership.joined().get(self._key(f"{name}/{rank}"), 0.2)) is None:
                self._raise_if_failed()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} has not written its part after {TIMEOUT:g} s")
            texts.append(posted)
        return texts

    def digests(self, folder: pathlib.Path) -> manifest.Files:
        """Return the sizes and checksums of the files in a folder that all processes see; each reads a share."""
        names = manifest.list_files(folder) if self.context.is_root else []
        names = json.loads(self.share("files", json.dumps(names))[self.context.root_rank])
        share = names[self.context.rank :: self.context.size]
        parts = self.share("digests", json.dumps(manifest.digests(folder, share)))
        return {name: (size, sha256) for part in parts for name, (size, sha256) in json.loads(part).items()}

    def report_failure(self, reason: str) -> None:
        """Tell the others that this process cannot save."""
        if self.context.size > 1:
            membership.joined().put(self._key("failed"), f"rank {self.context.rank}: {reason}")

    def _raise_if_failed(self) -> None:
        if self.context.size > 1 and (failure := membership.joined().get(self._key("failed"))) is not None:
            raise PeerFailed(failure)

    def _key(self, name: str) -> str:
        return f"save/{self.turn}/{name}"


def reason_of(error: BaseException) -> str:
    """Return why a save has failed, in one line."""
    member = membership.current()
    if member is not None and member.over is not None:
        return member.over  # the lost process of an elastic job
    text = one_line(error) or type(error).__name__
    return "no space left on the device" if "No space left" in text else text[:300]
