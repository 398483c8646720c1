"""The coordinator of an elastic job as a state machine: which processes train together.

It knows no connections and no clock: `on` is told what happens, and an actor what to do. EVENTS
has the events of each state; a method has the name of each event. All other events change nothing.

- FIRST: the processes that the launcher started gather, as in every job.
- TRAINING: a generation of processes trains. New ones wait; each builds its run first, if the
  others can do without it, and they train for `join_after` seconds before they stop for it.
- ENDED: a rank was lost, a collective has failed, or a process joins. The ranks that report are the
  survivors; they keep their order, and new processes follow. They have WINDOW seconds, or LATE if
  they still send heartbeats: a long compilation cannot be interrupted. Without any process that has
  the newest state, none forms as long as one that has it sends heartbeats.
- LOST: the same, for a generation whose coordinator has gone: it is known from its ranks alone.
- OVER: too few processes are left.

There is one coordinator, so a cut network cannot form two generations: it needs `min_processes`,
and more than half of the ranks before that may be alive."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxdp.errors import PREEMPTED
from jaxdp.process import hosts
from jaxdp.process.protocol import beat_interval

FIRST, TRAINING, ENDED, LOST, OVER = "first", "training", "ended", "lost", "over"
ALWAYS = {"comes", "prepared", "closes", "passes"}
EVENTS = {
    FIRST: {"formed", "comes"},
    TRAINING: ALWAYS | {"opened", "waits", "fails"},
    ENDED: ALWAYS,
    LOST: ALWAYS,
    OVER: set(),
}
# Seconds.
QUIET = 5.0  # beyond a heartbeat, after which a process that waits is stopped or cut off
WINDOW = 10.0  # that the survivors of a generation have to report to the next one
# that a survivor has if it sends heartbeats, or without them if it may have the only state
LATE = 90.0
# With rank, title, facts, the seconds for which it is silent, and `send`: a `Member`.
Process = Any
Identity = tuple[str, str, int]  # what a process keeps from generation to generation


@dataclasses.dataclass(eq=False)
class Machine:
    """The state of a job.

    actor: does what is decided, an `ElasticGeneration`. launched: the number of processes that the
    launcher starts. silence: the seconds without a heartbeat after which a rank is declared dead;
    the others are those of `Options`."""

    actor: Any
    launched: int
    silence: float
    min_processes: int
    join_timeout: float
    join_after: float

    state = FIRST
    number, size = -1, 0  # of the newest generation
    seconds = 0.0  # for which it has trained, or since its end
    needs_others = False  # whether it waits for processes that join
    code = 0  # of the first rank that has left with another one; only rank 0 may have the job's

    def __post_init__(self) -> None:
        self.members: dict[int, Process] = {}  # ranks of the newest generation that are connected
        self.survivors: set[Identity] = set()  # its ranks that may report to the next one
        # Its ranks whose connection has closed: they are dead, or come again.
        self.closed: dict[Identity, Process] = {}
        self.waiting: list[Process] = []  # for the next one
        self.preparing: list[Process] = []
        self.waits_for: Process | None = None  # see `has_newest_state`

    def on(self, event: str, *details: Any) -> None:
        if event in EVENTS[self.state]:
            getattr(self, event)(*details)

    # Events

    def formed(self, processes: Sequence[Process]) -> None:
        """A generation has formed. processes: by rank."""
        self.state, self.number, self.size = TRAINING, self.number + 1, len(processes)
        self.members, self.survivors = dict(enumerate(processes)), identities(processes)
        self.closed, self.seconds, self.code = {}, 0.0, 0
        self.needs_others, self.waits_for = False, None
        for rank, process in self.members.items():
            process.rank = rank

    def comes(self, process: Process) -> None:
        """A process waits for the next generation, or prepares for it.

        If it is the first to report the last generation of a job whose coordinator has gone, this
        one stands for that. New processes that came earlier connect again."""
        if self.state == FIRST:
            self.state = LOST
            self.actor.stand_for_last(process)
        name, facts = identity(process), process.facts
        number, size = facts.get("last", (-1, 0))
        if self.state == LOST and number > self.number:  # those of an earlier one were not in it
            self.number, self.size, self.survivors, self.members = number, size, set(), {}
        is_rank = self.state == LOST and number == self.number
        if self.closed.pop(name, None) or is_rank:
            self.survivors.add(name)
        if facts.get("busy"):  # it sends heartbeats, and will report on another connection
            if name in self.survivors:
                self.members[process.rank] = process
            else:
                self.actor.disconnect([process])
        elif facts.get("prepares") and "last" not in facts and self.has_enough():
            self.preparing.append(process)
            process.send(prepare=True)
        else:
            self.waiting.append(process)
            self.form()

    def prepared(self, process: Process) -> None:
        """A new process has built its run."""
        if process in self.preparing:
            self.preparing.remove(process)
            self.waiting.append(process)

    def opened(self, process: Process) -> None:
        """A rank has the state of its generation."""
        process.facts["state"] = self.number

    def waits(self, process: Process) -> None:
        """A rank cannot train without others."""
        self.needs_others = True

    def fails(self, text: str, author: int | None = None) -> None:
        """The generation ends: its ranks may report to the next one, but not those that are silent,
        nor the author of the fault.

        The author ends its process when it gets the answer to its report; it is not told of the end
        before."""
        self.state, self.seconds = ENDED, 0.0
        others = [x for rank, x in self.members.items() if rank != author]
        self.survivors = identities(x for x in others if x.silent < self.silence)
        for process in others:
            process.send(ended=text)

    def closes(self, process: Process) -> None:
        """A connection has closed: its process has ended, or connects again."""
        for queue in (self.waiting, self.preparing):
            if process in queue:
                queue.remove(process)
        name, was_member = identity(process), process in self.members.values()
        if was_member:
            del self.members[process.rank]
        is_connected = name in identities([*self.members.values(), *self.waiting])
        if (was_member or name in self.survivors) and not is_connected:
            self.survivors.discard(name)
            self.closed[name] = process
            process.silent = 0.0
            self.form()

    def passes(self, seconds: float) -> None:
        """Time passes, in which this coordinator has run."""
        self.seconds += seconds
        for process in [*self.waiting, *self.preparing]:
            process.silent += seconds
            if process.silent > QUIET + beat_interval(self.launched):  # it is stopped or cut off
                self.actor.disconnect([process])
                self.closes(process)
        if self.state != TRAINING:
            for process in [*self.members.values(), *self.closed.values()]:
                process.silent += seconds
            self.form()
            return
        new = [x for x in self.waiting if identity(x) not in self.survivors]
        if not self.members:
            self.refuse("the job ended before this process could join", self.code)
        elif new and (self.needs_others or self.seconds >= self.join_after):
            self.actor.announce(new[0].title)

    # Decisions

    def refuse(self, text: str, code: int) -> None:
        for process in [*self.waiting, *self.preparing]:
            process.send(error=text, code=code)
        self.waiting, self.preparing = [], []

    def form(self) -> None:
        """Form a generation of the waiting processes when all survivors have reported or WINDOW is
        over, if they are enough and have the newest state."""
        survivors = [x for x in self.waiting if identity(x) in self.survivors]
        number = self.size if self.state == LOST else len(self.survivors)
        is_time = len(survivors) >= number or self.seconds >= WINDOW
        if self.state == TRAINING or not is_time or not self.has_newest_state():
            return
        if self.has_quorum(survivors) and len(self.waiting) >= self.min_processes:
            joiners = [x for x in self.waiting if x not in survivors]
            ended, self.waiting = list(self.members.values()), []
            self.formed(sorted(survivors, key=lambda x: x.rank) + joiners)
            # A survivor has a new connection; whoever has none is expelled.
            self.actor.begin(ended)
        elif not self.preparing and self.seconds > WINDOW + self.join_timeout:
            text = (
                f"too few processes to continue: {len(self.waiting)}, with {len(survivors)} of the {self.size} before "
                f"(elastic.min_processes: {self.min_processes}, and more than half of those that may be alive)"
            )
            # 1: a launcher starts it again.
            self.refuse(text, 1 if self.state == LOST else PREEMPTED)
            self.state = OVER

    def has_enough(self) -> bool:
        """Return whether the ranks that are left can train without another process."""
        number = len(self.survivors)
        has_quorum = 2 * number > self.size - len(self.closed)
        return has_quorum and number >= self.min_processes and not self.needs_others

    def has_quorum(self, survivors: Sequence[Process]) -> bool:
        """Return whether most of the ranks that may be alive are on this side of a cut network.

        They are the survivors, and ranks on a host from which another process has come: the network
        was healed after they were declared dead."""
        alive = self.size - len(self.closed)
        present = {hosts.key(x.facts) for x in [*self.waiting, *self.preparing]}
        near = [x for x in self.members.values() if hosts.key(x.facts) in present]
        return not alive or self.is_everyone() or 2 * len(identities([*survivors, *near])) > alive

    def has_newest_state(self) -> bool:
        """Return whether no other process must be waited for."""
        newest, known = newest_state(self.waiting), identities(self.waiting)
        others = [x for x in self.members.values() if identity(x) not in known]
        # One that sends heartbeats has not reported yet: it is waited for, unless its state is older
        # than that of one that waits, as that of a new process is which did not get the state. Or a
        # rank whose connection has ended with the last coordinator has a newer state than all that
        # wait, which know only that it had one.
        is_known_of = newest_state(self.waiting, "newest") > newest
        may_lack = self.state == LOST and is_known_of and not self.is_everyone()
        late = [x for x in others if x.silent < WINDOW and identity(x) in self.survivors]
        if self.seconds < LATE and (may_lack or (late and newest_state(late) >= newest)):
            return False
        # One with a newer state may be alive until it has sent no heartbeat for LATE seconds; and
        # may connect again for WINDOW seconds after its connection has closed.
        may_come = [x for x in others if x.silent < LATE]
        may_come += [x for x in self.closed.values() if x.silent < WINDOW]
        ahead = [x for x in may_come if newest_state([x]) > newest]
        if ahead and self.seconds > WINDOW and self.waits_for is not ahead[0]:
            self.waits_for = ahead[0]
            process = f"{ahead[0].title}, process {ahead[0].facts['pid']}"
            self.actor.report(
                f"generation {self.number + 1} waits for {process}: it alone may have the newest state"
            )
        return not ahead

    def is_everyone(self) -> bool:
        """Return whether all processes that the job has wait, so that no other one can be alive."""
        return len(self.waiting) >= max(self.size, self.launched)


def newest_state(processes: Iterable[Process], fact: str = "state") -> int:
    """Return the newest generation whose state one of these has; -1 if none has any. fact: `newest`,
    if one knows that another one had it."""
    return max((x.facts.get(fact, -1) for x in processes), default=-1)


def identity(process: Process) -> Identity:
    return *hosts.key(process.facts), process.facts["pid"]


def identities(processes: Iterable[Process]) -> set[Identity]:
    return set(map(identity, processes))
