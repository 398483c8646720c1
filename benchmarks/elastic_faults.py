"""Faults of an elastic job, as functions (job, rng) that return whether there was something to do
them to.
"""

import contextlib
import os
import pathlib
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 20.0  # seconds that a fault waits for its moment


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill(job: Any, rng: random.Random) -> bool:
    """A random process."""
    return kill_one(job, rng.choice(job.ranks() or [0]))


def kill_one(job: Any, pid: int) -> bool:
    if pid:
        send(pid, signal.SIGKILL)
    return bool(pid)


def first(job: Any, rng: random.Random) -> bool:
    """The first process that the launcher has started."""
    return kill_one(job, min(job.ranks(), default=0))


def pair(job: Any, rng: random.Random) -> bool:
    """Two processes, one second apart."""
    for pid in rng.sample(job.ranks(), min(2, len(job.ranks()))):
        send(pid, signal.SIGKILL)
        time.sleep(1.0)
    return True


def stop(job: Any, rng: random.Random) -> bool:
    """A process does nothing for 25 s: longer than silence is tolerated."""
    if not (ranks := job.ranks()):
        return False
    pid = rng.choice(ranks)
    send(pid, signal.SIGSTOP)
    threading.Timer(25.0, send, (pid, signal.SIGCONT)).start()
    return True


def coordinator(job: Any, rng: random.Random) -> bool:
    return kill_one(job, next(iter(job.coordinators()), 0))


def both(job: Any, rng: random.Random) -> bool:
    """The coordinator and a process."""
    return coordinator(job, rng) and kill(job, rng)


def recovery(job: Any, rng: random.Random) -> bool:
    """A second process while the others recover from the loss of the first."""
    kill(job, rng)
    time.sleep(rng.uniform(0.0, 2.0))
    return kill(job, rng)


def survivor(job: Any, rng: random.Random) -> bool:
    """All processes but one, which alone has the state then, and those that start in their place,
    during recovery.
    """
    deadline = time.monotonic() + PATIENCE
    while (
        not (ranks := job.ranks())
        or job.generations()[-1:] != [len(ranks)]
        or not job.has_trained()
    ):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    spared = rng.choice(ranks)
    for pid in rng.sample(ranks, len(ranks)):
        kill_one(job, pid if pid != spared else rng.choice([0, *set(job.ranks()) - {spared}]))
        time.sleep(rng.uniform(0.0, 1.5))
    return len(ranks) > 1


def frozen(job: Any, rng: random.Random) -> bool:
    """The coordinator is stopped, and continues after 5, 20 or 60 s if it still exists."""
    pid = next(iter(job.coordinators()), 0)
    if pid:
        send(pid, signal.SIGSTOP)
        threading.Timer(rng.choice([5.0, 20.0, 60.0]), send, (pid, signal.SIGCONT)).start()
    return bool(pid)


def flood(job: Any, rng: random.Random) -> bool:
    """A program without the secret opens as many connections as it can for 10 s, while a process
    joins again.
    """
    ports = [port for pid in job.coordinators() for port in listening(pid)]
    threading.Thread(target=connect_often, args=(ports, 10.0), daemon=True).start()
    return bool(ports) and kill(job, rng)


def connect_often(ports: list[int], seconds: float) -> int:
    """Open connections to ports of this host and close them again for some seconds; return how
    many.
    """
    count, deadline = 0, time.monotonic() + seconds
    while ports and time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", ports[count % len(ports)]), 0.1),
        ):
            count += 1
    return count


Fault = Callable[[Any, random.Random], bool]


def when(changes: Callable[[Any], Any], act: Fault = kill) -> Fault:
    """Return a fault: kill a process, or `act`, at the moment when `changes(job)` does."""

    def fault(job: Any, rng: random.Random) -> bool:
        before, deadline = changes(job), time.monotonic() + PATIENCE
        while changes(job) == before:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.05))
        return act(job, rng)

    return fault


def touched(name: str) -> Callable[[Any], Any]:
    def time_of(job: Any) -> float:
        file = job.folder / name
        return file.stat().st_mtime if file.exists() else 0.0

    return time_of


def starts(job: Any) -> int:
    """How many generations have started: they compile now."""
    file = job.folder / "run/events.jsonl"
    return file.read_text().count('"processes"') if file.exists() else 0


def compilation(job: Any, rng: random.Random) -> bool:
    """A process while the generation after the loss of another compiles."""
    threading.Timer(0.1, kill, (job, rng)).start()
    return when(starts)(job, rng)


def restarted(job: Any, rng: random.Random, earliest: float, latest: float) -> int:
    """Kill a process; return the one that is started in its place, `earliest` to `latest` seconds
    later, or 0.
    """
    before, deadline = set(job.ranks()), time.monotonic() + PATIENCE
    kill(job, rng)
    while not (new := set(job.ranks()) - before):
        if time.monotonic() > deadline:
            return 0
        time.sleep(0.01)
    time.sleep(rng.uniform(earliest, latest))
    return min(new)


def start(job: Any, rng: random.Random) -> bool:
    """A process that has just started again."""
    return kill_one(job, restarted(job, rng, 0.0, 2.0))


def join(job: Any, rng: random.Random) -> bool:
    """One that joins, or another one while it joins."""
    new = restarted(job, rng, 2.0, 6.0)
    return bool(new) and kill_one(job, rng.choice([new, *job.ranks()]))


def damage(job: Any, rng: random.Random) -> bool:
    """A bit flips in the snapshot of a process, and another one is killed."""
    ranks = job.ranks()
    if len(ranks) < 3:
        return False
    damaged, lost = rng.sample(ranks, 2)
    (job.folder / f"damage.{damaged}").touch()
    time.sleep(0.1)
    return kill_one(job, lost)


def disk(job: Any, rng: random.Random) -> bool:
    """For 3 s no file can grow."""
    ranks = job.ranks()

    def limit(size: int) -> None:
        for pid in ranks:
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    limit(4096)
    threading.Timer(3.0, limit, (resource.RLIM_INFINITY,)).start()
    return bool(ranks)


def stranger(job: Any, rng: random.Random) -> bool:
    """A program without the secret connects, 50 times."""
    for pid in job.coordinators():
        with contextlib.suppress(OSError):
            for port in listening(pid):
                for _ in range(50):
                    with socket.create_connection(("127.0.0.1", port), 1) as connection:
                        connection.sendall(rng.randbytes(200))
            return True
    return False


def listening(pid: int) -> list[int]:
    """The TCP ports that a process listens on (proc(5), /proc/net/tcp)."""
    files = [str(entry.readlink()) for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir()]
    rows = [
        line.split() for line in pathlib.Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    ]
    return [
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in files
    ]


FAULTS: dict[str, Fault] = {
    **{
        f.__name__: f
        for f in (kill, first, pair, stop, coordinator, both, recovery, compilation, start, join)
    },
    **{f.__name__: f for f in (survivor, frozen, flood, damage, disk, stranger)},
    "save": when(touched("save")),
    "evaluation": when(touched("evaluation")),
}


# Kinds of `of_hosts`: a host is killed, or loses its power; its cable is cut; the network is split.
# 0: the first host.
OF_HOSTS = [
    *(
        "kill",
        "kill0",
        "power",
        "power0",
        "save",
        "evaluation",
        "recovery",
        "cut",
        "cut0",
        "split",
        "split0",
        "halves",
    ),
]


def of_hosts(job: Any, kind: str, rng: random.Random) -> tuple[float, bool | None]:
    """Harm hosts or their network; return for how many seconds, and whether the job must train then
    (None: it may).
    """
    count, seconds = len(job.up), rng.uniform(2.0, 8.0)
    host = 0 if kind.endswith("0") else rng.randrange(1, count)
    if kind in ("save", "evaluation"):
        when(touched(kind), lambda job, rng: job.lose(rng.randrange(count)))(job, rng)
    elif kind == "recovery":
        first, second = rng.sample(range(count), 2)
        job.lose(first)
        time.sleep(rng.uniform(0.0, 3.0))
        job.lose(second)
    elif kind.startswith(("kill", "power")):
        if kind.startswith("power"):
            job.hosts.cut(host)
        job.lose(host)
    else:
        seconds = rng.choice(
            [rng.uniform(3.0, 15.0), rng.uniform(18.0, 23.0), rng.uniform(50.0, 65.0)]
        )
        group = [0, host] if kind == "halves" else [host]
        job.hosts.cut(host) if kind.startswith("cut") else job.hosts.split(group)
        return seconds, False if host == 0 or 2 * len(group) >= count else seconds > 40 or None
    return seconds, None
