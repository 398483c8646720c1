"""Name the processes that compute slowly: each times a microbatch of its own, without collectives.

A slow device delays all alike, so the time of an update does not show which one it is, but it shows
when to measure: rank 0 watches it, and asks all processes to measure when it rises, and now and
then without a rise."""

import contextlib
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp.audit.program import Probe
from jaxdp.cpu import on_cpu
from jaxdp.process.context import SLOW
from jaxdp.train.run import Progress, Run
from jaxdp.train.state import Batch, TrainState

RISE, RECENT, BEFORE = 1.1, 5, 50  # the factor of a rise, from BEFORE updates to RECENT ones
ENOUGH = 20  # updates before the first rise
PAUSE = 60.0  # seconds before the first measurement without a rise
MOST = 40  # updates whose time measurements may take at once
SHARE = 0.005  # of the time, which measurements may take in the long run
BLOCK, BLOCKS = 0.05, 3  # the least of three means over 50 ms: longer than a scheduler's pauses
ROUND = 7  # measurements that name a process, one after each update


class SlowDevices:
    """factor: name a process that takes this many times as long as the median of the others."""

    def __init__(self, probe: Probe, factor: float, watch: Any):
        self.probe, self.factor, self.watch = probe, factor, watch
        self.times: list[float] = []  # seconds of the last updates
        self.before: tuple[int, float] | None = None  # (update, time)
        self.debt = 0.0  # seconds that measurements took beyond their share of the time
        self.start = time.perf_counter() + PAUSE  # from then on, also without a rise
        self.round: list[list[float]] = []  # the factors of all ranks, in this round
        self.measured: deque[Sequence[float]] = deque(maxlen=ROUND)  # the times in the last round
        self.named: dict[int, float] = {}  # {rank: the factor with which it was named last}

    def is_due(self, run: Run, progress: Progress, last: bool = False) -> bool:
        now, step = time.perf_counter(), progress.step
        if self.before is not None and run.checkpoints.context.is_root:
            passed = now - self.before[1]
            self.add_time(passed / max(1, step - self.before[0]))
            self.debt = max(0.0, self.debt - SHARE * passed)
            is_time = now > self.start and self.debt == 0
            if not self.round and (is_time or (self.has_risen() and self.may_measure())):
                self.watch.request("probe")
        self.before = (step, now)
        return not last and (self.watch.is_asked("probe") or bool(self.round))

    def add_time(self, seconds: float) -> None:
        """Add the time of an update, unless the loop only dispatched it, as it does after each
        pause.
        """
        if not self.times or seconds > 0.25 * statistics.median(self.times):
            self.times = [*self.times, seconds][-BEFORE - RECENT :]

    def may_measure(self) -> bool:
        return self.debt < MOST * statistics.median(self.times)

    def has_risen(self) -> bool:
        """Return whether the last updates took longer than those before."""
        earlier, recent = self.times[:-RECENT], self.times[-RECENT:]
        return len(earlier) >= ENOUGH and low(recent) > RISE * low(earlier)

    def check(self, run: Run, progress: Progress, batch: Batch) -> None:
        """Measure all processes; name those that are slow, at the end of a round of measurements."""
        with self.watch.suspend_timeout("measures its devices"):
            times, shares = self._measure(run, progress.state, batch)
        self.measured.append(times)
        factors = with_shares(times, shares) if on_cpu() else relative(times)
        run.log.events.note(
            "probe", progress.step, ms=[round(1e3 * t, 3) for t in times], factors=factors
        )
        for rank in self.judge(factors):
            self._name(run, progress.step, rank, shares)
        self.before = None
        if not self.round:
            del self.times[-RECENT:]  # a rise is one of the updates that follow

    def judge(self, factors: list[float]) -> list[int]:
        """Add a measurement to the round; return the ranks to name, and reset the round at its end.

        A rank is slow if the median of ROUND measurements says so, since a single one errs by some
        percent, and by more while another program runs for a moment. The round ends earlier if most
        find less than half of the excess."""
        self.round.append(factors)
        half, count = 0.5 + 0.5 * self.factor, len(self.round)
        above = (np.array(self.round) > half).mean(0)
        if count < 2 or (count < ROUND and above.max() >= 0.5):
            return []
        medians = np.median(self.round, 0).tolist()
        self.round = []
        # A rank that is not named any more has recovered.
        self.named = {rank: f for rank, f in self.named.items() if medians[rank] > half}
        slow = {
            rank: f
            for rank, f in enumerate(medians)
            if count == ROUND and f > self.factor * self.named.get(rank, 1.0)
        }
        self.named |= slow
        return [*slow]

    def _name(self, run: Run, step: int, rank: int, shares: Sequence[float]) -> None:
        context, factor = run.checkpoints.context, self.named[rank]
        facts = context.exchange(
            "state of the devices", condition() if context.rank == rank else ""
        )[rank]
        share = 1 / relative([1 / s for s in shares])[rank]
        times = [1e3 * statistics.median(of_rank) for of_rank in zip(*self.measured)]
        name = f"{context.title(rank)}, process {context.pids[rank]}"
        text = f"{name}, computes slowly, by a factor of {factor:.2f}{cause(times, rank, factor, share)}{facts}"
        run.log.events.note("slow", step, rank=rank, factor=round(factor, 3), reason=text)
        run.log.writer.say(f"warning: {text}")

    def _measure(
        self, run: Run, state: TrainState, batch: Batch
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Return (the seconds in which each process computes a microbatch, its share of CPU time
        meanwhile).
        """
        inputs = self.probe.inputs(state)

        def compute():
            return jax.block_until_ready(self.probe.fingerprints(*inputs, batch, alone=True))

        compute()  # which may compile
        run.checkpoints.context.barrier("measurement", SLOW)
        began, used = time.perf_counter(), time.process_time()
        seconds = min(mean_time(compute) for _ in range(BLOCKS))
        passed = time.perf_counter() - began
        share = max((time.process_time() - used) / passed, 1e-3)
        self.debt += passed
        texts = run.checkpoints.context.exchange("measurement", json.dumps([seconds, share]), SLOW)
        times, shares = zip(*map(json.loads, texts))
        return times, shares


def cause(times: Sequence[float], rank: int, factor: float, share: float) -> str:
    """Return what was measured of a slow process: the times if they show it, and its CPU time if
    that does.

    times: milliseconds, of each rank. share: of the CPU time that the others got.
    """
    others, text = statistics.median([*times[:rank], *times[rank + 1 :]]), ""
    if times[rank] >= 0.5 * (1.0 + factor) * others:
        text = f": a microbatch takes {times[rank]:.3g} ms, in the others {others:.3g} ms (medians of {ROUND} "
        text += "measurements)"
    if on_cpu() and (share < 0.9 or not text):
        text += f"; it got {share:.2f} times their CPU time: it was stopped, or other programs use its cores"
    return text


def mean_time(f: Callable[[], Any]) -> float:
    """Return the mean seconds of f() over a time of at least BLOCK."""
    began, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < BLOCK or not count:
        f()
        count += 1
    return elapsed / count


def low(times: Sequence[float]) -> float:
    """Return the lower quartile: other programs make some updates slower, but none faster."""
    return statistics.quantiles(times, n=4)[0]


def relative(times: Sequence[float]) -> list[float]:
    """Return the time of each rank, relative to the median of the others."""
    return [
        t / statistics.median([*times[:rank], *times[rank + 1 :]]) for rank, t in enumerate(times)
    ]


def with_shares(times: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return the relative times; for a rank that takes longer, its lack of CPU time, which varies
    less, if larger.
    """
    return [
        max(t, lack) if t > 1 else t
        for t, lack in zip(relative(times), relative([1 / s for s in shares]))
    ]


def condition() -> str:
    """Return clock and temperature of this process's GPUs, if NVML reports them."""
    with contextlib.suppress(Exception):  # no pynvml, no driver, or a GPU that does not tell
        import pynvml

        pynvml.nvmlInit()
        words = []
        for device in jax.local_devices():
            gpu = pynvml.nvmlDeviceGetHandleByIndex(device.local_hardware_id)
            now = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
            most = pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM)
            words.append(
                f"{now} of {most} MHz, {pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)} C"
            )
        return f"; its GPUs: {'; '.join(words)}"
    return ""
