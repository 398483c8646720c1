"""The audit: every so many updates, all devices compute the same microbatch, and those that differ
are named.

It runs between two updates, on the state that the next one will use. Fingerprints of gradients and
of the copies of the state are compared through the coordinator; where two differ, all devices
compute again, and the majority is right."""

import base64
import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxdp.audit.program import Groups, Probe, Verdict, judge
from jaxdp.data.dataset import first_example
from jaxdp.errors import RunFailed
from jaxdp.parallel.placement import of_this_process
from jaxdp.process import membership
from jaxdp.process.context import SLOW
from jaxdp.run.driver import Training
from jaxdp.train.observer import Observer
from jaxdp.train.run import Progress, Run
from jaxdp.train.state import Batch, TrainState

AGAIN = 3  # repetitions that tell a device from software
WAIT = 60.0  # seconds for the end of a generation that a process leaves


class Audit(Observer):
    """Audits of a run, before anything that comes later in the order of the observers reads the new
    state.

    every: updates between two audits; there is one after the last update too. action: see the
    config's `audit`.
    """

    def __init__(self, training: Training, every: int | None, action: str):
        self.training, self.every, self.action = training, every or 0, action
        self.continuation, self.progress = training.continuation, training.progress
        self.run = run = training.run
        first = first_example(run.data.train.dataset)
        dims = {name: np.ndim(x) for name, x in first.items()}
        self.probe = Probe(run.strategy, run.step, dims)
        self.last = -1  # the update after which the last audit was made
        self.batch: Batch | None = None
        self.named: set[Any] = set()
        self.failed = False  # then a later audit that passes does not make the state right
        self.measure = self._measure  # one object: the monitor knows what it has compiled
        self._titles: list[str] = []
        self._groups: list[Groups] = []

    def start(self, run: Run, progress: Progress) -> None:
        if self.last < 0:
            self.last = progress.start
            run.checkpoints.trusted = self._passed_before()

    def before(self, updates: range, batch: Batch) -> None:
        self.batch = batch

    def after(self, updates: range, state: TrainState, metrics: Mapping[str, Any]) -> None:
        if self.every > 0 and not 0 <= updates[-1] - self.last < self.every:
            self.check()

    def pause(self, step: int, last: bool) -> None:
        if last and self.batch is not None and self.every > 0 and step != self.last:
            self.check()

    def _passed_before(self) -> int:
        """Return the last update that an audit had passed before this run, as its checkpoints
        store, or 0.
        """
        if self.progress.recovered and self.continuation.trusted:  # only such states were copied
            return self.progress.start
        checkpoints = self.run.checkpoints

        def passed() -> int:
            return max((m.get("trusted", 0) for m in checkpoints.metas().values()), default=0)

        return checkpoints.context.of_root("audited", passed, SLOW)

    def check(self) -> None:
        """Audit the devices after an update; its time is none of an update. Raises RunFailed if the
        action is to end this process or all.
        """
        step = self.last = self.progress.step
        self.training.meter.pause(step, False)
        if not self._titles:
            self._describe()
        name = f"the audit after update {step}"

        def compute() -> np.ndarray:
            return self.training.watch.run_step(name, self.measure, self.progress.state, self.batch)

        state, runs = len(self._groups), [compute()]
        if len(self._titles) == 1:  # which is compared in time
            runs.append(compute())
        groups = [*self._groups, *[self._same_kind] * (len(runs[0][0]) - state)]
        verdict = judge(runs, groups, state)
        if verdict.devices:
            verdict = judge([*runs, *(compute() for _ in range(AGAIN))], groups, state)
        if verdict.software:
            self.every = 0
            text = (
                f"audit: {len(verdict.unstable)} of {len(self._titles)} devices differ from themselves when they "
                "repeat a microbatch: an operation of the model, loss or transform is not deterministic; there are no "
                "further audits"
            )
            self._warn("software", text)
        if verdict.devices:
            self.failed = True
            self._act(verdict)
        elif not self.failed:
            self.run.checkpoints.trusted = step

    def _measure(self, state: TrainState, batch: Batch) -> np.ndarray:
        """Return the fingerprints [device, leaf] of all processes."""
        prints = self.probe.fingerprints(state, batch)
        shards = sorted(prints.addressable_shards, key=lambda s: s.index[0].start or 0)
        local = np.concatenate([np.asarray(s.data) for s in shards])
        damaged = self.continuation.drop_damaged()
        text = json.dumps([damaged, base64.b64encode(local.tobytes()).decode()])
        context, rows = self.run.checkpoints.context, []
        for rank, answer in enumerate(context.exchange("audit", text, SLOW)):
            damaged, row = json.loads(answer)
            rows.append(base64.b64decode(row))
            if damaged:
                owner = context.title(rank)
                text = f"audit: a snapshot in the memory of {owner} is damaged; it is not used"
                self._warn(("snapshot", rank), text)
        return np.frombuffer(b"".join(rows), np.uint32).reshape(-1, local.shape[1])

    def _describe(self) -> None:
        """Exchange the names and kinds of all devices; warn of leaves that have one copy only."""
        context, devices = self.run.checkpoints.context, self.probe.strategy.devices
        local = [devices[i] for i in of_this_process(devices)]
        # What other processes do not know.
        own = [[kind_of(d), d.local_hardware_id, getattr(d, "uuid", None)] for d in local]
        texts = context.exchange("devices", json.dumps(own), SLOW)
        facts = [fact for text in texts for fact in json.loads(text)]
        self._same_kind = grouped(kind for kind, *_ in facts)
        for i, (device, (_, number, serial)) in enumerate(zip(devices, facts)):
            rank, owner = device.process_index, "this process"
            if context.size > 1:
                owner = f"{context.title(rank)}, process {context.pids[rank]}"
            name = (
                f"{device.device_kind} {number} of {owner}{f', serial {serial}' if serial else ''}"
            )
            self._titles.append(f"device {i} ({name})")
        for x in jax.tree.leaves(self.probe.strategy.abstract(padded=True).replace(kept={})):
            indices = x.sharding.devices_indices_map(x.shape)
            self._groups.append(grouped(str(indices[device]) for device in devices))
        single = sum(max(map(len, groups)) == 1 for groups in self._groups)
        if single and len(devices) > 1:
            self.run.log.writer.say(
                f"warning: audit: {single} of the state's {len(self._groups)} leaves have one copy only, a shard of "
                "parallel.zero or a replica of outer: the audit cannot compare them"
            )

    def _act(self, verdict: Verdict) -> None:
        context, step = self.run.checkpoints.context, self.last
        text = f"audit after update {step}: {self._text(verdict)}"
        devices = self.probe.strategy.devices
        faulty = {devices[i].process_index for i in verdict.devices}
        for i, leaf in verdict.devices.items():
            where = {"device": i, "rank": devices[i].process_index, "leaf": self.probe.names[leaf]}
            self.run.log.events.note("audit_failed", step, reason=text, **where)
        if self.action == "warn":
            return self._warn(frozenset(verdict.devices), text, log=False)
        self._set_aside()
        survives = self.continuation.survives
        if self.action == "expel" and verdict.certain and survives and len(faulty) < context.size:
            if context.rank in faulty:
                raise RunFailed(f"{text}; this process leaves the job")
            member = membership.joined()
            if member.has_ended(WAIT):
                member.check_generation()
        raise RunFailed(f"{text}; audit.action: {self.action} ends the job", rank=0)

    def _set_aside(self) -> None:
        """Let no state that was copied since the last audit that passed be used again."""
        checkpoints = self.run.checkpoints
        passed = checkpoints.trusted or 0
        checkpoints.wait()
        self.continuation.drop_after(passed)
        if checkpoints.writes:
            for step in checkpoints.steps():
                if step > passed:
                    why = f"checkpoint {step} may be wrong: made after the last audit that passed, of {passed}"
                    checkpoints.set_aside(step, "suspect", why, self.run.log.writer.say)
        checkpoints.context.barrier("suspects", SLOW)

    def _text(self, verdict: Verdict) -> str:
        names = " and ".join(self._titles[i] for i in verdict.devices)
        leaf = next(iter(verdict.devices.values()))
        path, state = self.probe.names[leaf], leaf < len(self._groups)
        others = f"of the {len(self._titles) - len(verdict.devices)} other devices"
        if not verdict.certain:
            which = "their copies" if state else "their results"
            return f"{names} differ: {which} of {path}; with no majority, it is unknown which of them is wrong"
        if verdict.unstable:
            also = ""
            if len(self._titles) == 1:
                also = " (or an operation of the model is not deterministic)"
            return f"{names} computes wrongly: {path} differs between repetitions on the same input{also}"
        verb = "differ" if len(verdict.devices) > 1 else "differs"
        if state:
            return f"{names} has a wrong copy of the state: {path} {verb} from that {others}"
        return f"{names} computes wrongly: {path} {verb} from that {others}, in each of {AGAIN + 1} repetitions"

    def _warn(self, what: Any, text: str, log: bool = True) -> None:
        if what not in self.named:
            self.named.add(what)
            self.run.log.writer.say(f"warning: {text}")
            if log:
                self.run.log.events.note("audit", self.last, reason=text)


def grouped(keys: Iterable[Any]) -> list[list[int]]:
    """Return the indices of equal keys."""
    groups: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return [*groups.values()]


def kind_of(device: jax.Device) -> str:
    """Return the kind of a device: only those of one kind have the same bits."""
    if device.platform == "cpu":
        with (
            contextlib.suppress(OSError, StopIteration),
            open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file,
        ):
            return next(
                line.partition(":")[2].strip() for line in file if line.startswith("model name")
            )
    return device.device_kind
