"""Measure several ways to train the same thing side by side, after a check that they do train the
same thing.

Each contender is a job of one or more processes. All are started, compile, and train a few updates
from the same weights on the same batches. Then they take turns (ABBA): one makes some updates,
after one that is not timed, while the others wait, blocked. The result has medians with quartiles,
and ratios within one run.

A contender that fails, hangs or trains something else is left out, with the reason; the others
continue."""

import datetime
import os
import pathlib
import platform
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from benchmarks.job import Contender, Failed, Job, first_line, read

# Of a core, that all contenders together may use while they wait. On a virtual machine, a thread that
# wakes up takes milliseconds.
IDLE = 0.20
HELLO_SECONDS = 5.0  # for the first line of a connection
TURN = 2.0  # seconds; a contender that needs longer for `updates` updates makes fewer in a turn
LEAST_UPDATES = 2  # in a turn
LEAST_REPEATS = 3  # also where the time is over
# This many are enough where each one's quartiles are this close, relative.
STEADY_REPEATS, STEADY = 5, 0.02

T = TypeVar("T")


class Contest:
    """The jobs that are still compared, and the reasons why others are left out."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.left_out: dict[str, str] = {}

    def start(
        self, contender: Contender, folder: pathlib.Path, port: int, cores: Sequence[int]
    ) -> None:
        """Start a contender; leave it out if its command does not exist."""
        try:
            self.jobs.append(Job(contender, folder, port, cores))
        except OSError as error:
            self.left_out[contender.name] = f"it does not start: {error}"

    def leave_out(self, job: Job, why: str) -> None:
        """End a job. Raises Failed if it was the last."""
        self.jobs.remove(job)
        self.left_out[job.name] = why
        job.end()
        self.check()

    def check(self) -> None:
        """Raise Failed if no job is left."""
        if not self.jobs:
            first = "; ".join(f"{name}: {first_line(why)}" for name, why in self.left_out.items())
            logs = (f"{name}: {why}" for name, why in self.left_out.items() if "\n" in why)
            raise Failed("\n".join([f"no contender is left: {first}", *logs]))

    def each(self, call: Callable[[Job], T], order: int = 1) -> dict[str, T]:
        """Return {name: call(job)}; a job that fails is left out. order: 1, or -1 for the last job
        first.
        """
        results = {}
        for job in self.jobs[::order]:
            try:
                results[job.name] = call(job)
            except Failed as error:
                self.leave_out(job, str(error))
        return results


def measure(
    contenders: Sequence[Contender],
    folder: pathlib.Path,
    *,
    updates: int,
    repeats: int = 7,
    check: int = 15,
    tolerance: float = 1e-4,
    cores: Sequence[int] | None = None,
    timeout: float = 120.0,
    idle: float = IDLE,
    seconds: float = float("inf"),
) -> dict[str, Any]:
    """Return {contenders: {name: samples and facts}, left_out: {name: reason}, ...}.

    Args:
        folder: for logs.
        updates: in a turn; fewer for a contender that is so slow that they take longer than `TURN`.
        repeats: turns of each contender; fewer where the times vary little, or `seconds` are over.
        check: updates of which the losses must be equal to `tolerance`, relative.
        cores: on which the contenders run; by default all that this process may use.
        timeout: seconds for any answer.
        idle: cores that all contenders together may use while they wait.
        seconds: after which no repeat begins, except the first `LEAST_REPEATS`.

    Raises:
        Failed: no contender is left.
    """
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    contest, ends = Contest(), [time.monotonic()]
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            for each in contenders:
                contest.start(each, folder, server.getsockname()[1], cores)
            contest.check()
            meet(server, contest, timeout)
            ends.append(time.monotonic())
            check_losses(contest, check, tolerance, timeout)
            ends.append(time.monotonic())
            contest.each(lambda job: set_turn(job, updates, timeout))
            waiting = leave_out_busy(contest, idle)
            take_turns(contest, repeats, ends[0] + seconds, timeout)
            ends.append(time.monotonic())
            contest.each(lambda job: job.facts.update(memory=job.ask(timeout, do="memory")))
            contest.each(lambda job: job.send(do="stop"))
            for job in contest.jobs:
                job.wait(5.0)
        finally:
            for job in contest.jobs:
                job.end()
    for job in contest.jobs:
        samples = job.facts["seconds_per_update"]
        job.facts |= {"median": statistics.median(samples), "quartiles": quartiles(samples)}
    found = {job.name: job.facts for job in contest.jobs}
    counts = {
        "updates": updates,
        "repeats": min(len(own["seconds_per_update"]) for own in found.values()),
    }
    names = ("start", "compilation and losses", "turns")
    phases = {name: round(b - a, 1) for name, a, b in zip(names, ends, ends[1:])}
    where = {"phases_s": phases, "idle_cores": waiting, "cores": list(cores), **machine()}
    return {**counts, "contenders": found, "left_out": contest.left_out, **where}


def meet(server: socket.socket, contest: Contest, timeout: float) -> None:
    """Wait until all ranks of all jobs have connected; leave out the jobs that end before, or are
    too late.

    The jobs start at once and share the cores, so that the time limit begins again with each rank
    that connects."""
    deadline = time.monotonic() + timeout
    while any(not job.is_connected for job in contest.jobs):
        ready, *_ = select.select([server], [], [], 0.2)
        if ready:
            line, _ = server.accept()
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.settimeout(HELLO_SECONDS)
            file = line.makefile(errors="replace")
            try:
                hello = read(file.readline())
            except OSError:
                hello = None
            name = hello.get("name") if isinstance(hello, dict) else None
            job = next((job for job in contest.jobs if job.name == name), None)
            why = (
                job.connect(hello, line, file)
                if job
                else "a stranger, or of a job that was left out"
            )
            if not why:
                deadline = time.monotonic() + timeout
            if why:
                file.close()
                line.close()
            if why and job:
                contest.leave_out(job, why)
        for job in [job for job in contest.jobs if not job.is_connected]:
            try:
                job.check_start()
                if time.monotonic() > deadline:
                    raise job.failed(f"it did not begin, and no other did for {timeout:.0f} s")
            except Failed as error:
                contest.leave_out(job, str(error))


def train(job: Job, updates: int, timeout: float) -> list[float]:
    """Return the losses of the first updates, means over the ranks. The first update is timed
    alone: it compiles.
    """
    first = job.ask(timeout, do="losses", updates=1)
    more = job.ask(timeout, do="losses", updates=updates - 1)
    job.facts["first_update_s"] = max(answer["seconds"] for answer in first)
    ranks = [a["losses"] + b["losses"] for a, b in zip(first, more, strict=True)]
    for losses in ranks:
        if len(losses) != updates:
            raise job.failed(f"it has {len(losses)} losses of {updates} updates")
    return [statistics.fmean(values) for values in zip(*ranks, strict=True)]


def check_losses(contest: Contest, updates: int, tolerance: float, timeout: float) -> None:
    """Train a few updates and leave out the contenders whose losses differ from the reference.

    The reference is the contender with which most others agree; the first of them if there are
    several."""
    losses = contest.each(lambda job: train(job, updates, timeout))
    agreeing = {
        name: sum(worst(x, one) <= tolerance for x in losses.values())
        for name, one in losses.items()
    }
    first = max(losses, key=lambda name: agreeing[name])
    for job in list(contest.jobs):
        own = losses[job.name]
        error = worst(own, losses[first])
        job.facts |= {"losses": own, "relative_loss_error": error}
        if not error <= tolerance:
            contest.leave_out(job, difference(own, losses[first], first, tolerance))


def difference(
    losses: Sequence[float], others: Sequence[float], name: str, tolerance: float
) -> str:
    """Return a sentence about how losses differ from those of the contender `name`."""
    if losses is others:
        return f"its losses are not finite: {', '.join(f'{x:.6g}' for x in losses)}"
    i = next(
        i for i, (a, b) in enumerate(zip(losses, others)) if not abs(a - b) <= tolerance * abs(b)
    )
    return (
        f"its losses differ from those of {name} by {worst(losses, others):.1e} (at most {tolerance:.1e}); "
        f"at update {i + 1} it has {losses[i]:.6f}, not {others[i]:.6f}"
    )


def set_turn(job: Job, updates: int, timeout: float) -> None:
    """Set the number of updates of a turn: `updates`, or as many as take `TURN` seconds."""
    few = max(LEAST_UPDATES, updates // 8)
    job.facts["updates"] = min(
        updates, max(LEAST_UPDATES, round(TURN * few / job.run(few, timeout)))
    )


def take_turns(contest: Contest, repeats: int, deadline: float, timeout: float) -> None:
    """Time the turns of all contenders. An update before a turn brings back caches and pages."""

    def turn(job: Job) -> None:
        job.run(1, timeout)
        updates = job.facts["updates"]
        job.facts.setdefault("seconds_per_update", []).append(job.run(updates, timeout) / updates)

    for repeat in range(repeats):
        if repeat >= LEAST_REPEATS and time.monotonic() > deadline:
            break
        if repeat >= STEADY_REPEATS and all(
            is_steady(job.facts["seconds_per_update"]) for job in contest.jobs
        ):
            break
        contest.each(turn, -1 if repeat % 2 else 1)


def worst(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference; infinite for NaN, for no losses, and for another
    number of them.
    """
    if not losses or len(losses) != len(others):
        return float("inf")
    errors = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(losses, others, strict=True)]
    return max(error if error == error else float("inf") for error in errors)


def leave_out_busy(contest: Contest, idle: float) -> float:
    """Return the cores that all jobs use while they wait; leave out the busiest until that is at
    most `idle`.
    """
    while True:
        used = idleness(contest)
        if sum(used.values()) <= idle:
            return sum(used.values())
        name = max(used, key=lambda name: used[name])
        job = next(job for job in contest.jobs if job.name == name)
        contest.leave_out(
            job, f"it uses {used[name]:.0%} of a core while it waits, and slows the others down"
        )


def idleness(contest: Contest, seconds: float = 1.0) -> dict[str, float]:
    """Return the cores that each job uses while it waits."""
    time.sleep(0.3)
    before = contest.each(Job.cpu_seconds)
    time.sleep(seconds)
    return {
        name: (after - before[name]) / seconds
        for name, after in contest.each(Job.cpu_seconds).items()
    }


def is_steady(values: Sequence[float]) -> bool:
    lower, upper = quartiles(values)
    return upper - lower <= STEADY * statistics.median(values)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, upper


def ratio(found: dict[str, Any], a: str, b: str) -> dict[str, Any]:
    """Return how many times as fast a is as b: of the medians, and median and quartiles over the
    repeats.
    """
    one, other = (found["contenders"][name]["seconds_per_update"] for name in (a, b))
    each = [y / x for x, y in zip(one, other, strict=True)]
    of_medians = statistics.median(other) / statistics.median(one)
    return {
        "of_medians": of_medians,
        "median": statistics.median(each),
        "quartiles": quartiles(each),
    }


def machine() -> dict[str, Any]:
    """Return date, CPU, cores, system, load and the version of Python."""
    cpu = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu,
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "load": os.getloadavg(),
        },
        "python": sys.version.split()[0],
    }
