"""Ways to train the same thing are measured side by side, and only if they do train the same thing.

Each contender is a job of one or more processes. All are started, compile, and train a few updates from the same
weights on the same batches: where a loss differs, nothing is timed. Then each in turn makes some updates while the
others wait, blocked, and one before them that is not timed; the order is ABBA. What is reported are medians with
quartiles and ratios within one run.
"""

import dataclasses
import datetime
import json
import os
import pathlib
import platform
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from benchmarks import contender

ROOT = pathlib.Path(__file__).parent.parent
IDLE = 0.10  # of a core, that all contenders together may take while they wait
LAST_WORDS = 15  # lines


class Unfair(Exception):
    """The contenders cannot be compared, or one of them is gone; says which, and why."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """What is started: a command for each rank, or under mpirun. launcher: none, ranks or mpirun."""

    name: str
    command: Sequence[str]
    processes: int = 1
    launcher: str = "none"
    env: dict[str, str] = dataclasses.field(default_factory=dict)


class Job:
    """A contender that runs: its processes, and a line to each of its ranks."""

    def __init__(self, own: Contender, folder: pathlib.Path, port: int, cores: Sequence[int]):
        self.name, self.own = own.name, own
        self.log = folder / f"{own.name.replace(' ', '_').replace('/', '_')}.log"
        self.lines: dict[int, socket.socket] = {}
        self.answers: dict[int, TextIO] = {}
        self.pids: list[int] = []
        self.facts: dict[str, Any] = {}
        env = {
            **environment(**own.env),
            contender.ADDRESS: str(port),
            contender.CORES: ",".join(map(str, cores)),
            contender.NAME: own.name,
            contender.PROCESSES: str(own.processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        launch, ranks = list(own.command), range(own.processes if own.launcher == "ranks" else 1)
        if own.launcher == "mpirun":
            launch = ["mpirun", "-np", str(own.processes), "--bind-to", "none", "--oversubscribe", *launch]
        self.processes, self.began = [], time.perf_counter()
        with self.log.open("w") as log:
            for rank in ranks:
                if own.launcher == "ranks":
                    env[contender.RANK] = str(rank)
                self.processes.append(
                    subprocess.Popen(
                        launch, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
                    )
                )

    def fail(self, why: str) -> Unfair:
        """The exception to raise, with what the contender last said."""
        said = self.log.read_text(errors="replace").splitlines()[-LAST_WORDS:]
        return Unfair("\n  ".join([f"{self.name}: {why}; it last said:", *said]))

    def tell(self, **command: Any) -> None:
        for line in self.lines.values():
            line.sendall(f"{json.dumps(command)}\n".encode())

    def ask(self, timeout: float, **command: Any) -> list[dict[str, Any]]:
        """The answers of all ranks. Raises Unfair where one is gone, or says nothing in `timeout` seconds."""
        try:
            self.tell(**command)
        except OSError:
            raise self.fail("a process of it is gone") from None
        deadline, answers, waiting = time.monotonic() + timeout, {}, dict(self.lines)
        while waiting:
            ready, *_ = select.select(list(waiting.values()), [], [], 1.0)
            for rank in [rank for rank, line in waiting.items() if line in ready]:
                try:
                    del waiting[rank]
                    text = self.answers[rank].readline()
                except OSError:
                    text = ""
                if not text:
                    self.fusion_barrier()
                    raise self.fail("a process of it is gone")
                answers[rank] = json.loads(text)
            if not ready and time.monotonic() > deadline:
                raise self.fail(f"no answer to {command} within {timeout:.0f} s")
        return [answers[rank] for rank in sorted(answers)]

    def fusion_barrier(self, seconds: float = 2.0) -> None:
        """Gives what is dying a moment to say why."""
        for process in self.processes:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue

    def cpu_seconds(self) -> float:
        """Of all its ranks, since they began."""
        total = 0.0
        for pid in self.pids:
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total

    def end(self) -> None:
        """Leaves nothing running."""
        for line in (*self.answers.values(), *self.lines.values()):
            line.close()
        for process in self.processes:
            process.terminate() if process.poll() is None else None
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
            time.sleep(0.05)
        for group in [*(process.pid for process in self.processes), *self.pids]:
            for kill in (os.killpg, os.kill):
                try:
                    kill(group, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue
        for process in self.processes:
            process.wait()


def measure(
    contenders: Sequence[Contender],
    folder: pathlib.Path,
    *,
    updates: int,
    repeats: int = 7,
    check: int = 15,
    tolerance: float = 1e-4,
    cores: Sequence[int] | None = None,
    timeout: float = 300.0,
    idle: float = IDLE,
) -> dict[str, Any]:
    """{contenders: {name: samples and facts}, ...} of `repeats` times `updates` updates each; see the module.

    The first contender's losses are those that the others must have, to `tolerance`, relative, over `check` updates.
    folder: for logs. cores: where they run; all that this process may use. timeout: seconds for any answer. idle: cores
    that all of them together may take while they wait.
    Raises Unfair.
    """
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    jobs: list[Job] = []
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            for own in contenders:
                jobs.append(Job(own, folder, server.getsockname()[1], cores))
            meet(server, jobs, timeout)
            losses = {job.name: train(job, check, timeout) for job in jobs}
            compare(losses, tolerance)
            for job in jobs:
                job.ask(timeout, do="run", updates=updates)
            waiting = idleness(jobs)
            if waiting > idle:
                raise Unfair(f"the contenders take {waiting:.0%} of a core while they wait")
            samples: dict[str, list[float]] = {job.name: [] for job in jobs}
            for repeat in range(repeats):
                for job in jobs[:: -1 if repeat % 2 else 1]:
                    job.ask(timeout, do="run", updates=1)  # in training nothing waits: caches and pages are there again
                    seconds = max(answer["seconds"] for answer in job.ask(timeout, do="run", updates=updates))
                    samples[job.name].append(seconds / updates)
            for job in jobs:
                job.facts["memory"] = job.ask(timeout, do="memory")
                job.tell(do="stop")
            for job in jobs:
                job.fusion_barrier(5.0)
        finally:
            for job in jobs:
                job.end()
    found = {
        job.name: {
            **job.facts,
            "losses": losses[job.name],
            "seconds_per_update": samples[job.name],
            "median": statistics.median(samples[job.name]),
            "quartiles": quartiles(samples[job.name]),
            "relative_loss_error": worst(losses[job.name], losses[jobs[0].name]),
        }
        for job in jobs
    }
    return {
        "updates": updates,
        "repeats": repeats,
        "idle_cores": waiting,
        "cores": list(cores),
        "contenders": found,
        **machine(),
    }


def meet(server: socket.socket, jobs: Sequence[Job], timeout: float) -> None:
    """Waits until all ranks of all jobs have come."""
    deadline, wanted = time.monotonic() + timeout, {job.name: job for job in jobs}
    while any(len(job.lines) < job.own.processes for job in jobs):
        ready, *_ = select.select([server], [], [], 0.2)
        if ready:
            line, _ = server.accept()
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            file = line.makefile()
            hello = json.loads(file.readline())
            job = wanted[hello["name"]]
            job.lines[hello["rank"]], job.answers[hello["rank"]] = line, file
            job.pids.append(hello["pid"])
            job.facts |= {
                "start_s": time.perf_counter() - job.began,
                "versions": hello["versions"],
                "cores": hello["cores"],
            }
        for job in jobs:
            if len(job.lines) < job.own.processes:
                if any(process.poll() is not None for process in job.processes):
                    job.fusion_barrier()
                    codes = [process.poll() for process in job.processes]
                    raise job.fail(f"it ended with code {codes[0] if len(codes) == 1 else codes} before it began")
                if time.monotonic() > deadline:
                    raise job.fail(f"it did not begin within {timeout:.0f} s")


def train(job: Job, updates: int, timeout: float) -> list[float]:
    """The losses of the first updates, means over the ranks; the first of them is timed apart, as it compiles."""
    first = job.ask(timeout, do="losses", updates=1)
    more = job.ask(timeout, do="losses", updates=updates - 1)
    job.facts["first_update_s"] = max(answer["seconds"] for answer in first)
    ranks = [a["losses"] + b["losses"] for a, b in zip(first, more, strict=True)]
    return [statistics.fmean(values) for values in zip(*ranks, strict=True)]


def worst(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference; no number, no losses, or another number of them count as infinite."""
    if not losses or len(losses) != len(others):
        return float("inf")
    errors = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(losses, others, strict=True)]
    return max(error if error == error else float("inf") for error in errors)


def compare(losses: dict[str, list[float]], tolerance: float) -> None:
    """Raises Unfair, naming the first that does not train what the first contender trains."""
    first, *others = losses
    for name in others:
        if (error := worst(losses[name], losses[first])) > tolerance:
            if not losses[name] or len(losses[name]) != len(losses[first]):
                raise Unfair(f"{name}: it has {len(losses[name])} losses, and {first} has {len(losses[first])}")
            pairs = zip(losses[name], losses[first], strict=True)
            update = next(i for i, (a, b) in enumerate(pairs, 1) if not abs(a - b) <= tolerance * abs(b))
            raise Unfair(
                f"{name}: its losses differ from those of {first} by {error:.1e} (at most {tolerance:.1e}); "
                f"at update {update} it has {losses[name][update - 1]:.6f}, not {losses[first][update - 1]:.6f}"
            )


def idleness(jobs: Sequence[Job], seconds: float = 1.0) -> float:
    """Cores that all jobs together use while they have nothing to do."""
    time.sleep(0.3)
    before = sum(job.cpu_seconds() for job in jobs)
    time.sleep(seconds)
    return (sum(job.cpu_seconds() for job in jobs) - before) / seconds


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, upper


def ratio(found: dict[str, Any], a: str, b: str) -> dict[str, Any]:
    """How many times as fast a is as b: the ratio of medians, and the median and quartiles over the repeats."""
    one, other = (found["contenders"][name]["seconds_per_update"] for name in (a, b))
    each = [y / x for x, y in zip(one, other, strict=True)]
    of_medians = statistics.median(other) / statistics.median(one)
    return {"of_medians": of_medians, "median": statistics.median(each), "quartiles": quartiles(each)}


def machine() -> dict[str, Any]:
    """Where and when."""
    cpu = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu, "cores": os.cpu_count(), "system": platform.platform(), "load": os.getloadavg()},
        "python": sys.version.split()[0],
    }


def environment(**more: str) -> dict[str, str]:
    """That of this process, in which the benchmarks can be imported, and `more`."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **more}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
