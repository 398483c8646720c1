"""Agreement of all processes on a save: each learns at once if another could not write its part."""

import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from jaxdp.checkpoint import manifest
from jaxdp.checkpoint.orbax import TIMEOUT
from jaxdp.errors import one_line
from jaxdp.process import membership
from jaxdp.process.context import Context


class PeerFailed(Exception):
    """Another process could not save; the message names it and the reason."""


class Commit:
    """The messages of one save between root and the other processes: each sends and receives a
    number that does not grow with the number of processes."""

    def __init__(self, context: Context):
        member = membership.current()
        self.context = context
        self.turn = member.turn("save") if member else 0
        self.attempt = (
            f"{member.job.generation if member else 0}-{self.turn}"  # the same on all processes
        )

    def wait_for(self, response: Any) -> None:
        """Wait until Orbax has committed on this process. Raises PeerFailed as soon as another
        could not.

        response: Orbax's; None if this process writes nothing.
        """
        deadline = time.monotonic() + TIMEOUT
        while response is not None:
            asked = time.monotonic()
            try:
                response.result(timeout=0.2)
                return
            except TimeoutError:
                if (
                    time.monotonic() - asked < 0.1
                ):  # Orbax's timeout: it uses the wall clock, which may be changed
                    raise
                self._raise_if_failed()
                if time.monotonic() > deadline:
                    raise

    def scatter(self, name: str, texts: Sequence[str]) -> str:
        """Return root's text for this process; texts: one for each process, on root. Raises
        PeerFailed.
        """
        if self.context.size == 1:
            return texts[0]
        if self.context.is_root:
            for rank, text in enumerate(texts):
                membership.joined().put(self._key(f"{name}/{rank}"), text)
        return self._get(f"{name}/{self.context.rank}")

    def gather(self, name: str, text: str) -> list[str]:
        """Return the texts of all processes on root, and nothing on the others. Raises PeerFailed."""
        if self.context.size == 1:
            return [text]
        membership.joined().put(self._key(f"{name}/{self.context.rank}"), text)
        return [
            self._get(f"{name}/{rank}")
            for rank in range(self.context.size if self.context.is_root else 0)
        ]

    def digests(self, folder: pathlib.Path) -> manifest.Files:
        """Return on root the sizes and checksums of the files in a folder that all see; each
        process reads a share.
        """
        size = self.context.size
        names = manifest.list_files(folder) if self.context.is_root else []
        share = json.loads(self.scatter("files", [json.dumps(names[r::size]) for r in range(size)]))
        digests = manifest.digests(folder, share)
        manifest.flush(folder, share)
        parts = self.gather("digests", json.dumps(digests))
        return {
            name: (size, sha256)
            for part in parts
            for name, (size, sha256) in json.loads(part).items()
        }

    def wait_for_all(self, name: str) -> None:
        """Wait for all processes. Raises PeerFailed as soon as one could not save."""
        self.gather(name, "")
        self.scatter(f"after {name}", [""] * self.context.size)

    def report_failure(self, reason: str) -> None:
        """Tell the others that this process cannot save."""
        if self.context.size > 1:
            membership.joined().announce(self._key("failed"), f"rank {self.context.rank}: {reason}")

    def _get(self, name: str) -> str:
        """Wait for the text under a name. All processes together ask at most 1,000 times a second."""
        deadline = time.monotonic() + TIMEOUT
        while (
            text := membership.joined().get(self._key(name), max(0.2, self.context.size / 1000))
        ) is None:
            self._raise_if_failed()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} of the save has not arrived after {TIMEOUT:g} s")
        return text

    def _raise_if_failed(self) -> None:
        if self.context.size > 1:
            membership.joined().check_generation()
            if (failure := membership.joined().announced(self._key("failed"))) is not None:
                raise PeerFailed(failure)

    def _key(self, name: str) -> str:
        return f"save/{self.turn}/{name}"


def reason_of(error: BaseException) -> str:
    """Return why a save has failed, in one line."""
    member = membership.current()
    if member is not None and member.ended is not None:
        return member.ended  # a process was lost, and others go on
    text = one_line(error) or type(error).__name__
    return "no space left on the device" if "No space left" in text else text[:300]
