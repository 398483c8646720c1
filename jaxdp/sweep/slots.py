"""Run several trainings at once on one host, each on its share of the GPUs."""

import os
import pathlib
import re
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from jaxdp.config import Config
from jaxdp.config.validation import as_saved, changed_numbers, flatten
from jaxdp.errors import INTERRUPTED, PREEMPTED, UsageError
from jaxdp.metrics.jsonl import read
from jaxdp.process import gpus, hosts
from jaxdp.process.signals import handled
from jaxdp.report.read import is_held, mapping
from jaxdp.report.table import METRICS
from jaxdp.run import rundir
from jaxdp.sweep.forked import Forked, preload

OUTPUT = "output.txt"


class Trial(NamedTuple):
    """A run of the sweep. arguments: of `jaxdp train`."""

    directory: pathlib.Path
    arguments: list[str]
    config: Config

    def is_finished(self) -> bool:
        """Return True if this run is complete, with the same data and evaluation; else its training
        continues it.

        Raises UsageError if its directory has a run of another config.
        """
        try:
            saved = mapping(self.directory / "config.yaml")
        except UsageError:  # its training writes the file again
            saved = {}
        if not saved:
            return False
        changed = changed_numbers(saved, self.config)
        if changed and not self.config.resume.force:
            raise UsageError(
                f"run_dir: {str(self.directory)!r} was trained with another config ({changed[0]}); choose another"
            )
        old, new = map(flatten, as_saved(saved, self.config))
        keys = [key for key in {**old, **new} if re.match(r"(steps|epochs)$|(data|eval)\.", key)]
        same = not changed and all(old.get(key) == new.get(key) for key in keys)
        return same and any(
            record.get("split") == "final" for record in read(self.directory / "metrics.jsonl")
        )


class Running(NamedTuple):
    trial: Trial
    child: Forked
    since: float


def make_slots(jobs: int | None, devices: int | None, count: int) -> list[dict[str, str]]:
    """Divide the devices of this host among at most `count` runs; return the variables of each
    run's process.

    jobs: runs at once; None: one for each GPU, or for `devices` of them, and without GPUs one for
    each core. devices: GPUs of a run (`parallel.devices`). Raises UsageError if there are too few
    GPUs."""
    cores = max(1, int(min(len(os.sched_getaffinity(0)), hosts.core_quota())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        gpus.listed(visible) if visible and gpus.count() else [str(i) for i in range(gpus.count())]
    )
    each = devices or (max(1, len(names) // jobs) if jobs else 1)
    jobs = jobs or max(1, len(names) // each if names else cores)
    if names and jobs * each > len(names):
        raise UsageError(
            f"--jobs: {jobs} runs on {each} GPUs each, but there are {len(names)}; give a smaller number"
        )
    jobs = max(1, min(jobs, count))
    if names:
        return [
            {"CUDA_VISIBLE_DEVICES": ",".join(names[i * each : (i + 1) * each])}
            for i in range(jobs)
        ]
    return [{}] * jobs  # not tied to cores, which other programs may use


def run_all(
    trials: Sequence[Trial], slots: Sequence[dict[str, str]]
) -> tuple[int, list[pathlib.Path]]:
    """Train each in a process, with its output in `output.txt`, and print a line about each.

    SIGTERM, SIGUSR1 and SIGHUP are sent on to the processes, which save and end. A run that another
    process trains waits for it. Returns the exit code (0, 1 if a run failed, 75 or 130 after a
    signal), and the directories that failed.
    """
    waiting, running, failed, done = list(trials), dict[int, Running](), list[pathlib.Path](), 0
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        if number != signal.SIGINT:  # a terminal sends it to the processes too
            for process in running.values():
                process.child.send_signal(number)

    for number in handled():
        if number != signal.SIGUSR2:
            signal.signal(number, stop)
    if trials:
        preload()
    try:
        while running or (waiting and not received):
            for i, slot in enumerate(slots):
                if i in running and running[i].child.poll() is not None:
                    done += 1
                    ended = running.pop(i)
                    if not report(ended, f"{done}/{len(trials)}"):
                        failed.append(ended.trial.directory)
                free = i not in running and not received
                trial = (
                    next((t for t in waiting if not is_held(t.directory)), None) if free else None
                )
                if trial is not None:
                    waiting.remove(trial)
                    if trial.is_finished():  # meanwhile, by another process
                        done += 1
                    else:
                        running[i] = start(trial, slot)
            time.sleep(0.05)
    finally:
        for process in running.values():
            process.child.kill()
    if received:
        return INTERRUPTED if received[0] == signal.SIGINT else PREEMPTED, failed
    return 1 if failed else 0, failed


def start(trial: Trial, slot: dict[str, str]) -> Running:
    trial.directory.mkdir(parents=True, exist_ok=True)
    with open(trial.directory / OUTPUT, "ab", opener=rundir.no_link) as output:
        child = Forked(
            ["train", *trial.arguments], os.environ | slot, "jaxdp trial", output.fileno()
        )
    return Running(trial, child, time.monotonic())


def report(ended: Running, count: str) -> bool:
    """Print the result of a run; return True if it finished."""
    directory, code, took = (
        ended.trial.directory,
        ended.child.poll(),
        f"{time.monotonic() - ended.since:.1f} s",
    )
    final = [r for r in read(directory / "metrics.jsonl") if r.get("split") == "final"]
    if code or not final:
        lines = (
            (directory / OUTPUT).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        )
        print(
            f"[{count}] {directory.name}  exit code {code} after {took}: {(lines or [''])[-1]}",
            flush=True,
        )
        return False
    numbers = [
        f"{name} {final[-1][name]:.4f}"
        for name in METRICS
        if isinstance(final[-1].get(name), float)
    ]
    print("  ".join([f"[{count}] {directory.name}", *numbers, took]), flush=True)
    return True
