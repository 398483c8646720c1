"""The open exchanges of texts between ranks, in the coordinator."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Collection
from typing import Any

Reply = Callable[[dict[str, Any]], None]
REMEMBERED = 64  # verdicts of failed exchanges, for ranks that arrive too late


@dataclasses.dataclass
class Exchange:
    """One open exchange. await_responsive: wait beyond the deadline for ranks that are not silent."""

    members: tuple[int, ...]
    deadline: float
    await_responsive: bool
    texts: dict[int, str] = dataclasses.field(default_factory=dict)
    replies: list[Reply] = dataclasses.field(default_factory=list)

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.texts]

    def answer(self, verdict: dict[str, Any]) -> None:
        for reply in self.replies:
            reply(verdict)


class Exchanges:
    """The open exchanges: each member adds a text, and all members receive all texts once they are complete.

    departed: the ranks that have left the job.
    """

    def __init__(self, departed: Collection[int]) -> None:
        self.departed = departed
        self.open: dict[tuple[Any, ...], Exchange] = {}
        self.failed: collections.OrderedDict[tuple[Any, ...], dict[str, Any]] = collections.OrderedDict()

    def add(
        self,
        rank: int,
        members: tuple[int, ...],
        reply: Reply,
        name: str,
        turn: int,
        text: str,
        timeout: float,
        await_responsive: bool,
    ) -> None:
        """Add a rank's text; the replies are {texts}, {missing, texts} at the deadline, or {left: ranks}."""
        key = (name, members, turn)
        if key in self.failed:
            reply(self.failed[key])
            return
        deadline = time.monotonic() + timeout
        exchange = self.open.setdefault(key, Exchange(members, deadline, await_responsive))
        exchange.texts[rank] = text
        exchange.replies.append(reply)
        if not exchange.missing:
            del self.open[key]
            kinds = list(dict.fromkeys(exchange.texts.values()))  # most texts are equal: send each distinct one once
            exchange.answer({"kinds": kinds, "of": [kinds.index(exchange.texts[m]) for m in members]})
        elif absent := [m for m in exchange.missing if m in self.departed]:
            self.fail(key, {"left": absent})

    def fail(self, key: tuple[Any, ...], verdict: dict[str, Any]) -> None:
        self.open.pop(key).answer(verdict)
        self.failed[key] = verdict
        if len(self.failed) > REMEMBERED:
            self.failed.popitem(last=False)

    def remove_rank(self, rank: int) -> None:
        """Fail the exchanges that wait for a rank which has left the job."""
        for key in [key for key, exchange in self.open.items() if rank in exchange.missing]:
            self.fail(key, {"left": [rank]})

    def expire(self, is_responsive: Callable[[int], bool]) -> None:
        """Fail the exchanges whose deadline has passed."""
        now = time.monotonic()
        for key, exchange in list(self.open.items()):
            waits = exchange.await_responsive and all(map(is_responsive, exchange.missing))
            if now > exchange.deadline and not waits:
                self.fail(key, {"missing": exchange.missing, "texts": exchange.texts})
