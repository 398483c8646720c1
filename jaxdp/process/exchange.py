"""The open exchanges of texts between ranks, in the coordinator."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jaxdp.process.channel import Encoded, encode
from jaxdp.process.messages import Message

Answer = Callable[[str], Encoded]  # the answer to the requests with an id
Reply = Callable[[Answer], None]
REMEMBERED = 64  # results of failed exchanges, for ranks that arrive too late
KEYS = 1 << 16  # the newest that are kept: those of three saves of 4,096 ranks, five for each


@dataclasses.dataclass
class Exchange:
    """One open exchange. await_responsive: wait beyond the deadline for ranks that are not silent."""

    members: Sequence[int]
    deadline: float
    await_responsive: bool

    def __post_init__(self) -> None:
        self.missing = set(self.members)
        self.texts: dict[int, str] = {}
        self.replies: list[Reply] = []

    def answer(self, result: Message) -> Answer:
        """Send the result to all, encoded once for all requests with the same id; return what
        encodes it.
        """
        answer = functools.cache(lambda id: encode({"id": id, **result}))
        for reply in self.replies:
            reply(answer)
        return answer


class Exchanges:
    """The open exchanges: each member adds a text, and all members receive all texts once they are
    complete.

    departed: the ranks that have left the job.
    """

    def __init__(self, departed: Collection[int]) -> None:
        self.departed = departed
        self.open: dict[tuple[Any, ...], Exchange] = {}
        self.failed: collections.OrderedDict[tuple[Any, ...], Answer] = collections.OrderedDict()

    def add(
        self,
        rank: int,
        members: Sequence[int],
        reply: Reply,
        name: str,
        turn: int,
        text: str,
        timeout: float,
        await_responsive: bool,
    ) -> None:
        """Add a rank's text; the replies are {kinds, of}, {missing, texts} at the deadline, or
        {left: ranks}.
        """
        key = (name, members, turn)
        if key in self.failed:
            reply(self.failed[key])
            return
        if key not in self.open:
            self.open[key] = Exchange(members, time.monotonic() + timeout, await_responsive)
        exchange = self.open[key]
        exchange.texts[rank] = text
        exchange.missing.discard(rank)
        exchange.replies.append(reply)
        if not exchange.missing:
            del self.open[key]
            kinds = {
                text: i for i, text in enumerate(dict.fromkeys(exchange.texts.values()))
            }  # most are equal
            exchange.answer({"kinds": [*kinds], "of": [kinds[exchange.texts[m]] for m in members]})
        elif absent := exchange.missing.intersection(self.departed) if self.departed else ():
            self.fail(key, {"left": sorted(absent)})

    def fail(self, key: tuple[Any, ...], result: Message) -> None:
        self.failed[key] = self.open.pop(key).answer(result)
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
            late = now > exchange.deadline
            if late and not (
                exchange.await_responsive and all(map(is_responsive, exchange.missing))
            ):
                self.fail(key, {"missing": sorted(exchange.missing), "texts": exchange.texts})


class Keys:
    """A key-value store of the newest KEYS texts; a reader may wait for a key."""

    def __init__(self) -> None:
        self.texts: collections.OrderedDict[str, str] = collections.OrderedDict()
        self.waiting: dict[
            str, list[tuple[float, Callable[[str | None], None]]]
        ] = {}  # {key: (deadline, reply)}

    def put(self, key: str, text: str) -> None:
        self.texts[key] = text
        if len(self.texts) > KEYS:
            self.texts.popitem(last=False)
        for _, reply in self.waiting.pop(key, ()):
            reply(text)

    def get(self, key: str, timeout: float, reply: Callable[[str | None], None]) -> None:
        """Reply with the text, or with None after `timeout` seconds."""
        if key in self.texts or not timeout:
            reply(self.texts.get(key))
        else:
            self.waiting.setdefault(key, []).append((time.monotonic() + timeout, reply))

    def expire(self) -> None:
        now = time.monotonic()
        waiting = self.waiting
        self.waiting = {}
        for key, waiters in waiting.items():
            for deadline, reply in waiters:
                if deadline < now:
                    reply(None)
                else:
                    self.waiting.setdefault(key, []).append((deadline, reply))
