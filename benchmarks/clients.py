"""The coordinator with thousands of clients: how long they take to join, to exchange texts and to
hear of a death.

    python -m benchmarks.clients [64 256 1024 4096] [--workers 4] [--idle 10]

Starts the coordinator as rank 0 does, and clients with the package's own code, three threads each,
in `--workers` processes, with facts as of hosts with 8. Left out: networks, hosts (the clients use
most of this machine's cores), JAX's service.
`s`, `first_s`: until the last client, and the first, is done; `cpu_s`, `mb`: of the coordinator.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxdp.process import connection, hosts, joining, membership
from jaxdp.process.protocol import Facts, Settings

TIMEOUT = 250.0  # seconds of all calls
BYTES, LIMIT = (0, 8, 1024), 4e9  # of exchanged texts; of all answers together


class Client(membership.Membership):
    """A member that records when it hears of a fault, and does not end its process."""

    messages, ended_at = 0, 0.0

    def _hear(self, message: dict[str, Any]) -> None:
        self.messages += 1
        super()._hear(message)

    def end_process(self, text: str, code: int = 1, author: int | None = None) -> None:
        if not self.ending.is_set():  # else `kill` has ended it
            self.ended_at = time.monotonic()
            self.ending.set()


def facts(rank: int, size: int) -> Facts:
    """Return facts of the size that they have in a job."""
    host, address = (
        f"node{rank // 8:05}.cluster",
        f"10.{rank >> 19}.{rank >> 11 & 255}.{rank >> 3 & 255}",
    )
    names = {
        "host": host,
        "boot": f"{host}-89ab-cdef-0123-456789ab",
        "visible": str(rank % 8),
        "pid": 100_000 + rank,
    }
    places = {"addresses": [address], "outward": address, "network": "net:[4026531840]"}
    versions = {
        "jaxdp": "0.3",
        "jax": "0.10.2",
        "jaxlib": "0.10.2",
        "python": "3.11",
        "tls": "no",
    }
    return {"rank": rank, "size": size, "gloo": False, **names, **places, **versions}


class Clients:
    """The clients of one worker process. The methods return times of `time.monotonic`, which all
    processes share.
    """

    def __init__(self, port: int, secret: str, ranks: Sequence[int], size: int):
        self.address, self.ranks, self.size = ("127.0.0.1", port, secret), ranks, size
        self.pool = concurrent.futures.ThreadPoolExecutor(len(ranks))
        self.members: list[Client] = []

    def each(self, work: Callable[[Any], None], items: Sequence[Any]) -> list[float]:
        def timed(item: Any) -> float:
            work(item)
            return time.monotonic()

        return [time.monotonic(), *self.pool.map(timed, items)]

    def join(self) -> list[float]:
        def work(rank: int) -> None:
            job = connection.join(*self.address, facts(rank, self.size), TIMEOUT)
            assert job.rank == rank and [f["rank"] for f in job.facts] == [*range(self.size)]
            self.members.append(Client(job, rank % 8, TIMEOUT, None))
            job.facts.clear()

        times = self.each(work, self.ranks)
        for member in self.members:
            member.start()
        return times

    def exchange(self, size: int) -> list[float]:
        def text(rank):
            return str(rank).rjust(size, "x") if size else ""  # equal ones, or different ones

        def work(member: Client) -> None:
            texts = member.exchange(f"{size} bytes", text(member.rank), range(self.size), TIMEOUT)
            assert len(texts) == self.size and texts[-1] == text(self.size - 1)

        return self.each(work, self.members)

    def messages(self) -> list[int]:
        return [sum(member.messages for member in self.members)]

    def kill(self) -> list[float]:
        self.members[0].ending.set()
        self.members[0].connection.socket.shutdown(2)
        return [time.monotonic()]

    def heard(self) -> list[float]:
        others = [
            member for member in self.members if member.ended_at or not member.ending.is_set()
        ]
        while not all(member.ended_at for member in others):
            time.sleep(0.05)
        return [member.ended_at for member in others]


def serve(pipe: Any, *arguments: Any) -> None:
    threading.stack_size(1 << 18)
    # Decode one answer after the other: thousands at once need memory that no host has to.
    sys.setswitchinterval(0.1)
    clients = Clients(*arguments)
    while True:
        name, *more = pipe.recv()
        pipe.send(getattr(clients, name)(*more))


def usage(pid: int) -> tuple[float, int]:
    """Return the CPU seconds of a process, and the peak of its memory in MB."""
    stat, status = (pathlib.Path(f"/proc/{pid}", name).read_text() for name in ("stat", "status"))
    return sum(map(int, stat.split()[13:15])) / os.sysconf("SC_CLK_TCK"), int(
        status.split("VmHWM:")[1].split()[0]
    ) >> 10


def measure(size: int, workers: int, idle: float) -> None:
    """workers: processes for clients. idle: seconds in which heartbeats are counted."""
    port, secret, spawn = (
        hosts.free_port(),
        secrets.token_hex(16),
        multiprocessing.get_context("spawn"),
    )
    settings = Settings(size, secret, port, "127.0.0.1", None, TIMEOUT, TIMEOUT)
    pid, pipes = (
        joining.start_coordinator(settings, hosts.hostname()),
        [spawn.Pipe() for _ in range(workers)],
    )
    assert pid is not None, "the coordinator was killed"
    for i, (_, pipe) in enumerate(pipes):
        spawn.Process(
            target=serve, args=(pipe, port, secret, range(size)[i::workers], size), daemon=True
        ).start()

    def call(name: str, *more: int, of: slice = slice(None)) -> list[float]:
        for pipe, _ in pipes[of]:
            pipe.send((name, *more))
        return [x for pipe, _ in pipes[of] for x in pipe.recv()]

    def report(what: str, seconds: float, cpu: float, **more: float) -> None:
        now, peak = usage(pid)
        result = {
            "clients": size,
            "what": what,
            "s": round(seconds, 3),
            "cpu_s": round(now - cpu, 2),
            "mb": peak,
        }
        print(json.dumps(result | more), flush=True)

    call("messages")  # all have started
    calls: list[tuple[str, list[int]]] = [
        ("join", []),
        *(("exchange", [n]) for n in BYTES if n * size**2 < LIMIT),
    ]
    for what, of in calls:
        cpu, times = usage(pid)[0], call(what, *of)
        first, *_, last = sorted(times)[workers:]
        report(
            " ".join(map(str, [what, *of])),
            last - min(times),
            cpu,
            first_s=round(first - min(times), 3),
        )
    cpu, before = usage(pid)[0], sum(call("messages"))
    time.sleep(idle)
    report("heartbeats", idle, cpu, per_s=(sum(call("messages")) - before) / idle)
    cpu, died = usage(pid)[0], call("kill", of=slice(1))[0]
    report("death", max(heard := call("heard")) - died, cpu, first_s=round(min(heard) - died, 3))
    for process in multiprocessing.active_children():
        process.kill()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clients", type=int, nargs="*", default=[64, 256, 1024, 4096])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--idle", type=float, default=10.0)
    options = parser.parse_args(argv)
    for size in options.clients:
        measure(size, options.workers, options.idle)


if __name__ == "__main__":
    main(sys.argv[1:])
