"""Run several trainings at once on one host: each gets its share of the GPUs or of the processor's cores."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, Any, NamedTuple, Protocol

from jaxdp.distributed import gpus
from jaxdp.errors import INTERRUPTED, PREEMPTED, UsageError
from jaxdp.metrics.jsonl import read
from jaxdp.report.read import is_held

OUTPUT = "output.txt"
SHOWN = ("loss", "accuracy", "perplexity")


class Slot(NamedTuple):
    """Devices for one run. environment: variables of its process. cores: processors that it may use."""

    environment: dict[str, str]
    cores: set[int]


class Job(Protocol):
    """A run to make; see `jaxdp.cli.sweep.Trial`."""

    name: Any
    directory: Any
    arguments: Any

    def is_finished(self) -> bool: ...


class Running(NamedTuple):
    job: Job
    child: "subprocess.Popen[bytes]"
    output: IO[bytes]
    since: float


def make_slots(jobs: int | None, devices: int | None, count: int) -> list[Slot]:
    """Divide the devices of this host.

    Args:
        jobs: runs at once; None: one for each GPU, or for `devices` of them, and without GPUs one for each core.
        devices: GPUs of a run (`parallel.devices`).
        count: the number of runs, of which there may be fewer.

    Raises:
        UsageError: there are too few GPUs.
    """
    cores = sorted(os.sched_getaffinity(0))
    visible = gpus.visible_devices()
    names = [str(i) for i in range(gpus.count())]
    if names and visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    each = devices or (max(1, len(names) // jobs) if jobs else 1)
    jobs = jobs or max(1, len(names) // each if names else len(cores))
    if names and jobs * each > len(names):
        raise UsageError(f"--jobs: {jobs} runs on {each} GPUs each, but there are {len(names)}; give a smaller number")
    jobs = max(1, min(jobs, count))
    shares = [cores[i::jobs] or cores for i in range(jobs)]
    visible_of = lambda i: {"CUDA_VISIBLE_DEVICES": ",".join(names[i * each : (i + 1) * each])} if names else {}
    return [Slot(visible_of(i), set(share)) for i, share in enumerate(shares)]


def run_all(jobs: Sequence[Job], slots: Sequence[Slot]) -> int:
    """Train each job in a process, with its output in `output.txt`, and print a line about each.

    SIGTERM and SIGUSR1 are sent on to the processes, which save and end. A job whose directory another process trains
    in is left to that process. Returns the exit code: 0, 1 if a run failed, 75 or 130 after a signal.
    """
    waiting, running, failed, done = list(jobs), dict[int, Running](), 0, 0
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        if number != signal.SIGINT:  # a terminal sends it to the processes too
            for process in running.values():
                process.child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, stop)
    try:
        while running or (waiting and not received):
            for i, slot in enumerate(slots):
                if i in running and running[i].child.poll() is not None:
                    done += 1
                    failed += not report(running.pop(i), f"{done}/{len(jobs)}")
                job = None if i in running or received else next((j for j in waiting if not is_held(j.directory)), None)
                if job is not None:
                    waiting.remove(job)
                    if job.is_finished():  # meanwhile, by another process
                        done += 1
                    else:
                        running[i] = start(job, slot)
            time.sleep(0.05)
    finally:
        for process in running.values():
            process.child.kill()
    if received:
        return INTERRUPTED if received[0] == signal.SIGINT else PREEMPTED
    return 1 if failed else 0


def start(job: Job, slot: Slot) -> Running:
    job.directory.mkdir(parents=True, exist_ok=True)
    output = (job.directory / OUTPUT).open("ab")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, slot.cores)  # the process inherits it, and XLA starts a thread for each
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "jaxdp", "train", *job.arguments],
            env=os.environ | slot.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    finally:
        os.sched_setaffinity(0, before)
    return Running(job, child, output, time.monotonic())


def report(ended: Running, count: str) -> bool:
    """Print the result of a run; return True if it finished."""
    ended.output.close()
    took = f"{time.monotonic() - ended.since:.1f} s"
    final = [r for r in read(ended.job.directory / "metrics.jsonl") if r.get("split") == "final"]
    if ended.child.returncode or not final:
        lines = (ended.job.directory / OUTPUT).read_text(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"see {ended.job.directory / OUTPUT}"
        print(f"[{count}] {ended.job.name}  exit code {ended.child.returncode} after {took}: {reason}", flush=True)
        return False
    numbers = [f"{name} {final[-1][name]:.4f}" for name in SHOWN if isinstance(final[-1].get(name), float)]
    print("  ".join([f"[{count}] {ended.job.name}", *numbers, took]), flush=True)
    return True
