"""Three processes of an elastic job and its coordinator, of which only the state machine is real.

Time passes in ticks. The limits of the machine are a few ticks, in their usual order:
a process that waits is dropped < a rank is dead = WINDOW < too few give up < LATE.
"""

import collections
import itertools
import pickle

from jaxdp.elastic import states
from jaxdp.elastic.states import FIRST, TRAINING, newest_state

LIMITS = {"QUIET": 0.0, "WINDOW": 2.0, "LATE": 5.0}
OPTIONS = {"silence": 2.0, "min_processes": 1, "join_timeout": 1.0, "join_after": 1.0}
MOST = 6.0  # ticks that make no difference any more
FAULTS = "kill", "cut", "reset", "hang", "kill coordinator"
AFTER = {
    (FIRST, "formed"): (TRAINING,),
    (FIRST, "comes"): (states.LOST,),
    (TRAINING, "fails"): (states.ENDED,),
}


class Link:
    """A connection of a process to the coordinator, which is what the machine calls a process."""

    def __init__(self, slot, facts):
        self.slot, self.facts, self.rank = slot, facts, facts["rank"]
        self.silent, self.inbox, self.title = 0.0, [], f"rank {slot}"

    def send(self, **message):
        [text] = {"prepare", "ended", "error"} & message.keys()
        self.inbox.append(text)


class Process:
    """A process that the launcher has started.

    mode: 'out' connects, 'waits', 'builds' its run, 'trains', 'done' (with a message), 'dead'.
    hung: it does not act, but its heartbeats go on. cut: nothing arrives, in either direction."""

    def __init__(self, slot, host, pid):
        self.slot, self.mode, self.hung, self.cut, self.opened = slot, "out", False, False, False
        self.link = self.before = None  # its connection; the one to the generation that has ended
        self.expelled = False  # its state was given up: it was silent for LATE ticks
        self.generation = None  # (number, the pids of its members)
        self.facts = {"rank": slot, "pid": pid, "host": host, "boot": "", "prepares": True}


class World:
    """All processes and the coordinator. hosts: of the processes. faults: how many are left."""

    def __init__(self, hosts, faults, kinds=FAULTS, **options):
        self.options = OPTIONS | options
        self.processes = [Process(slot, host, 10 + slot) for slot, host in enumerate(hosts)]
        self.faults, self.kinds = faults, kinds
        self.machine = None  # of the coordinator, while there is one
        self.first = {}  # rank: the connection of a process that waits for the first generation
        self.asked = False  # whether the ranks know that another process waits
        self.formed = ()  # what is checked of the generation that was formed by the last event

    def copy(self):
        return pickle.loads(pickle.dumps(self, -1))

    def key(self):
        """What distinguishes this world from others, up to the names of processes and generations."""
        machine, numbers = self.machine, {-1, None}
        queues = {}
        if machine:
            numbers.add(machine.number)
            for i, queue in enumerate(self.queues()):
                queues |= {id(link): (i, link) for link in queue}
        links = {id(x): x for p in self.processes for x in (p.link, p.before) if x is not None}
        links |= {i: link for i, (_, link) in queues.items()}
        links |= {id(link): link for link in (machine.closed.values() if machine else ())}
        for facts in [x.facts for x in [*links.values(), *self.processes]]:
            numbers |= {facts.get("state"), facts.get("newest"), facts.get("last", (-1,))[0]}
        numbers |= {m[1][0] for x in links.values() for m in x.inbox if not isinstance(m, str)}
        numbers |= {x.generation[0] for x in self.processes if x.generation}
        order = {x: i for i, x in enumerate(sorted(numbers - {None}))} | {None: -1}
        shared = collections.Counter(x.facts["host"] for x in self.processes)

        def about(facts):
            last = facts.get("last", (None, 0))
            return order[facts.get("state")], order[facts.get("newest")], order[last[0]], last[1]

        def about_link(link):
            if link is None:
                return ()
            where = queues.get(id(link), (9,))[0]
            flags = "busy" in link.facts, link.facts["prepares"], link.silent
            texts = tuple(m if isinstance(m, str) else order[m[1][0]] for m in link.inbox)
            return where, flags, texts, about(link.facts)

        def about_process(x):
            host, pid = x.facts["host"], x.facts["pid"]
            group = x.generation and (
                order[x.generation[0]],
                len(x.generation[1]),
                pid in x.generation[1],
                sum(x.generation == y.generation for y in self.processes),
            )
            orphans, ended = [], []
            if machine:
                mine = x.link, x.before
                orphans = [
                    about_link(y)
                    for _, y in queues.values()
                    if y.slot == x.slot and not any(y is z for z in mine)
                ]
                ended = [i[2] == pid for i in machine.survivors if i[2] % 10 == x.slot]
                ended += [
                    (i[2] == pid, y.silent, order[y.facts.get("state")])
                    for i, y in machine.closed.items()
                    if i[2] % 10 == x.slot
                ]
            flags = x.hung, x.cut, x.opened, x.expelled, x.facts["prepares"]
            place = host if shared[host] > 1 else ""
            known = about_link(x.link), about_link(x.before), tuple(orphans), tuple(ended)
            return x.mode, flags, place, group or (), about(x.facts), known

        processes = tuple(sorted(map(about_process, self.processes), key=hash))
        decides = machine and (
            machine.state,
            order[machine.number],
            machine.size,
            machine.seconds,
            machine.needs_others,
        )
        return processes, decides, self.asked, self.faults

    # What may happen next

    def events(self):
        """(name, slot) of each event that may be next. No time passes before a message arrives."""
        urgent, others, alone = [], [], []
        for x in self.processes:
            if x.mode == "dead":
                others.append(("restart", x.slot))
            if x.mode in ("dead", "done"):
                continue
            if x.cut:
                others.append(("heal", x.slot))
                others += [("end itself", x.slot)] if x.mode == "trains" else []
            elif x.hung:
                others.append(("return", x.slot))
                if x.link is None and self.accepts_busy(x):
                    urgent.append(("busy", x.slot))
            elif x.mode == "out":
                urgent.append(("connect", x.slot))
            elif x.link.inbox:
                urgent.append(("hear", x.slot))
                if x.link.inbox[0] != "error":
                    alone = [urgent[-1]]  # it changes this process alone
            elif x.mode == "builds":
                others.append(("prepared", x.slot))
            elif x.mode == "trains" and not self.is_together(x):
                others.append(("collective fails", x.slot))
            elif x.mode == "trains" and not x.opened:
                urgent.append(("open", x.slot))
        for x in self.processes if self.faults else ():
            if x.mode not in ("dead", "done"):
                others.append(("kill", x.slot))
                others += [] if x.cut else [("cut", x.slot)]
                others += [] if x.cut or x.link is None else [("reset", x.slot)]
                others += [] if x.hung or x.mode != "trains" else [("hang", x.slot)]
        if self.faults and self.machine:
            others.append(("kill coordinator", 0))
        if self.asked and (members := self.active()) and all(x.opened for x in members):
            others.append(("regroup", 0))
        if self.machine and not urgent:
            others.append(("tick", 0))
        allowed = [x for x in others if x[0] not in FAULTS or x[0] in self.kinds]
        if alone:  # in the order of other events it makes no difference, but for a fault
            return alone + [x for x in allowed if x[0] in FAULTS]
        return urgent + allowed

    def accepts_busy(self, process):
        """Whether the coordinator keeps a connection for heartbeats alone."""
        machine = self.machine
        if machine is None or process.mode != "trains" or machine.state == TRAINING:
            return False
        number = process.generation[0]
        known = machine.state == states.LOST and number >= machine.number
        mine = (process.facts["host"], "", process.facts["pid"])
        return machine.state == FIRST or known or mine in machine.survivors | machine.closed.keys()

    def is_together(self, process):
        """Whether all processes of its generation take part in its collectives."""
        return all(
            any(x.facts["pid"] == pid and x.generation == process.generation and x.mode == "trains"
                and not x.hung and not x.cut for x in self.processes)
            for pid in process.generation[1]
        )  # fmt: skip

    def active(self):
        """The processes of the generation that trains, if one does."""
        groups = collections.defaultdict(list)
        for x in self.processes:
            if x.mode == "trains" and (x.link is None or not {"ended", "closed"} & {*x.link.inbox}):
                groups[x.generation].append(x)
        whole = [x for generation, x in groups.items() if len(x) == len(generation[1])]
        assert len(whole) <= 1, f"two generations: {[x[0].generation for x in whole]}"
        return whole[0] if whole else []

    def is_well(self):
        """Whether each process that lives trains, or has ended with a message."""
        members = self.active()
        return all(
            x.mode in ("done", "dead") or (x in members and x.opened) for x in self.processes
        )

    def left_out(self):
        """The processes with a newer state than all of the generation that was just formed.

        One does not count if the coordinator cannot know that it lives: expelled before, or silent
        for LATE ticks."""
        if not self.formed:
            return []
        _, pids, newest = self.formed

        def may_come(x):
            link = x.link or x.before
            if x.expelled or (link is not None and link.silent >= states.LATE):
                return False
            return not x.cut or (link is not None and "closed" not in link.inbox)

        return [
            x.slot
            for x in self.processes
            if x.mode not in ("dead", "done")
            and x.facts["pid"] not in pids
            and x.facts.get("state", -1) > newest
            and may_come(x)
        ]

    # Events

    def do(self, name, slot):
        self.formed = ()
        if name in FAULTS:
            self.faults -= 1
        process = self.processes[slot]
        getattr(self, name.replace(" ", "_"))(*(() if name in SHARED else (process,)))
        if self.machine:
            for link in [*self.links(), *self.machine.closed.values()]:
                link.silent = min(link.silent, MOST)
            most = self.options["join_after"] if self.machine.state == TRAINING else MOST
            self.machine.seconds = min(self.machine.seconds, most)

    def queues(self):
        """The connections that are open, by what the coordinator knows them as."""
        machine = self.machine
        return machine.members.values(), machine.waiting, machine.preparing, self.first.values()

    def links(self):
        return [*itertools.chain(*self.queues())]

    def connect(self, process):
        if self.machine is None:
            self.machine = states.Machine(self, len(self.processes), **self.options)
        process.mode = "waits"
        self.come(process, {})

    def busy(self, process):
        self.come(process, {"busy": True})

    def come(self, process, more):
        process.link = Link(process.slot, process.facts | self.last(process) | more)
        if self.machine.state != FIRST or "last" in process.link.facts:
            self.tell("comes", process.link)
            return
        self.first[process.slot] = process.link
        if len(self.first) == len(self.processes):
            links = [self.first[rank] for rank in sorted(self.first)]
            self.first = {}
            self.tell("formed", links)
            self.begin([])

    def last(self, process):
        if process.generation is None:
            return {}
        number, pids = process.generation
        return {"last": [number, len(pids)]}

    def hear(self, process):
        message, *rest = process.link.inbox
        process.link.inbox = rest
        if message == "prepare":
            process.mode = "builds"
            process.facts["prepares"] = False
        elif message == "error":
            process.mode = "done"
            self.close(process)
        elif message in ("ended", "closed"):
            if message == "ended" and process.mode == "trains":
                process.before = process.link
            process.link, process.mode, process.opened = None, "out", False
        else:
            _, process.generation, rank, newest = message
            process.mode, process.opened, process.expelled = "trains", False, False
            process.facts |= {"rank": rank, "newest": newest}
            process.before = None  # closed

    def prepared(self, process):
        process.mode = "waits"
        self.tell("prepared", process.link)

    def open(self, process):
        process.opened = True
        number = process.facts["state"] = process.generation[0]
        process.facts["newest"] = max(process.facts["newest"], number)
        if self.machine and self.machine.members.get(process.link.rank) is process.link:
            self.tell("opened", process.link)

    def restart(self, process):
        host, pid = process.facts["host"], process.facts["pid"]
        self.processes[process.slot] = Process(process.slot, host, pid + 10)
        self.processes[process.slot].cut = process.cut

    def regroup(self):
        self.asked = False
        self.tell("fails", "processes wait to join")

    def kill(self, process):
        process.mode, process.hung, process.opened = "dead", False, False
        self.close(process)

    def end_itself(self, process):
        """It has not been heard from for too long; it says so."""
        self.kill(process)

    def close(self, process):
        for link in (process.link, process.before):
            # The coordinator does not hear of the end of a process that is cut off.
            if link is not None and self.machine and not process.cut:
                self.lose(link)
        process.link = process.before = None

    def lose(self, link):
        self.first = {rank: x for rank, x in self.first.items() if x is not link}
        was_rank = self.machine.members.get(link.rank) is link
        self.tell("closes", link)
        if self.machine and was_rank and self.machine.state == TRAINING:
            self.tell("fails", "a rank has ended")

    def cut(self, process):
        process.cut = True

    def reset(self, process):
        """Its connection breaks, at both ends."""
        link = process.link
        self.shut(link)
        if self.machine:
            self.lose(link)

    def collective_fails(self, process):
        if self.machine and self.machine.members.get(process.link.rank) is process.link:
            self.tell("fails", "a collective has failed")

    def heal(self, process):
        process.cut = False

    def hang(self, process):
        process.hung = True
        if process.link is not None and "closed" in process.link.inbox:
            process.link = None  # the thread that sends heartbeats connects again

    def return_(self, process):
        process.hung = False
        if process.link is None or process.link.facts.get("busy"):
            if process.link is not None and self.machine:
                process.before = process.link
            process.link, process.mode, process.opened = None, "out", False

    def kill_coordinator(self):
        self.machine, self.first, self.asked = None, {}, False
        for x in self.processes:
            if x.link is not None:
                self.shut(x.link)
            x.before = None

    def shut(self, link):
        """The coordinator has closed a connection."""
        process = self.processes[link.slot]
        if process.link is link:
            if process.hung:
                process.link = None
            else:
                link.inbox.append("closed")

    def tick(self):
        """A second passes, and each process that is not cut off sends a heartbeat."""
        if self.machine.state == FIRST:  # the job has not begun
            for link in self.first.values():
                link.inbox.append("error")
            self.machine, self.first = None, {}
            return
        members = list(self.machine.members.values())
        if self.machine.state == TRAINING:
            for link in members:
                link.silent += 1.0
            dead = [x for x in members if x.silent >= self.options["silence"] and self.is_cut(x)]
            if dead and len(dead) < len(members):
                self.tell("fails", "a rank is silent")
        self.tell("passes", 1.0)
        if self.machine:
            for link in self.links():
                if not self.is_cut(link):
                    link.silent = 0.0
            if self.machine.state != FIRST and not self.links():
                self.machine, self.asked = None, False  # all have left

    def is_cut(self, link):
        process = self.processes[link.slot]
        is_its = link is process.link or link is process.before
        return process.cut or not is_its  # or its end was not heard of

    # What the machine says

    def tell(self, event, *details):
        machine, before = self.machine, self.machine.state
        machine.on(event, *details)
        assert machine.state in self.allowed(before, event), (before, event)
        if machine.state == states.OVER:
            self.give_up()

    def allowed(self, state, event):
        """The states that may follow."""
        if (state, event) in AFTER:
            return AFTER[state, event]
        if state in (states.ENDED, states.LOST) and event in ("comes", "closes", "passes"):
            return state, TRAINING, states.OVER
        return (state,)

    def stand_for_last(self, link):
        for newcomer in self.first.values():
            self.shut(newcomer)
        self.first = {}

    def disconnect(self, links):
        for link in links:
            self.shut(link)

    def announce(self, title):
        self.asked = True

    def report(self, line):
        assert "waits for rank" in line

    def give_up(self):
        """The coordinator ends."""
        # Those that have not reported yet find the next coordinator.
        said = [x.link for x in self.processes if x.link and "error" in x.link.inbox]
        for x in self.processes:
            if x.link is not None and x.link not in said:
                self.shut(x.link)
        self.machine = None

    def begin(self, ended):
        links = self.machine.members.values()
        newest, number = newest_state(links), self.machine.number
        pids = tuple(x.facts["pid"] for x in links)
        self.formed = number, pids, newest
        for link in links:
            link.facts = link.facts | {"rank": link.rank}
            link.inbox.append(("members", (number, pids), link.rank, newest))
        for link in ended:
            process = self.processes[link.slot]
            process.expelled |= process.link is link
            self.shut(link)
        self.asked = False


SHARED = "tick", "regroup", "kill coordinator"
setattr(World, "return", World.return_)
