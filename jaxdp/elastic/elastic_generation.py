"""A generation of an elastic job: a lost rank ends the generation, and the job continues in the
next one.

`states` decides; this module tells it what happens to the connections, and does what it says."""

import asyncio
from collections.abc import Iterable
from typing import Any

from jaxdp.elastic.states import FIRST, OVER, TRAINING, Machine
from jaxdp.process.channel import Message
from jaxdp.process.generation import Generation, Member
from jaxdp.process.protocol import COMMON, OPERATIONS, difference

# What a process that joins must have as the others: not their number.
JOINING = {name: label for name, label in COMMON.items() if name != "size"}


class ElasticGeneration(Generation):
    """One generation; processes that wait for the next one are its own until that is formed.

    machine: of the job; None for the first generation."""

    operations = OPERATIONS | {"regroup": {"fault": str}}

    def __init__(self, coordinator: Any, machine: Machine | None = None):
        super().__init__(coordinator)
        settings = self.settings
        self.machine = machine or Machine(self, settings.size, settings.silence, **settings.options)

    @property
    def has_ended(self) -> bool:
        return self.machine.actor is not self or self.machine.state not in (FIRST, TRAINING)

    # Events

    def join(self, message: Message, nonce: bytes, writer: asyncio.StreamWriter) -> Member:
        member = self.greet(message, nonce, writer)
        if self.machine.state != FIRST:
            if error := difference(self.reference, member.facts, JOINING):
                member.send(error=error, code=2)
                raise EOFError
        elif "last" not in member.facts or self.admitted:
            return super().join(message, nonce, writer)
        self.machine.on("comes", member)
        return member

    def admit(self) -> None:
        self.machine.on("formed", [self.members[rank] for rank in range(self.size)])
        self.number, self.reference = self.machine.number, self.members[0].facts
        super().admit()

    def handle(self, member: Member, message: Message) -> None:
        name = message.get("op")
        if self.has_ended and name not in ("beat", "prepared"):
            member.send(id=message.get("id"), ended="")  # of an old generation: it can do nothing
        elif name in ("prepared", "opened", "waits"):  # events without fields or a reply
            self.machine.on(name, member)
        else:
            super().handle(member, message)

    def do_regroup(self, member: Member, id: Any, fault: str) -> Message:
        """A rank has reached the update at which all regroup, or its collective has failed."""
        self.fail(fault or "processes wait to join")
        return {}

    def do_leave(self, member: Member, id: Any, code: int) -> Message:
        self.machine.code = self.machine.code or code
        return super().do_leave(member, id, code)

    def fail(self, text: str, code: int = 1, author: int | None = None) -> bool:
        """End the generation, or with `code` 2 (a usage error, which every rank would repeat) the
        job.

        A usage error of a process that has just joined ends the generation: the others are those of
        a valid job."""
        is_new = author is not None and self.number > 0 and "last" not in self.members[author].facts
        if (code == 2 and not is_new) or not self.admitted:
            return super().fail(text, code, author)
        if self.has_ended:
            return False
        self.coordinator.report(f"generation {self.number} ends: {text}")
        self.machine.on("fails", text, author)
        return True

    def disconnected(self, member: Member) -> None:
        self.machine.on("closes", member)
        super().disconnected(member)

    def is_empty(self) -> bool:
        machine = self.machine
        remain = machine.members or machine.waiting or machine.preparing
        return machine.state == OVER or (super().is_empty() and not remain)

    def tick(self, elapsed: float) -> None:
        if not self.has_ended:
            super().tick(elapsed)
        # A coordinator that was stopped has not waited for reports.
        self.machine.on("passes", min(elapsed, 1.0))

    # Actions

    def stand_for_last(self, member: Member) -> None:
        self.admitted, self.reference = True, member.facts
        self.disconnect(self.members.values())
        self.members = {}

    def disconnect(self, members: Iterable[Member]) -> None:
        for member in members:
            member.writer.close()

    def announce(self, title: str) -> None:
        self.do_announce(next(iter(self.members.values())), None, "join", title)

    def report(self, line: str) -> None:
        self.coordinator.report(line)

    def begin(self, ended: Iterable[Member]) -> None:
        """Begin the next generation of the machine; close the connections of the ended one."""
        machine, members = self.machine, self.machine.members
        following = machine.actor = type(self)(self.coordinator, machine)
        following.log, following.size, following.members = self.log, len(members), dict(members)
        for member in [*members.values(), *machine.preparing]:
            member.generation = following
        for rank, member in members.items():
            member.facts |= {"rank": rank, "size": len(members)}
        self.coordinator.generation = following
        following.admit()
        self.disconnect(ended)
