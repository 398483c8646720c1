"""Agreement of all processes on a save: each learns at once if another could not write its part."""

import time
from typing import Any

from jaxdp.checkpoint.orbax import TIMEOUT
from jaxdp.distributed import membership
from jaxdp.distributed.context import Context
from jaxdp.errors import one_line


class PeerFailed(Exception):
    """Another process could not save; the message names it and the reason."""


class Commit:
    """The messages of one save between all processes."""

    def __init__(self, context: Context):
        self.context, self.member = context, membership.current() if context.size > 1 else None
        self.name = f"save {self.member.turn('save')}" if self.member is not None else ""

    def wait_for(self, response: Any) -> None:
        """Wait until Orbax has committed on this process. Raises PeerFailed as soon as another could not."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            asked = time.monotonic()
            try:
                return response.result(timeout=0.2)
            except TimeoutError:
                if time.monotonic() - asked < 0.1:  # Orbax's timeout: it uses the wall clock, which may be changed
                    raise
                self._raise_if_failed()
                if time.monotonic() > deadline:
                    raise

    def share(self, name: str, text: str) -> list[str]:
        """Return the texts of all processes. Raises PeerFailed as soon as another could not save."""
        if self.member is None:
            return [text]
        ranks = range(self.context.size)
        return self.member.exchange(f"{self.name} {name}", text, ranks, TIMEOUT, check=self._raise_if_failed)

    def report_failure(self, reason: str) -> None:
        """Tell the others that this process cannot save."""
        if self.member is not None:
            self.member.announce(f"{self.name} failed", f"rank {self.context.rank}: {reason}")

    def _raise_if_failed(self) -> None:
        if self.member is not None:
            self.member.check_generation()
            if (failure := self.member.announced(f"{self.name} failed")) is not None:
                raise PeerFailed(failure)


def reason_of(error: BaseException) -> str:
    """Return why a save has failed, in one line."""
    member = membership.current()
    if member is not None and member.over is not None:
        return member.over  # the lost process of an elastic job
    text = one_line(error) or type(error).__name__
    return "no space left on the device" if "No space left" in text else text[:300]
