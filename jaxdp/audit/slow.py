"""Name the process that computes slowly: each times the same microbatch alone, without collectives.

A slow device delays all alike, so the time of an update does not show which one it is, but it shows when to measure:
rank 0 watches it, and asks all processes to measure when it rises, and once a run has lasted a minute.
"""

import collections
import contextlib
import statistics
import time
from typing import Any

import jax

from jaxdp.audit.program import Probe, Sample
from jaxdp.core.state import Batch
from jaxdp.training.run import Progress, Run

RISE, RECENT, BEFORE = 1.1, 5, 50  # the factor of a rise, from the median of BEFORE updates to that of RECENT ones
ENOUGH = 20  # updates before the first rise
FIRST = 60.0  # seconds until there is a measurement without a rise
BLOCK, BLOCKS = 0.05, 3  # the least of three means over 50 ms each: longer than a scheduler's pauses
WAIT = 600.0  # seconds that one process may take longer than another, such as to compile


class SlowDevices:
    """factor: name a process that takes this many times as long as the median of the others."""

    def __init__(self, probe: Probe, factor: float):
        self.probe, self.factor = probe, factor
        self.times: collections.deque[float] = collections.deque(maxlen=BEFORE + RECENT)  # seconds, of updates
        self.before: tuple[int, float] | None = None  # (update, time)
        self.level = 0.0  # seconds of an update at which nothing was found
        self.expires = 0  # the update after which `level` no longer counts
        self.first = time.monotonic() + FIRST
        self.named: dict[int, float] = {}  # {rank: the factor with which it was named last}

    def is_due(self, run: Run, progress: Progress) -> bool:
        now, step = time.perf_counter(), progress.step
        if self.before is not None and run.checkpoints.context.is_root:
            self.times.append((now - self.before[1]) / max(1, step - self.before[0]))
            if self.has_risen(step) or time.monotonic() > self.first:
                self.first = float("inf")
                self.level, self.expires = statistics.median([*self.times][-RECENT:]), step + BEFORE
                run.hooks.watch.request_probe()
        self.before = (step, now)
        return run.hooks.watch.probe_is_asked()

    def has_risen(self, step: int) -> bool:
        """Return whether updates take longer than before, and longer than at the last measurement."""
        *earlier, a, b, c, d, e = self.times if len(self.times) >= ENOUGH + RECENT else [0.0] * 6
        level = self.level if step <= self.expires else 0.0
        return statistics.median((a, b, c, d, e)) > RISE * max(level, statistics.median(earlier))

    def check(self, run: Run, progress: Progress, batch: Batch) -> None:
        """Measure all processes; measure again before one is named."""
        context = run.checkpoints.context
        work = lambda: self._measure(run, *self.probe.sample(progress.state, batch, 0))
        with run.hooks.watch.suspend_timeout("measures its devices"):
            times = work()
            rank, factor = slowest(times)
            if factor > self.factor:
                times = work()
                again, factor = slowest(times)
                factor = factor if again == rank else 1.0
        run.log.events.note("probe", progress.step, ms=[round(1e3 * t, 3) for t in times])
        if factor > self.factor * self.named.get(rank, 1.0):
            self.named[rank] = factor
            facts = context.exchange("state of the devices", condition() if context.rank == rank else "")[rank]
            others = statistics.median(t for r, t in enumerate(times) if r != rank)
            text = (
                f"{context.title(rank)}, process {context.pids[rank]}, computes slowly: a microbatch takes "
                f"{1e3 * times[rank]:.1f} ms there, {factor:.2f} times as long as in the others ({1e3 * others:.1f} ms)"
                f"{facts}"
            )
            run.log.events.note("slow", progress.step, rank=rank, factor=round(factor, 3), reason=text)
            run.log.writer.say(f"warning: {text}")
        self.before = None

    def _measure(self, run: Run, leaves: list[jax.Array], sample: Sample) -> list[float]:
        """Return the seconds that each process takes to compute the sample."""
        compute = lambda: jax.block_until_ready(self.probe.fingerprints(leaves, sample))
        compute()
        run.checkpoints.context.barrier("measurement", WAIT)
        text = repr(min(mean_time(compute) for _ in range(BLOCKS)))
        return [float(t) for t in run.checkpoints.context.exchange("measurement", text, WAIT)]


def mean_time(f: Any) -> float:
    """Return the mean seconds of f() over a time of at least BLOCK."""
    began, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < BLOCK or not count:
        f()
        count += 1
    return elapsed / count


def slowest(times: list[float]) -> tuple[int, float]:
    """Return (the slowest rank, its time relative to the median of the others)."""
    rank = max(range(len(times)), key=lambda r: times[r])
    others = [t for r, t in enumerate(times) if r != rank]
    return rank, times[rank] / statistics.median(others)


def condition() -> str:
    """Return clock and temperature of this process's GPUs, if NVML tells."""
    with contextlib.suppress(Exception):  # no pynvml, no driver, or a GPU that does not tell
        import pynvml

        pynvml.nvmlInit()
        words = []
        for device in jax.local_devices():
            gpu = pynvml.nvmlDeviceGetHandleByIndex(device.local_hardware_id)
            now = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
            most = pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM)
            words.append(f"{now} of {most} MHz, {pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)} C")
        return f"; its GPUs: {'; '.join(words)}"
    return ""
