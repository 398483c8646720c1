"""A generation of an elastic job: a lost rank ends the generation, and the job continues in the
next one.

A generation ends when a rank dies or is silent, when a collective fails, or when a process waits to
join. The ranks that report to the next generation are its survivors; they keep their order, and new
processes follow. They have WINDOW seconds, or LATE if they still send heartbeats: a long
compilation cannot be interrupted. Without any process that has the newest state, none forms as long
as one that has it sends heartbeats. A new process builds its run first, if the others can do
without it, and they train for `join_after` seconds before they stop for it. There is one
coordinator, so a cut network cannot form two generations."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection
from typing import Any

from jaxdp.errors import PREEMPTED
from jaxdp.process import hosts, private_jax
from jaxdp.process.generation import QUIET, Generation, Member
from jaxdp.process.protocol import LATE, WINDOW, Facts, beat_interval, difference


class ElasticGeneration(Generation):
    """before: the previous generation; None for the first, which the launcher's processes join."""

    def __init__(self, coordinator: Any, before: ElasticGeneration | None = None):
        super().__init__(coordinator)
        self.before, self.number = before, before.number + 1 if before else 0
        self.is_lost = False  # whether it stands for a generation of a coordinator that has gone
        self.log = before.log if before else None
        self.waiting: list[Member] = []  # until this generation is complete
        self.preparing: list[Member] = []
        self.began = time.monotonic()  # when it was complete
        self.waited: float | None = (
            None  # seconds since its end that the coordinator has run; None: it has not ended
        )
        self.waits_for: Member | None = None  # see `wait_for`
        self.size = 0  # until it is complete
        self.survivors: set[tuple[str, int]] = (
            set()
        )  # after the end: who may report to the next generation
        self.code = 0  # the exit code of those that have left
        # ranks whose connection has closed; a rank that is silent may be alive behind a cut network
        self.dead = 0

    # Joining

    def join(self, message: dict[str, Any], nonce: bytes, writer: asyncio.StreamWriter) -> Member:
        member = self.greet(message, nonce, writer)
        if self.before is None:
            if "last" not in member.facts or self.admitted:
                return super().join(message, nonce, writer)
            self.stand_for_last(member.facts)
            return self.coordinator.admitting().join(message, nonce, writer)
        self.before.count_survivor(member)
        if error := difference(self.before.reference, member.facts, elastic=True):
            member.send(error=error, code=2)
            raise EOFError
        if member.facts.get("busy"):
            if identity(member) not in self.before.survivors:
                raise EOFError
            member.generation, self.before.members[member.rank] = self.before, member
            return member
        if member.facts.get("prepares") and "last" not in member.facts and self.before.has_enough():
            self.preparing.append(member)
            member.send(prepare=True)
        else:
            self.waiting.append(member)
            self.form()
        return member

    def has_enough(self) -> bool:
        """Return whether the ranks that are left can train without another process."""
        left = self.members if self.waited is None else self.survivors
        has_quorum = self.waited is None or 2 * len(left) > self.size - self.dead
        return (
            has_quorum
            and len(left) >= self.settings.min_processes
            and "waiting" not in self.announced
        )

    def do_prepared(self, member: Member, id: Any) -> None:
        """A new process has built its run."""
        if member in self.preparing:
            self.preparing.remove(member)
            self.waiting.append(member)

    def stand_for_last(self, facts: Facts) -> None:
        """Stand for the last generation of a job whose coordinator has gone: those who report
        `last` are its survivors.

        facts: of the first of them. New processes that came earlier connect again, and join the
        next generation."""
        self.is_lost, self.admitted, self.number = True, True, -1
        self.waited, self.reference = 0.0, facts
        members, self.members = self.members, {}
        for member in members.values():
            member.writer.close()

    def count_survivor(self, member: Member) -> None:
        """Count a member of the generation that this one stands for."""
        number, size = member.facts.get("last", (-1, 0))
        if self.is_lost and number > self.number:  # those that report an earlier one were not in it
            self.number, self.size, self.survivors, self.members = number, size, set(), {}
            self.coordinator.next.number = number + 1
        if self.is_lost and number == self.number:
            self.survivors.add(identity(member))

    def form(self) -> None:
        """Admit the waiting processes when all survivors have reported or WINDOW is over, if they
        are enough.
        """
        before = self.before
        if before is None or self.admitted or before.waited is None:
            return
        waited = before.waited
        survivors = [m for m in self.waiting if identity(m) in before.survivors]
        if waited < WINDOW and len(survivors) < (
            before.size if before.is_lost else len(before.survivors)
        ):
            return
        if waited < LATE and (before.has_late(survivors) or before.may_lack_state(self.waiting)):
            return
        if ahead := before.ahead(self.waiting):
            self.wait_for(ahead[0], waited)
            return
        alive = before.size - before.dead
        has_quorum = (
            2 * len(self.reachable(before, survivors)) > alive
            or not alive
            or before.is_everyone(self.waiting)
        )
        if not has_quorum or len(self.waiting) < self.settings.min_processes:
            if not self.preparing and waited > WINDOW + self.settings.join_timeout:
                self.give_up(len(survivors))
            return
        joiners = [m for m in self.waiting if m not in survivors]
        for rank, member in enumerate(sorted(survivors, key=lambda m: m.rank) + joiners):
            member.rank = rank
            member.facts = {**member.facts, "rank": rank, "size": len(self.waiting)}
            self.members[rank] = member
        self.waiting = []
        self.coordinator.generation, self.coordinator.next = self, None
        self.admit()
        if self.preparing:
            following = self.coordinator.admitting()
            following.preparing, self.preparing = self.preparing, []
            for member in following.preparing:
                member.generation = following

    def wait_for(self, member: Member, waited: float) -> None:
        """Report once, after WINDOW, that no generation forms without this process."""
        if waited > WINDOW and self.waits_for is not member:
            self.waits_for = member
            process = f"{member.title}, process {member.facts['pid']}"
            self.coordinator.report(
                f"generation {self.number} waits for {process}: it alone may have the newest state"
            )

    def has_late(self, reported: list[Member]) -> bool:
        """Return whether a rank of this generation, which has ended, sends heartbeats and has not
        reported yet.
        """
        known = set(map(identity, reported))
        return any(
            m.silent < WINDOW
            for m in self.members.values()
            if identity(m) in self.survivors - known
        )

    def is_everyone(self, waiting: list[Member]) -> bool:
        """Return whether all processes that the job has wait, so that no other one can be alive."""
        return len(waiting) >= max(self.size, self.settings.size)

    def ahead(self, waiting: list[Member]) -> list[Member]:
        """Return the ranks of this generation, which has ended, with the state of a later one than
        all that wait have.

        One may be alive until its connection closes, or until it has sent no heartbeat for LATE
        seconds."""
        known, newest = set(map(identity, waiting)), newest_state(waiting)
        others = (m for m in self.members.values() if identity(m) not in known and m.silent < LATE)
        return [m for m in others if newest_state([m]) > newest]

    def may_lack_state(self, waiting: list[Member]) -> bool:
        """Return whether a rank whose connection has ended with the last coordinator may come, and
        have a newer state than all that wait: these know only that it had one."""
        reported = max((m.facts.get("newest", -1) for m in waiting), default=-1)
        return self.is_lost and reported > newest_state(waiting) and not self.is_everyone(waiting)

    def reachable(self, before: ElasticGeneration, survivors: list[Member]) -> set[tuple[str, int]]:
        """Return the ranks of the previous generation that are on this side of a cut network.

        They are the survivors, and ranks that may be alive on a host from which another process has
        come: the network was healed after they were declared dead.
        """
        present = {hosts.key(m.facts) for m in [*self.waiting, *self.preparing]}
        return {
            identity(m)
            for m in [*survivors, *before.members.values()]
            if hosts.key(m.facts) in present
        }

    def admit(self) -> None:
        self.size, self.reference, self.began = (
            len(self.members),
            self.members[0].facts,
            time.monotonic(),
        )
        super().admit()
        if self.before is not None:
            for member in self.before.members.values():
                # a survivor has a new connection; whoever has none is expelled
                member.writer.close()
            self.before = None

    def give_up(self, survivors: int) -> None:
        assert self.before is not None
        text = (
            f"too few processes to continue: {len(self.waiting)}, with {survivors} of the {self.before.size} before "
            f"(elastic.min_processes: {self.settings.min_processes}, and more than half of those that may be alive)"
        )
        self.refuse_waiting(
            text, 1 if self.before.is_lost else PREEMPTED
        )  # 1: a launcher starts it again
        self.coordinator.done.set()

    def ask_to_regroup(self, waiting: list[Member]) -> None:
        """Announce to the ranks of this generation that a process waits to join, once they have
        trained for a while.
        """
        members = list(self.members.values())
        new = [m for m in waiting if identity(m) not in map(identity, members)]
        is_time = (
            time.monotonic() - self.began >= self.settings.join_after or "waiting" in self.announced
        )
        if new and members and self.waited is None and is_time:
            self.do_announce(members[0], None, "join", new[0].title)

    def refuse_waiting(self, text: str, code: int) -> None:
        for member in [*self.waiting, *self.preparing]:
            member.send(error=text, code=code)
        self.waiting, self.preparing = [], []

    # The end

    def do_leave(self, member: Member, id: Any, code: int) -> dict[str, Any]:
        self.code = self.code or code  # only rank 0 may have the job's
        return super().do_leave(member, id, code)

    def handle(self, member: Member, message: dict[str, Any]) -> None:
        if self.waited is not None and message.get("op") != "beat":
            member.send(
                id=message.get("id"), ended=""
            )  # a rank of an old generation can do nothing
        else:
            super().handle(member, message)

    def do_opened(self, member: Member, id: Any) -> None:
        """A rank has the state of this generation."""
        member.facts["state"] = self.number

    def do_regroup(self, member: Member, id: Any, fault: str) -> dict[str, Any]:
        """A rank has reached the update at which all regroup, or its collective has failed."""
        if fault:
            self.fail(fault)
        else:
            self.end("processes wait to join")
        return {}

    def fail(self, text: str, code: int = 1, author: int | None = None) -> bool:
        """End the generation, or with `code` 2 (a usage error, which every rank would repeat) the
        job.

        A usage error of a process that has just joined ends the generation: the others are those of
        a valid job."""
        is_new = author is not None and self.number > 0 and "last" not in self.members[author].facts
        if (code == 2 and not is_new) or not self.admitted:
            return super().fail(text, code, author)
        if self.waited is not None:
            return False
        self.coordinator.report(f"generation {self.number} ends: {text}")
        silent = {m.rank for m in self.members.values() if m.silent >= self.settings.silence}
        self.end(text, silent, author)
        return True

    def end(self, text: str, silent: Collection[int] = (), author: int | None = None) -> None:
        """End the generation: its ranks, but the `silent` and the `author` of the fault, may report
        to the next one.

        The author ends its process when it gets the answer to its report; it is not told of the end
        before."""
        if self.waited is None:
            self.waited = 0.0
            self.survivors = {
                identity(m) for rank, m in self.members.items() if rank not in (*silent, author)
            }
            for rank, member in self.members.items():
                if rank != author:
                    member.send(ended=text)
            kept = {m.rank for m in self.members.values() if identity(m) in self.survivors}
            self.register(set(range(self.size)) - kept)

    def register(self, lost: set[int]) -> None:
        """Register lost ranks with JAX's service: others that are about to connect would wait for
        them.
        """
        services, address, secret = (
            self.coordinator.services,
            self.jax_address,
            self.settings.secret,
        )
        for rank in lost if address else ():  # none, if the coordinator of that service has gone

            def work(rank=rank):
                return services.append(private_jax.register(address, rank, secret))

            threading.Thread(target=work, daemon=True).start()

    def disconnected(self, member: Member) -> None:
        for joining in (self.waiting, self.preparing):
            if member in joining:
                joining.remove(member)
        if self.members.get(member.rank) is member:
            self.dead += 1
            had_ended = self.waited is not None
            super().disconnected(member)
            following = self.coordinator.next
            reported = {identity(m) for m in following.waiting} if following is not None else set()
            if (
                had_ended
                and self.coordinator.generation is self
                and identity(member) not in reported
            ):
                self.survivors.discard(identity(member))
                self.register({member.rank})
                if following is not None:
                    following.form()

    def is_empty(self) -> bool:
        return super().is_empty() if self.before is None else not (self.waiting or self.preparing)

    def tick(self, elapsed: float) -> None:
        if self.before is None:
            if self.waited is None:
                super().tick(elapsed)
            else:
                self.waited += min(
                    elapsed, 1.0
                )  # a coordinator that was stopped has not waited for reports
                for member in self.members.values():
                    member.silent += min(elapsed, 1.0)
        else:
            for member in [*self.waiting, *self.preparing]:
                member.silent += min(elapsed, 1.0)
                if member.silent > QUIET + beat_interval(
                    self.settings.size
                ):  # it is stopped or cut off
                    self.disconnected(member)
                    member.writer.close()
            if self.before.is_empty() and self.before.waited is None:
                self.refuse_waiting(
                    "the job ended before this process could join", self.before.code
                )
            self.before.ask_to_regroup(self.waiting)
            self.form()


def newest_state(members: list[Member]) -> int:
    """Return the newest generation whose state one of these has; -1 if none has any."""
    return max((m.facts.get("state", -1) for m in members), default=-1)


def identity(member: Member) -> tuple[str, int]:
    """Return what a process keeps from generation to generation."""
    return member.facts["boot"] + member.facts["host"], member.facts["pid"]
